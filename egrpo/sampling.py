"""What rollouts and evaluations share around a velocity: independent random streams, initial noise, and a guard."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from .policy import Policy, Velocity
from .schedule import Plan


def derived_generator(*parts: object) -> torch.Generator:
    """CPU generator seeded by a hash of ``parts``: independent streams without any stored state."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initial_noise(policy: Policy, plan: Plan, generator: torch.Generator) -> Tensor:
    """One starting latent [1, C, h, w] float32 on the CPU.

    A schedule that begins below 1 starts from a blank latent with that much noise.
    """
    return torch.randn((1, *policy.latent_shape), generator=generator) * plan.sigmas[0]


def watched(policy: Policy, velocity: Velocity) -> Velocity:
    """The velocity with an interrupt check before and a finiteness check after every call.

    Raises (when called):
        FloatingPointError: the velocity holds NaN or infinity; and whatever the policy's host raises to stop.
    """

    def checked(x: Tensor, sigma: float) -> Tensor:
        policy.check_interrupted()
        v = velocity(x, sigma)
        if not torch.isfinite(v).all():
            raise FloatingPointError(
                f"the model's velocity at sigma {sigma:.4f} holds NaN or infinity: try a lower learning rate, a "
                "smaller eta, or bf16 instead of fp16 weights"
            )
        return v

    return checked
