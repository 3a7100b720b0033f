"""Low-rank adapters for fused FLUX modules, and their file formats.

Inside ComfyUI FLUX keeps q, k and v in one Linear (and the MLP with them in single blocks). An adapter of a fused
module is exactly a set of diffusers adapters that share their down matrix, so nothing is lost in translation.
"""

from __future__ import annotations

import re
from typing import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEFAULT_TARGETS = "attention+mlp"
TARGET_CHOICES = ("attention", "attention+mlp", "all")


class LoraError(ValueError):
    """A LoRA setting or file that cannot be used."""


def initial_down(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A fresh down matrix [rank, in] from N(0, 1 / rank^2): peft's "gaussian", which the learning rates of Flow-GRPO
    and its successors are meant for. One definition for every backend, so that a learning rate means the same."""
    return torch.randn(shape, generator=generator) / shape[0]


class LoraLinear(nn.Module):
    """y + (alpha / rank) up(down(x)); float32 parameters and arithmetic whatever the base computes in."""

    def __init__(
        self, in_features: int, out_features: int, rank: int, alpha: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.down = nn.Parameter(initial_down((rank, in_features), generator))
        self.up = nn.Parameter(torch.zeros(out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapter's output for input x [..., in] to the base's output y [..., out]."""
        delta = F.linear(F.linear(x.float(), self.down), self.up) * self.scale
        return y + delta.to(y.dtype)


class LoraSet(nn.Module):
    """The trainable adapters of a model by module name. It owns its parameters; the model is never changed by it.

    Args:
        shapes: {module name: (in_features, out_features)} of every Linear to adapt.
        seed: makes the down matrices reproducible; up matrices start at zero, so training starts at the base model.

    Raises:
        LoraError: rank < 1, alpha <= 0, or no module.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], rank: int, alpha: float, seed: int = 0) -> None:
        super().__init__()
        check_rank(rank, alpha)
        if not shapes:
            raise LoraError("no module to train: the target pattern matches no Linear of the model")
        generator = torch.Generator().manual_seed(seed)
        self.enabled = True
        self.rank, self.alpha = rank, alpha
        self.adapters = nn.ModuleDict(
            {_key(name): LoraLinear(*shapes[name], rank, alpha, generator) for name in sorted(shapes)}
        )

    def __getitem__(self, name: str) -> LoraLinear:
        return self.adapters[_key(name)]

    def named(self) -> Iterable[tuple[str, LoraLinear]]:
        """(module name, adapter) pairs."""
        return ((key.replace("|", "."), adapter) for key, adapter in self.adapters.items())

    def matrices(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{module name: (down [r, in], up [out, r] with alpha / rank folded in)}, float32 on the CPU."""
        return {
            name: (a.down.detach().cpu().clone(), (a.up.detach() * a.scale).cpu().clone()) for name, a in self.named()
        }

    def load_matrices(self, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Start from adapters (alpha folded into up) of any rank up to this set's; the rest of the rank stays free.

        Raises:
            LoraError: no common module, a shape that does not fit, or a larger rank.
        """
        matching = {name for name, _ in self.named()} & set(matrices)
        if not matching:
            raise LoraError("the LoRA to continue from shares no module with the training targets: choose its targets")
        with torch.no_grad():
            for name in matching:
                adapter, (down, up) = self[name], matrices[name]
                rank = down.shape[0]
                if rank > adapter.down.shape[0]:
                    raise LoraError(
                        f"the LoRA to continue from has rank {rank} at {name}, above the chosen {adapter.down.shape[0]}: "
                        f"set rank to at least {rank}"
                    )
                if down.shape[1] != adapter.down.shape[1] or up.shape[0] != adapter.up.shape[0]:
                    raise LoraError(f"the LoRA to continue from does not fit {name}: it was made for another model")
                adapter.down[:rank] = down.to(adapter.down)
                adapter.up[:, :rank] = up.to(adapter.up) / adapter.scale


def check_rank(rank: int, alpha: float) -> None:
    """Raise :class:`LoraError` unless rank >= 1 and alpha > 0."""
    if rank < 1:
        raise LoraError(f"the LoRA rank is {rank}; it must be at least 1 (4 to 64 are usual)")
    if not alpha > 0:
        raise LoraError(f"the LoRA alpha is {alpha}; it must be positive (equal to the rank is usual)")


def checked_pattern(pattern: str) -> re.Pattern:
    """Compile a target pattern; raises :class:`LoraError` for a broken or empty one."""
    if not pattern.strip():
        raise LoraError(f"the target pattern is empty: choose {', '.join(TARGET_CHOICES)} or give a regular expression")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise LoraError(f"target pattern {pattern!r} is not a regular expression: {error}") from None


def _key(name: str) -> str:
    return name.replace(".", "|")  # ModuleDict keys may not hold dots


# --- file formats ----------------------------------------------------------------------------------------------------

_DOUBLE = {
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
}
_DOUBLE_FUSED = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
_SINGLE = {"linear2": "proj_out", "modulation.lin": "norm.linear"}
_SINGLE_FUSED = {"linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")}


def _diffusers_parts(name: str, out_features: int, in_features: int) -> list[tuple[str, slice]]:
    """diffusers module names of a ComfyUI FLUX module with the rows of its output that each covers.

    Raises:
        KeyError: not a block Linear of FLUX.
    """
    kind, index, rest = name.split(".", 2)
    if kind == "double_blocks":
        prefix, single, fused = f"transformer_blocks.{index}.", _DOUBLE, _DOUBLE_FUSED
    elif kind == "single_blocks":
        prefix, single, fused = f"single_transformer_blocks.{index}.", _SINGLE, _SINGLE_FUSED
    else:
        raise KeyError(name)
    if rest in single:
        return [(prefix + single[rest], slice(0, out_features))]
    names = fused[rest]
    hidden = in_features if kind == "single_blocks" else out_features // 3
    starts = [i * hidden for i in range(len(names))] + [out_features]
    return [(prefix + part, slice(starts[i], starts[i + 1])) for i, part in enumerate(names)]


def is_flux_names(names: Iterable[str]) -> bool:
    """True when every module name is one that the diffusers naming of FLUX covers."""
    try:
        for name in names:
            _diffusers_parts(name, 3, 1)
    except (KeyError, ValueError):
        return False
    return True


def to_diffusers(matrices: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """diffusers-PEFT state dict (``transformer.….lora_A/B.weight``) from fused FLUX adapters; exact.

    This naming loads in every ComfyUI LoraLoader since 0.3 and in diffusers.
    """
    state = {}
    for name, (down, up) in matrices.items():
        for part, rows in _diffusers_parts(name, up.shape[0], down.shape[1]):
            state[f"transformer.{part}.lora_A.weight"] = down.clone().contiguous()
            state[f"transformer.{part}.lora_B.weight"] = up[rows].clone().contiguous()
    return state


def to_comfy(matrices: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """ComfyUI's own naming (``diffusion_model.….lora_up/lora_down/alpha``), as its TrainLoraNode's LORA_MODEL."""
    state = {}
    for name, (down, up) in matrices.items():
        state[f"diffusion_model.{name}.lora_down.weight"] = down.clone().contiguous()
        state[f"diffusion_model.{name}.lora_up.weight"] = up.clone().contiguous()
        state[f"diffusion_model.{name}.alpha"] = torch.tensor(float(down.shape[0]))
    return state


def from_state_dict(
    state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Fused adapters from a LoRA file in diffusers-PEFT, generic or ComfyUI naming.

    Split q, k, v adapters with different down matrices are stacked: the fused rank is their sum.

    Args:
        shapes: {module name: (in, out)} of the model's Linears; modules of the file outside it are ignored.

    Raises:
        LoraError: no key is understood.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for key, down in state.items():
        for down_name, up_name in (("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")):
            if key.endswith("." + down_name):
                module = key[: -len(down_name) - 1]
                up = state.get(f"{module}.{up_name}")
                if up is None:
                    raise LoraError(f"the LoRA file has {key} without its {up_name}")
                alpha = state.get(f"{module}.alpha")
                scale = 1.0 if alpha is None else float(alpha) / down.shape[0]
                for prefix in ("transformer.", "diffusion_model."):
                    module = module.removeprefix(prefix)
                pairs[module] = (down.float(), up.float() * scale)
    fused = {}
    for name, (in_features, out_features) in shapes.items():
        if name in pairs:
            fused[name] = pairs[name]
            continue
        try:
            parts = _diffusers_parts(name, out_features, in_features)
        except (KeyError, ValueError):
            continue
        present = [(pairs[part], rows) for part, rows in parts if part in pairs]
        if present:
            fused[name] = _fuse(present, out_features)
    if not fused:
        raise LoraError("no key of the LoRA file names a module of this model")
    return fused


def _fuse(parts: list[tuple[tuple[Tensor, Tensor], slice]], out_features: int) -> tuple[Tensor, Tensor]:
    first = parts[0][0][0]
    shared = all(down.shape == first.shape and torch.equal(down, first) for (down, _), _ in parts)
    if shared:
        up = torch.zeros(out_features, first.shape[0])
        for (_, part_up), rows in parts:
            up[rows] = part_up
        return first, up
    down = torch.cat([d for (d, _), _ in parts])
    up = torch.zeros(out_features, down.shape[0])
    column = 0
    for (d, part_up), rows in parts:
        up[rows, column : column + d.shape[0]] = part_up
        column += d.shape[0]
    return down, up
