"""Numbers about rollouts and comparisons: how far an active step spreads images and rewards, and who wins in pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Mapping

import torch
from torch import Tensor

from .schedule import Plan, PlanStep


def pairwise_difference(images: Tensor) -> float:
    """Mean over all pairs of the root-mean-square pixel difference within one group [G, ...].

    Raises:
        ValueError: fewer than two images.
    """
    if len(images) < 2:
        raise ValueError(f"a group of {len(images)} has no pairs to compare: use a group size of 2 or more")
    rms = [_rms(images[i + 1 :] - images[i]) for i in range(len(images) - 1)]
    return torch.cat(rms).mean().item()


def difference_to(images: Tensor, reference: Tensor) -> float:
    """Mean over the images [G, ...] of the root-mean-square pixel difference to one reference [...]."""
    return _rms(images - reference).mean().item()


def _rms(difference: Tensor) -> Tensor:
    return difference.flatten(1).float().square().mean(dim=1).sqrt()


@dataclass(frozen=True)
class StepStatistics:
    """What one active step did to its group; averages over the tails' granularities where there are several."""

    step: PlanStep
    image_difference: float
    """Mean root-mean-square pixel difference between two images of the group."""
    anchor_difference: float
    """The same between an image of the group and the anchor."""
    reward_means: dict[str, float] = field(default_factory=dict)
    reward_spreads: dict[str, float] = field(default_factory=dict)
    """Standard deviation within the group (n - 1), what the advantages divide by."""


def grouped(values: Tensor, plan: Plan, group_size: int) -> Tensor:
    """What :meth:`egrpo.rollout.Rollout.latents` flattened, without the anchor: [1 + K L G, ...] -> [K, L, G, ...].

    Raises:
        ValueError: the count is not the plan's.
    """
    if len(values) != plan.images(group_size):
        raise ValueError(
            f"{len(values)} values for a plan of {plan.images(group_size)} images at group size {group_size}"
        )
    return values[1:].unflatten(0, (len(plan.steps), len(plan.granularity), group_size))


def rollout_statistics(
    plan: Plan, group_size: int, images: Tensor, scores: Mapping[str, Tensor] | None = None
) -> list[StepStatistics]:
    """Spread of images and rewards per active step (E-GRPO Figure 1: high-entropy steps spread rewards more).

    Args:
        images: [1 + K L G, H, W, 3], the anchor first.
        scores: per reward [1 + K L G] in the same order.

    Raises:
        ValueError: counts that do not fit the plan, or a group of one.
    """
    groups = grouped(images, plan, group_size)
    rewards = {name: grouped(values, plan, group_size) for name, values in (scores or {}).items()}
    return [
        StepStatistics(
            step,
            _mean([pairwise_difference(group) for group in groups[k]]),
            _mean([difference_to(group, images[0]) for group in groups[k]]),
            {name: values[k].mean().item() for name, values in rewards.items()},
            {name: values[k].std(dim=-1).mean().item() for name, values in rewards.items()},
        )
        for k, step in enumerate(plan.steps)
    ]


def statistics_table(plan: Plan, statistics: list[StepStatistics]) -> str:
    """The statistics as aligned text, one line per active step."""
    unit = "e^(h/d)" if plan.entropy_unit == "exp" else "log2"
    rewards = list(statistics[0].reward_means)
    widths = [max(len(f"{name} spread"), 10) for name in rewards]
    header = f"{'step':>4} {'merge':>5} {'sigma':>7} {'sigma_next':>10} {unit:>8} {'image diff':>10} {'to anchor':>9}"
    for name, width in zip(rewards, widths):
        header += f" {name + ' mean':>{width}} {name + ' spread':>{width}}"
    lines = [header]
    for row in statistics:
        s = row.step
        line = (
            f"{s.index:>4} {s.merge:>5} {s.sigma:>7.4f} {s.sigma_next:>10.4f} {s.entropy:>8.3f} "
            f"{row.image_difference:>10.4f} {row.anchor_difference:>9.4f}"
        )
        for name, width in zip(rewards, widths):
            line += f" {row.reward_means[name]:>{width}.4f} {row.reward_spreads[name]:>{width}.4f}"
        lines.append(line)
    return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """Paired scores of the same prompts and noise under two models."""

    before: float
    after: float
    difference: float
    standard_error: float | None
    """Of the mean difference; None for a single pair."""
    win_rate: float
    """Share of pairs that the second model wins; a tie is half a win."""


def compare(before: Tensor, after: Tensor) -> Comparison:
    """Compare scores [N] pair by pair.

    Raises:
        ValueError: different counts, or none.
    """
    if before.shape != after.shape or before.ndim != 1 or not len(before):
        raise ValueError(f"scores of shapes {tuple(before.shape)} and {tuple(after.shape)} do not pair")
    change = after.double() - before.double()
    error = change.std().item() / math.sqrt(len(change)) if len(change) > 1 else None
    wins = ((change > 0).double() + 0.5 * (change == 0).double()).mean().item()
    return Comparison(before.double().mean().item(), after.double().mean().item(), change.mean().item(), error, wins)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
