"""Loading the pack into this process exactly as ComfyUI does, beside a ComfyUI that stays on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACK = "egrpo_pack"


def use_comfyui(path: Path) -> None:
    """Put ComfyUI first on sys.path (this repository's ``nodes`` must not hide its nodes.py) and keep it on the CPU."""
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    # ComfyUI puts its comfy folder first on the path later on, where comfy/utils.py would hide this package.
    import utils.install_util  # noqa: F401
    from comfy.cli_args import args

    args.cpu = True


def pack_module(name: str = "") -> ModuleType:
    """The pack, or its submodule ``name`` ("nodes.comfy_policy"); ComfyUI must be importable."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACK] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{PACK}.{name}") if name else sys.modules[PACK]
