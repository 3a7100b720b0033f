"""What installers read agrees with itself, and ComfyUI is looked for where the README says."""

import re
from pathlib import Path

import pytest

import egrpo
from tools import comfyui
from tools.comfyui import ComfyError, find_comfyui, requirements_without_torch

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def listed(key):
    return re.findall(r'"([^"]+)"', re.search(rf"^{key} = \[(.*?)\]", PYPROJECT, re.MULTILINE | re.DOTALL).group(1))


def test_requirements_are_the_projects_dependencies_without_the_front_end():
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    front_end = [line for line in listed("dependencies") if line.startswith("comfyui-frontend-package")]
    assert front_end == ["comfyui-frontend-package>=1.45.0"]
    assert requirements == [line for line in listed("dependencies") if line not in front_end]


@pytest.mark.parametrize("requirement", listed("dependencies"))
def test_requirements_have_no_upper_pins(requirement):
    assert re.fullmatch(r"[\w-]+>=[\d.]+", requirement)


def test_version_has_three_parts_as_the_registry_asks():
    assert re.fullmatch(r"\d+\.\d+\.\d+", egrpo.__version__)


def test_the_front_end_folder_is_stated_once():
    assert not re.search(r"^web\s*=", PYPROJECT, re.MULTILINE)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Functions that put a ComfyUI at each place where one is looked for."""
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setattr(comfyui, "PACK", tmp_path / "Other" / "custom_nodes" / "pack")
    monkeypatch.setattr(comfyui, "CLONE_FOLDER", tmp_path / "clone")
    monkeypatch.setattr(comfyui.Path, "home", lambda: tmp_path)

    def install(name):
        folder = tmp_path / name
        (folder / "comfy").mkdir(parents=True)
        (folder / "main.py").touch()
        (folder / "comfy" / "samplers.py").touch()
        return folder

    return install


def test_comfyui_is_found_in_the_stated_order(places, monkeypatch):
    assert find_comfyui() is None
    for name in ("clone", "ComfyUI", "Other"):
        folder = places(name)
        assert find_comfyui() == folder
    chosen = places("chosen")
    monkeypatch.setenv("COMFYUI_PATH", str(chosen))
    assert find_comfyui() == chosen
    monkeypatch.setenv("COMFYUI_PATH", "none")
    assert find_comfyui() is None


def test_a_wrong_comfyui_path_is_named(places, monkeypatch, tmp_path):
    places("ComfyUI")
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ComfyError, match="nowhere, which is not a ComfyUI folder"):
        find_comfyui()


def test_comfyuis_requirements_leave_torch_alone(tmp_path):
    text = "# comment\ntorch\ntorchsde\ntorchvision\ntorchaudio>=2\n\nnumpy>=1.25.0\n"
    (tmp_path / "requirements.txt").write_text(text)
    assert requirements_without_torch(tmp_path) == ["torchsde", "numpy>=1.25.0"]


def test_the_tests_are_no_package():
    """With an __init__.py here pytest would import the pack's own __init__.py, which only works inside ComfyUI; one in
    tests/comfy would hide ComfyUI's ``comfy``."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
