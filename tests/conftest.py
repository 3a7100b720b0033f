"""Fixtures that need ComfyUI, and a loud note of how many tests its absence has cost."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tests  # noqa: F401  claims the name for this folder before ComfyUI, which has a tests package, is on sys.path
from tools.comfyui import ComfyServer, find_comfyui

TESTS = Path(__file__).resolve().parent
NEEDS_COMFYUI = ("comfy", "browser")
COMFYUI = find_comfyui()

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For servers on tiny models: two threads that wait for each other on a busy machine cost more than they gain."""

not_run: dict[Path, int] = {}


def _needs_comfyui(path: Path) -> bool:
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).parts[0] in NEEDS_COMFYUI


def pytest_report_header() -> str:
    return f"ComfyUI: {COMFYUI or 'not found'}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what imports ComfyUI when there is none; importing it would be an error, not a skip."""
    if COMFYUI is not None or collection_path.suffix != ".py" or not _needs_comfyui(collection_path):
        return None
    if collection_path.name.startswith("test_"):
        functions = ast.walk(ast.parse(collection_path.read_text(encoding="utf-8")))
        not_run[collection_path] = sum(
            isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name.startswith("test")
            for item in functions
        )
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not not_run:
        return
    terminalreporter.section("WARNING: ComfyUI was not found", sep="!", yellow=True, bold=True)
    terminalreporter.line(
        f"WARNING: {sum(not_run.values())} test functions that need ComfyUI were NOT RUN:", yellow=True
    )
    for path, count in sorted(not_run.items()):
        terminalreporter.line(f"WARNING:   {count:3d} in {path.relative_to(TESTS)}", yellow=True)
    terminalreporter.line(
        "WARNING: set COMFYUI_PATH to a ComfyUI folder, or run make demo once to clone one.", yellow=True
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """On tensors of these sizes threads only wait for each other; on a busy machine a test takes minutes that way."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def comfy_path() -> Path:
    """ComfyUI's folder, importable and told to stay on the CPU: for tests that import it."""
    assert COMFYUI is not None, "tests that need ComfyUI belong in tests/comfy or tests/browser"
    from tests.comfy.pack import use_comfyui

    use_comfyui(COMFYUI)
    return COMFYUI


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A running ComfyUI on the CPU with the pack linked in, shared by all tests of the session."""
    assert COMFYUI is not None, "tests that need ComfyUI belong in tests/comfy or tests/browser"
    with ComfyServer(
        COMFYUI, base=tmp_path_factory.mktemp("comfyui"), cpu=True, environment=dict(ONE_THREAD)
    ) as running:
        yield running
