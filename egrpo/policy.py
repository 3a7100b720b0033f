"""The one interface between the algorithm and a model.

A backend (ComfyUI in ``nodes/comfy_policy.py``, diffusers in ``egrpo/backends/diffusers_flux.py``) owns the frozen
model and its trainable LoRA, and moves models between phases. Model phases take a callable instead of being entered,
because ComfyUI prepares a model (conditioning, patches, memory) around one sampler call and undoes it afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Callable, Sequence, TypeVar

import torch
from torch import Tensor

Velocity = Callable[[Tensor, float], Tensor]
"""velocity(x [B, C, h, w] float32 in model space, sigma in (0, 1]) -> v of the same shape, float32."""

Condition = Any
"""One encoded prompt; only the backend that made it looks inside."""

T = TypeVar("T")


class Policy(ABC):
    """A frozen flow model with a trainable LoRA."""

    latent_shape: tuple[int, int, int]
    """(channels, height, width) of one latent in model space."""
    device: torch.device
    """Where the trainer keeps latents while the model works on them."""

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> list[Condition]:
        """One condition per prompt, kept off the accelerator."""

    @abstractmethod
    def rollout(self, condition: Condition, work: Callable[[Velocity], T], *, base: bool = False) -> T:
        """Run ``work(velocity)`` without gradient, the LoRA active unless ``base``."""

    @abstractmethod
    def update(self, condition: Condition, work: Callable[[Velocity, Velocity], T]) -> T:
        """Run ``work(velocity, base_velocity)`` with gradient into :meth:`parameters`.

        ``base_velocity`` is the model with the LoRA off, without gradient (for the KL term). The velocity at the same
        parameters, x and sigma must equal the rollout's bit for bit, or the importance ratio means nothing.
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, H, W, 3] float32 in 0..1 on the CPU from latents [B, C, h, w] in model space."""

    @abstractmethod
    def parameters(self) -> list[torch.nn.Parameter]:
        """Trainable parameters, float32, in a fixed order."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The LoRA's own tensors for an exact resume (not an export format), on the CPU."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore :meth:`state_dict`."""

    @abstractmethod
    def export_lora(self) -> dict[str, Tensor]:
        """The LoRA in diffusers-PEFT naming (``transformer.….lora_A.weight``), alpha folded in, float32 on the CPU."""

    def scoring(self) -> AbstractContextManager[None]:
        """Free what the reward models need; entered around decode and score."""
        return nullcontext()

    def normal_mode(self) -> AbstractContextManager[None]:
        """Where parameters and optimizer state may be made and changed (ComfyUI runs nodes in inference mode)."""
        return nullcontext()

    def micro_batch(self, requested: int) -> int:
        """Latents per model call in rollouts; 0 asks for the largest that fits."""
        return requested or 8

    def memory_estimate(self, micro_batch: int) -> dict[str, int]:
        """Bytes that each phase needs on the accelerator, by phase name; empty when unknown."""
        return {}

    def check_interrupted(self) -> None:
        """Raise the host's own exception if the user asked to stop; called before every model call."""


def check_size(width: int, height: int) -> None:
    """Raise ValueError unless both are positive multiples of 16 (8 pixels per latent, 2x2 latents per token)."""
    for name, value in (("width", width), ("height", height)):
        if value < 16 or value % 16:
            raise ValueError(
                f"{name} is {value}; it must be a multiple of 16, for example {max(16, round(value / 16) * 16)}"
            )
