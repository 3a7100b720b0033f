"""One prompt's rollout: an ODE anchor, G branches at every active step, and their ODE tails.

The group of an active step shares the anchor's state x_i and velocity v_i, so its next states need no model
evaluation: x'_j = mean(x_i, v_i) + std eps_j. The tails of all groups walk the schedule together, and those that
stand at the same sigma are evaluated in common micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from .policy import Velocity
from .schedule import Plan, PlanStep
from .sde import euler, log_prob, transition


@dataclass
class Group:
    """The G transitions of one active step; they share the starting state."""

    step: PlanStep
    x: Tensor
    """State at step.sigma, [1, C, h, w] float32 on the CPU."""
    mean: Tensor
    """Mean of the transition under the rollout's parameters, [1, C, h, w]."""
    x_next: Tensor
    """Sampled next states, [G, C, h, w]."""
    log_prob: Tensor
    """Log-density of x_next under the rollout's parameters, [G]."""
    finals: Tensor
    """Final latents, [L, G, C, h, w]: one row per granularity of the plan."""
    old_log_prob: Tensor | None = None
    """What the importance ratio divides by, [G]; set at the group's first update."""
    old_mean: Tensor | None = None


@dataclass
class Rollout:
    """Everything one prompt's rollout leaves behind; all tensors on the CPU."""

    anchor: Tensor
    """Final latent of the all-ODE trajectory, [1, C, h, w]; logged, never trained on."""
    groups: list[Group]
    evaluations: int
    """Model evaluations spent (latents, not calls)."""

    def latents(self) -> Tensor:
        """Anchor first, then every group's finals in order: [1 + K L G, C, h, w]."""
        return torch.cat([self.anchor, *(group.finals.flatten(0, 1) for group in self.groups)])


@dataclass
class _Tail:
    """G trajectories on their way to sigma 0 along ``path`` (schedule indices)."""

    x: Tensor
    path: tuple[int, ...]


def sample_anchor(
    velocity: Velocity, plan: Plan, noise: Tensor, on_step: Callable[[int], None] | None = None
) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
    """Euler over the whole schedule; returns the final latent and {index: (x_i, v_i)} at every active step."""
    kept = {step.index for step in plan.steps}
    states: dict[int, tuple[Tensor, Tensor]] = {}
    x = noise
    for i in range(plan.total_steps):
        v = velocity(x, plan.sigmas[i])
        if i in kept:
            states[i] = (x, v)
        x = euler(x, v, plan.sigmas[i], plan.sigmas[i + 1])
        if on_step:
            on_step(x.shape[0])
    return x, states


def sample_rollout(
    velocity: Velocity,
    plan: Plan,
    noise: Tensor,
    group_size: int,
    generator: torch.Generator,
    micro_batch: int = 8,
    on_step: Callable[[int], None] | None = None,
) -> Rollout:
    """Anchor, branches and tails of one prompt (E-GRPO Algorithm 1, sampling part).

    Args:
        velocity: the policy's velocity; called ``Plan.evaluations(group_size)[0]`` latents in all.
        noise: the prompt's shared initial noise [1, C, h, w] float32, scaled by sigmas[0] already.
        generator: CPU generator for the branches' noise, so that a run is the same on every device.
        micro_batch: latents per model call in the tails.
        on_step: told the number of latents after each model call, for progress.
    """
    anchor, states = sample_anchor(velocity, plan, noise, on_step)
    groups, tails = [], []
    for step in plan.steps:
        x, v = states[step.index]
        mean, std = transition(x, v, plan.sigmas, step.index, step.merge, plan.eta, plan.kernel)
        fresh = torch.randn((group_size, *x.shape[1:]), generator=generator, dtype=torch.float32).to(x.device)
        x_next = mean + std * fresh
        groups.append(Group(step, x.cpu(), mean.cpu(), x_next.cpu(), log_prob(x_next, mean, std).cpu(), x_next))
        tails.append([_Tail(x_next, plan.tail(step, stride)) for stride in plan.granularity])

    flat = [tail for per_group in tails for tail in per_group]
    spent = plan.total_steps + _walk_tails(velocity, plan, flat, micro_batch, on_step)
    for group, per_group in zip(groups, tails):
        group.finals = torch.stack([tail.x.cpu() for tail in per_group])
    return Rollout(anchor.cpu(), groups, spent)


def _walk_tails(velocity, plan: Plan, tails: list[_Tail], micro_batch: int, on_step) -> int:
    """Advance every tail to sigma 0, batching those at the same schedule index; returns evaluations spent."""
    spent = 0
    for i in range(plan.total_steps):
        here = [tail for tail in tails if tail.path[0] == i]
        if not here:
            continue
        x = torch.cat([tail.x for tail in here])
        pieces = []
        for piece in x.split(micro_batch):
            pieces.append(velocity(piece, plan.sigmas[i]))
            spent += len(piece)
            if on_step:
                on_step(len(piece))
        for tail, v in zip(here, torch.cat(pieces).split([len(tail.x) for tail in here])):
            tail.x = euler(tail.x, v, plan.sigmas[i], plan.sigmas[tail.path[1]])
            tail.path = tail.path[1:]
    return spent
