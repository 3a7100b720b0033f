"""Real ComfyUI in this process: the pack loaded as ComfyUI loads it, and tiny FLUX checkpoints in every format."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.comfy.tiny import TinyCheckpoints

ROOT = Path(__file__).resolve().parents[2]
PACK = "egrpo_pack"


@pytest.fixture(scope="session")
def pack(comfy_path: Path) -> ModuleType:
    """The pack's top-level module; submodules by :func:`pack_module`."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACK] = module
        spec.loader.exec_module(module)
    return sys.modules[PACK]


@pytest.fixture(scope="session")
def pack_module(pack: ModuleType):
    """``pack_module("nodes.comfy_policy")``: a submodule of the pack as ComfyUI has it."""
    return lambda name: importlib.import_module(f"{PACK}.{name}")


@pytest.fixture(scope="session")
def tiny(comfy_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """Random tiny FLUX checkpoints: diffusers fp32, BFL fp8 and scaled fp8."""
    torch.set_num_threads(2)
    return TinyCheckpoints(tmp_path_factory.mktemp("tiny"))
