"""Held-out prompts by ODE from fixed noise: sampling, scoring, and comparing two models on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

import torch
from torch import Tensor

from .advantage import weighted_reward
from .policy import Condition, Policy
from .rewards.base import RewardSet
from .rollout import sample_anchor
from .sampling import derived_generator, initial_noise, watched
from .schedule import Plan
from .statistics import Comparison, compare


@dataclass
class Evaluation:
    """Held-out prompts, fixed noise, ODE only. ``iteration`` updates have been made."""

    iteration: int
    prompts: list[str]
    images: Tensor
    """[P * samples, H, W, 3], samples of one prompt together."""
    scores: dict[str, Tensor]
    """Per reward [P * samples]."""
    reward: float
    """Mean weighted reward; the plain sum of the rewards when all of them are only watched."""

    @property
    def samples(self) -> int:
        """Images per prompt."""
        return len(self.images) // len(self.prompts)

    def per_prompt(self) -> dict[str, list[float]]:
        """Per reward the mean score of every prompt."""
        return {name: s.view(-1, self.samples).mean(dim=1).tolist() for name, s in self.scores.items()}


def evaluate_policy(
    policy: Policy,
    rewards: RewardSet,
    prompts: Sequence[str],
    conditions: Sequence[Condition],
    plan: Plan,
    *,
    samples: int = 1,
    seed: int = 0,
    micro_batch: int = 8,
    base: bool = False,
    iteration: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Evaluation:
    """Sample every prompt by the plan's schedule without noise, decode, and score.

    The starting noise is a function of (seed, position of the prompt, sample): the same for every model that is
    compared, for every iteration of a run, and for every micro-batch.

    Args:
        conditions: one encoded prompt each, in the order of ``prompts``.
        micro_batch: latents per model call.
        base: leave the policy's LoRA off.
        on_step: told the number of latents after each model call; ``len(prompts) * samples * plan.total_steps`` in all.

    Raises:
        RewardError, FloatingPointError: an unusable score or velocity.
    """
    latents = []
    for position, condition in enumerate(conditions):
        generator = derived_generator(seed, "held-out", position)
        noise = torch.cat([initial_noise(policy, plan, generator) for _ in range(samples)])

        def work(velocity, noise=noise) -> Tensor:
            pieces = noise.to(policy.device).split(micro_batch)
            return torch.cat([sample_anchor(watched(policy, velocity), plan, x, on_step)[0].cpu() for x in pieces])

        latents.append(policy.rollout(condition, work, base=base))
    images, scores = [], []
    with policy.scoring():
        for prompt, latent in zip(prompts, latents):
            policy.check_interrupted()
            images.append(policy.decode(latent))
            scores.append(rewards.score(images[-1], [prompt] * len(latent)))
    merged = {name: torch.cat([score[name] for score in scores]) for name in scores[0]}
    weights = rewards.weights or {name: 1.0 for name in merged}
    reward = weighted_reward({name: merged[name] for name in weights}, weights).mean().item()
    return Evaluation(iteration, list(prompts), torch.cat(images), merged, reward)


def evaluation_rows(named: Sequence[tuple[str, Evaluation]]) -> tuple[list, list[str], list[list[str]]]:
    """Rows, row labels and cell labels for :func:`egrpo.plots.image_grid`: each prompt once per named evaluation.

    Cells carry the scores of every reward.
    """
    rows, labels, cells = [], [], []
    first = named[0][1]
    for i, prompt in enumerate(first.prompts):
        here = slice(i * first.samples, (i + 1) * first.samples)
        for name, evaluation in named:
            rows.append(list(evaluation.images[here]))
            labels.append(f"{name}: {prompt}" if len(named) > 1 else prompt)
            cells.append(score_labels({reward: scores[here] for reward, scores in evaluation.scores.items()}))
    return rows, labels, cells


def score_labels(scores: dict[str, Tensor]) -> list[str]:
    """One label per image: the bare score of a single reward, named scores on lines of their own otherwise."""
    if len(scores) == 1:
        return [f"{value:.3f}" for values in scores.values() for value in values.tolist()]
    named = [[f"{name} {value:.3f}" for value in values.tolist()] for name, values in scores.items()]
    return ["\n".join(lines) for lines in zip(*named)]


def evaluation_table(before: Evaluation, after: Evaluation | None = None) -> str:
    """Per reward mean, change with its standard error and win rate, then the same per prompt; aligned text."""
    width = max(8, *map(len, before.scores))
    lines = [f"{len(before.prompts)} held-out prompts, {before.samples} images each, the same noise for every model"]
    if after is None:
        lines += [f"{'reward':<{width}} {'mean':>10} {'std':>10}"]
        for name, scores in before.scores.items():
            std = f"{scores.std().item():>10.4f}" if len(scores) > 1 else f"{'-':>10}"
            lines.append(f"{name:<{width}} {scores.mean().item():>10.4f} {std}")
    else:
        lines += [f"{'reward':<{width}} {'base':>10} {'with LoRA':>10} {'change':>10} {'+-':>8} {'win rate':>9}"]
        for name in before.scores:
            lines.append(f"{name:<{width}} {_compared(compare(before.scores[name], after.scores[name]))}")
    for name, old in before.per_prompt().items():
        lines.append(f"\n{name}, mean per prompt:")
        if after is None:
            lines += [f"{a:>10.4f}  {prompt}" for a, prompt in zip(old, before.prompts)]
        else:
            new = after.per_prompt()[name]
            lines += [f"{a:>10.4f} {b:>10.4f} {b - a:>+10.4f}  {p}" for a, b, p in zip(old, new, before.prompts)]
    return "\n".join(lines)


def _compared(result: Comparison) -> str:
    error = "-" if result.standard_error is None else f"{result.standard_error:.4f}"
    return (
        f"{result.before:>10.4f} {result.after:>10.4f} {result.difference:>+10.4f} {error:>8} {result.win_rate:>8.0%}"
    )
