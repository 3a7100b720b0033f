"""The clipped surrogate of GRPO on merged SDE steps, its options and its diagnostics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sde import log_prob

PLAIN_RATIO = "plain"
GUARD_RATIO = "guard"
RATIOS = (PLAIN_RATIO, GUARD_RATIO)


@dataclass(frozen=True)
class Surrogate:
    """Loss of one group with its standard diagnostics."""

    loss: Tensor
    """Scalar, carries the gradient."""
    ratio: Tensor
    """Importance ratios [G], detached."""
    clip_fraction: float
    """Share of the group whose ratio lies outside [1 - clip_range, 1 + clip_range]."""
    approx_kl: float
    """Schulman's k3 estimate mean((ratio - 1) - log ratio) of KL(old || new), per dimension."""


def kl_to_base(mean: Tensor, base_mean: Tensor, std: Tensor | float) -> Tensor:
    """KL per dimension between two steps of equal std: mean((mean - base_mean)^2) / (2 std^2), scalar."""
    return ((mean - base_mean) ** 2).mean() / (2.0 * torch.as_tensor(std) ** 2)


def log_ratio(
    x_next: Tensor,
    mean: Tensor,
    std: Tensor | float,
    old_log_prob: Tensor,
    old_mean: Tensor | None,
    kind: str = PLAIN_RATIO,
) -> Tensor:
    """log(new / old) for the next states ``x_next`` [G, ...] under ``mean`` [1 or G, ...].

    ``guard`` is GRPO-Guard's RatioNorm: the drift ||mean - old_mean||^2 / (2 std^2) is added back, so that the ratio
    is centred at 1, and the result is scaled by std, so that every noise level meets the clip range alike.

    Raises:
        ValueError: unknown kind, or guard without the old mean.
    """
    difference = log_prob(x_next, mean, std) - old_log_prob
    if kind == PLAIN_RATIO:
        return difference
    if kind == GUARD_RATIO:
        if old_mean is None:
            raise ValueError("the guard ratio needs the mean that the old log-probability was computed with")
        drift = ((mean - old_mean) ** 2).flatten(1).mean(dim=1) / (2.0 * torch.as_tensor(std) ** 2)
        return (difference + drift) * std
    raise ValueError(f"unknown ratio {kind!r}: choose one of {', '.join(RATIOS)}")


def clipped_surrogate(log_ratios: Tensor, advantages: Tensor, clip_range: float) -> Surrogate:
    """-mean(min(ratio A, clip(ratio, 1 - eps, 1 + eps) A)) over the group [G] (PPO, GRPO)."""
    ratio = torch.exp(log_ratios)
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    with torch.no_grad():
        outside = ((ratio - 1.0).abs() > clip_range).float().mean().item()
        approx_kl = ((ratio - 1.0) - log_ratios).mean().item()
    return Surrogate(loss, ratio.detach(), outside, approx_kl)
