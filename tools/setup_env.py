"""Bring ``.venv`` up to date: this pack's requirements, the test tools, and ComfyUI's requirements where it is found.

``make setup``, ``make demo`` and ``make test`` call it with the system's Python. What is installed is remembered by a
digest, so that a second call takes no time and a changed file or a new ComfyUI is noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import subprocess
import sys
import time

from tools.comfyui import PACK, ComfyError, clone_comfyui, find_comfyui, install_requirements, pip_install

VENV = PACK / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clone", action="store_true", help="clone ComfyUI into .comfyui/ where none is found")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="[setup] %(message)s")
    if sys.version_info < (3, 10):
        print(f"[setup] Python 3.10 or newer is needed, this is {sys.version.split()[0]}: use make PYTHON=python3.12")
        return 1
    try:
        _setup(options.clone)
    except (ComfyError, subprocess.CalledProcessError) as error:
        print(f"[setup] {error}", file=sys.stderr)
        return 1
    return 0


def _setup(clone: bool) -> None:
    comfy = find_comfyui()
    if comfy is None and clone:
        comfy = clone_comfyui()
    if not PYTHON.exists():
        _say("creating .venv")
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    requirements = (PACK / "requirements.txt").read_text(encoding="utf-8").split("\n")
    test_tools = _test_tools((PACK / "pyproject.toml").read_text(encoding="utf-8"))
    _once("PyTorch (a large download the first time)", ["torch", "torchvision"])
    _once("the pack's requirements and test tools", [line for line in requirements if line] + test_tools)
    if comfy is not None:
        stated = (comfy / "requirements.txt").read_text(encoding="utf-8")
        with _Stamp("comfyui", stated) as stamp:
            if stamp.stale:
                _say(f"installing the requirements of ComfyUI in {comfy}")
                install_requirements(PYTHON, comfy)


def _once(what: str, arguments: list[str]) -> None:
    with _Stamp(re.sub(r"\W+", "-", what.split("(")[0].strip()), "\n".join(arguments)) as stamp:
        if stamp.stale:
            _say(f"installing {what}")
            pip_install(PYTHON, arguments)


def _test_tools(pyproject: str) -> list[str]:
    # By expression, because tomllib only comes with Python 3.11.
    listed = re.search(r"^test = \[(.*?)\]", pyproject, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', listed.group(1))


class _Stamp:
    """Remembers in the environment that ``content`` has been installed, once the block has passed without error."""

    def __init__(self, name: str, content: str) -> None:
        self._path = VENV / f".installed-{name}"
        self._digest = hashlib.sha256(content.encode("utf-8")).hexdigest()
        self.stale = not self._path.is_file() or self._path.read_text() != self._digest
        self._started = time.monotonic()

    def __enter__(self) -> _Stamp:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.stale and kind is None:
            self._path.write_text(self._digest)
            _say(f"done in {time.monotonic() - self._started:.0f} s")


def _say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
