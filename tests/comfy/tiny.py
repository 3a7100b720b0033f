"""A tiny random FLUX in the file formats that people load: diffusers fp32, plain fp8, scaled fp8."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, JOINT, POOLED, TOKENS = 256, 64, 32, 12
FP8_MAX = 448.0


class TinyCheckpoints:
    """Writes each format once under ``folder``; all hold the same weights (hidden 256, 2 double and 2 single blocks)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def diffusers_model(self, double: int = 2, single: int = 2, hidden: int = HIDDEN):
        from diffusers import FluxTransformer2DModel

        model = FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=double,
            num_single_layers=single,
            attention_head_dim=128,
            num_attention_heads=hidden // 128,
            joint_attention_dim=JOINT,
            pooled_projection_dim=POOLED,
            guidance_embeds=True,
            axes_dims_rope=(16, 56, 56),
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 1 and "norm_" in name:
                    parameter.copy_(1 + 0.1 * noise)
                elif parameter.ndim == 2:
                    parameter.copy_(noise / parameter.shape[1] ** 0.5)
                else:
                    parameter.copy_(0.1 * noise)
        return model.eval().requires_grad_(False)

    @cached_property
    def diffusers(self) -> Path:
        return self._save("tiny_flux", self.diffusers_model().state_dict())

    @cached_property
    def fp8(self) -> Path:
        """Block weights stored in float8_e4m3fn without scales."""
        state = {
            k: v.to(torch.float8_e4m3fn if _is_block_weight(k, v) else torch.bfloat16) for k, v in self._bfl().items()
        }
        return self._save("tiny_flux_fp8", state)

    @cached_property
    def scaled_fp8(self) -> Path:
        """Block weights in float8_e4m3fn with one scale each, as ComfyUI's scaled checkpoints."""
        state: dict[str, Tensor] = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
        for key, value in self._bfl().items():
            if _is_block_weight(key, value):
                scale = value.abs().max() / FP8_MAX
                state[key] = (value / scale).to(torch.float8_e4m3fn)
                state[key.removesuffix(".weight") + ".scale_weight"] = scale.float().reshape(())
            else:
                state[key] = value
        return self._save("tiny_flux_scaled_fp8", state)

    def _bfl(self) -> dict[str, Tensor]:
        from comfy.model_detection import convert_diffusers_mmdit

        converted = convert_diffusers_mmdit(load_file(self.diffusers), "")
        return {key: value.contiguous() for key, value in converted.items()}

    def _save(self, name: str, state: dict[str, Tensor]) -> Path:
        path = self.folder / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in state.items()}, path)
        return path


def _is_block_weight(key: str, value: Tensor) -> bool:
    return value.ndim == 2 and "blocks." in key


def conditioning(batch: int = 1) -> list:
    """A fixed CONDITIONING of the tiny model's sizes, as CLIPTextEncode makes it."""
    generator = torch.Generator().manual_seed(5)
    context = torch.randn(batch, TOKENS, JOINT, generator=generator)
    return [[context, {"pooled_output": torch.randn(batch, POOLED, generator=generator), "guidance": 3.5}]]
