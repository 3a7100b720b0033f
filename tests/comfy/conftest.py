"""Real ComfyUI in this process: the pack loaded as ComfyUI loads it, and tiny FLUX checkpoints in every format."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.comfy import pack as pack_loader
from tests.comfy.tiny import TinyCheckpoints


@pytest.fixture(scope="session")
def pack(comfy_path: Path) -> ModuleType:
    """The pack's top-level module; submodules by :func:`pack_module`."""
    return pack_loader.pack_module()


@pytest.fixture(scope="session")
def pack_module(pack: ModuleType):
    """``pack_module("nodes.comfy_policy")``: a submodule of the pack as ComfyUI has it."""
    return pack_loader.pack_module


@pytest.fixture(scope="session")
def tiny(comfy_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """Random tiny FLUX checkpoints: diffusers fp32, BFL fp8 and scaled fp8."""
    torch.set_num_threads(2)
    return TinyCheckpoints(tmp_path_factory.mktemp("tiny"))
