"""Group-relative advantages (GRPO), for one or several rewards."""

from __future__ import annotations

from typing import Mapping

import torch
from torch import Tensor

from .sde import at_least_float32

ADVANTAGES_THEN_SUM = "normalise_then_sum"
SUM_THEN_ADVANTAGES = "sum_then_normalise"
COMBINE_RULES = (ADVANTAGES_THEN_SUM, SUM_THEN_ADVANTAGES)

ADVANTAGE_EPS = 1e-8
ADVANTAGE_CLAMP = 5.0


def has_spread(rewards: Tensor) -> Tensor:
    """True for each group [...] whose rewards [..., G] differ by more than rounding."""
    rewards = at_least_float32(rewards)
    rounding = 8 * torch.finfo(rewards.dtype).eps * rewards.abs().amax(dim=-1)
    return rewards.amax(dim=-1) - rewards.amin(dim=-1) > rounding


def group_advantages(rewards: Tensor, clamp: float = ADVANTAGE_CLAMP) -> Tensor:
    """(R - mean) / (std + 1e-8) within the last dimension, unbiased std, clamped to +-clamp.

    Args:
        rewards: [..., G], raw rewards of each group.

    Returns:
        Same shape, at least float32. A group without spread gets zeros: it teaches nothing.

    Raises:
        ValueError: G < 2 (a group of one has no advantage).
    """
    if rewards.shape[-1] < 2:
        raise ValueError(f"a group of {rewards.shape[-1]} has no relative advantage: use a group size of 2 or more")
    rewards = at_least_float32(rewards)
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    advantages = centred / (rewards.std(dim=-1, keepdim=True) + ADVANTAGE_EPS)
    advantages = torch.where(has_spread(rewards).unsqueeze(-1), advantages, torch.zeros_like(advantages))
    return advantages.clamp(-clamp, clamp)


def combined_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    rule: str = ADVANTAGES_THEN_SUM,
    clamp: float = ADVANTAGE_CLAMP,
) -> Tensor:
    """Advantages of several rewards [..., G] together.

    ``normalise_then_sum`` (default; MixGRPO's advantage_aggr, G2RPO) is insensitive to the rewards' scales;
    ``sum_then_normalise`` (the released E-GRPO configuration) lets the reward with the larger spread dominate.

    Raises:
        ValueError: unknown rule or no reward.
    """
    if not rewards:
        raise ValueError("no reward to train on: give at least one reward a weight")
    if rule == ADVANTAGES_THEN_SUM:
        return sum(weights[name] * group_advantages(values, clamp) for name, values in rewards.items())
    if rule == SUM_THEN_ADVANTAGES:
        return group_advantages(weighted_reward(rewards, weights), clamp)
    raise ValueError(f"unknown combination rule {rule!r}: choose one of {', '.join(COMBINE_RULES)}")


def weighted_reward(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum of raw rewards, [..., G]: what is logged as "the reward"."""
    return sum(weights[name] * at_least_float32(values) for name, values in rewards.items())
