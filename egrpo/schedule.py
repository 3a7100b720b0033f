"""Sigma schedules, the entropy of each step, and the merge plan of E-GRPO (arXiv 2601.00423, section 4).

The entropy of a Gaussian step of std s sqrt(D) in d dimensions is h = d/2 log(2 pi e s^2 D). The paper compares
``e^h`` with tau = 2.2 and fixes neither d nor constants; this package uses e^{h/d} = sqrt(2 pi e) s sqrt(D), the
reading that keeps the first steps single at 2.2 and reproduces the merge list the authors published at 2.6.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Callable, Sequence

import torch
from torch import Tensor

from .sde import CPS, FLOW_SDE, Sigmas, kernel_of, noise_ratio

ENTROPY_UNITS = ("exp", "log2")
ACTIVE_CHOICES = ("first_half", "second_half", "first_4", "first_8", "second_8", "all")
GROUPINGS = ("overlapping", "disjoint")
UNREACHABLE_CHOICES = ("exclude", "merge_to_end")


ROUGH_NOISE_RATIO = 1.25
"""Above this noise ratio (the paper's own plan stays below 1.11) a plan carries a warning."""


class PlanError(ValueError):
    """A plan that cannot be sampled or trained; the message names the step, the value and the way out."""


def flow_sigmas(steps: int, shift: float = 3.0) -> Tensor:
    """Time-shifted schedule sigma = s t / (1 + (s - 1) t) with t = 1 - i / steps; float64 [steps + 1] from 1 to 0.

    Raises:
        PlanError: steps < 1 or shift <= 0.
    """
    if steps < 1:
        raise PlanError(f"steps is {steps}; a schedule needs at least 1 (the paper uses 16)")
    if not shift > 0:
        raise PlanError(f"shift is {shift}; it must be positive (1 = no shift, the paper uses 3)")
    t = 1.0 - torch.arange(steps + 1, dtype=torch.float64) / steps
    return shift * t / (1.0 + (shift - 1.0) * t)


def checked_sigmas(sigmas: Sigmas) -> tuple[float, ...]:
    """The schedule as floats, after checking that it falls strictly from at most 1 to 0.

    Raises:
        PlanError: too short, not decreasing, above 1, not finite, or not ending at 0.
    """
    values = tuple(float(s) for s in sigmas)
    if len(values) < 2:
        raise PlanError(f"a schedule needs at least two sigmas, got {len(values)}")
    for i, value in enumerate(values):
        if not math.isfinite(value):
            raise PlanError(f"sigma {i} is {value}; every sigma must be a finite number")
    if values[0] > 1.0:
        raise PlanError(
            f"sigma 0 is {values[0]:g}, above 1: these are not the sigmas of a rectified flow. "
            "Connect a scheduler made for FLUX or SD3, or leave SIGMAS unconnected and set steps and shift"
        )
    for i in range(1, len(values)):
        if values[i] >= values[i - 1]:
            raise PlanError(
                f"sigmas must strictly decrease, but sigma {i} ({values[i]:g}) is not below sigma {i - 1} "
                f"({values[i - 1]:g})"
            )
    if values[-1] != 0.0:
        raise PlanError(f"the last sigma is {values[-1]:g}, but an image is scored at sigma 0: end the schedule at 0")
    return values


def step_entropy(
    sigmas: Sigmas, index: int, merge: int = 1, eta: float = 0.7, unit: str = "exp", kernel: str = FLOW_SDE
) -> float:
    """Entropy per dimension of the step from ``index`` over ``merge`` intervals.

    ``unit="exp"`` gives e^{h/d} = sqrt(2 pi e) std, the value that tau is compared with; ``"log2"`` gives
    log2(2 pi e std^2), another reading of the paper with the same order of steps. A step without noise has 0
    (exp) or -inf (log2).
    """
    std = kernel_of(sigmas, index, merge, eta, kernel).std
    if unit == "exp":
        return math.sqrt(2.0 * math.pi * math.e) * std
    if unit == "log2":
        return math.log2(2.0 * math.pi * math.e * std * std) if std > 0 else -math.inf
    raise PlanError(f"unknown entropy unit {unit!r}: choose one of {', '.join(ENTROPY_UNITS)}")


def merge_length(entropy: Callable[[int, int], float], index: int, last: int, tau: float) -> int | None:
    """Smallest merge with entropy(index, merge) >= tau, or None when even the merge to the end stays below it."""
    return next((merge for merge in range(1, last - index + 1) if entropy(index, merge) >= tau), None)


@dataclass(frozen=True)
class PlanStep:
    """One active step: a Gaussian transition from ``sigma`` to ``sigma_next`` over ``merge`` intervals."""

    index: int
    merge: int
    sigma: float
    sigma_next: float
    entropy: float
    contraction: float
    """Coefficient of the noise part of x in the mean, 1 - s^2 D / (2 sigma) for flow_sde; below 0 the latent flips."""
    noise_ratio: float
    """Noise level after the step over sigma', see :func:`egrpo.sde.noise_ratio`."""
    std: float


@dataclass(frozen=True)
class Plan:
    """Which steps are stochastic, how far each jumps, and what that costs."""

    sigmas: tuple[float, ...]
    steps: tuple[PlanStep, ...]
    eta: float
    tau: float | None
    kernel: str = FLOW_SDE
    entropy_unit: str = "exp"
    grouping: str = "overlapping"
    granularity: tuple[int, ...] = (1,)
    notes: tuple[str, ...] = field(default=())

    @property
    def total_steps(self) -> int:
        """T, the number of denoising steps of the schedule."""
        return len(self.sigmas) - 1

    def tail(self, step: PlanStep, stride: int = 1) -> tuple[int, ...]:
        """Schedule indices of the ODE tail after ``step``, striding ``stride`` intervals and always ending at T."""
        return (*range(step.index + step.merge, self.total_steps, stride), self.total_steps)

    def evaluations(self, group_size: int) -> tuple[int, int]:
        """(F, B): model evaluations without and with gradient for one prompt and one iteration.

        F = T + G sum(T - i - l) (the anchor's own velocity starts every branch), B = number of active steps. Extra
        granularities add their coarser tails to F.
        """
        tails = sum(len(self.tail(step, stride)) - 1 for step in self.steps for stride in self.granularity)
        return self.total_steps + group_size * tails, len(self.steps)

    def images(self, group_size: int) -> int:
        """Images decoded and scored for one prompt and one iteration, the anchor's included."""
        return 1 + group_size * len(self.steps) * len(self.granularity)

    def all_entropies(self) -> list[float]:
        """Entropy of every single step of the schedule, in this plan's unit; active or not."""
        return [
            step_entropy(self.sigmas, i, 1, self.eta, self.entropy_unit, self.kernel) for i in range(self.total_steps)
        ]

    def table(self, group_size: int | None = None) -> str:
        """The plan as aligned text: one line per active step, then notes and the cost."""
        unit = "e^(h/d)" if self.entropy_unit == "exp" else "log2"
        lines = [
            f"{'step':>4} {'sigma':>7} {'merge':>5} {'sigma_next':>10} {unit:>8} {'contraction':>11} {'noise ratio':>11}"
        ]
        lines += [
            f"{s.index:>4} {s.sigma:>7.4f} {s.merge:>5} {s.sigma_next:>10.4f} {s.entropy:>8.3f} "
            f"{s.contraction:>11.3f} {s.noise_ratio:>11.3f}"
            for s in self.steps
        ]
        tau = "explicit merges" if self.tau is None else f"tau {self.tau:g}"
        lines.append(
            f"{self.total_steps} steps, {len(self.steps)} active ({self.grouping}, {tau}), eta {self.eta:g}, "
            f"kernel {self.kernel}"
        )
        if group_size is not None:
            forward, backward = self.evaluations(group_size)
            lines.append(
                f"per prompt at group size {group_size}: {forward} model evaluations, {backward} with gradient, "
                f"{self.images(group_size)} images"
            )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """Plain values for JSON; :meth:`from_dict` restores an equal plan."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "Plan":
        values = dict(values)
        values["steps"] = tuple(PlanStep(**step) for step in values["steps"])
        for name in ("sigmas", "granularity", "notes"):
            values[name] = tuple(values[name])
        return cls(**values)


def active_indices(active: str | Sequence[int], total: int) -> list[int]:
    """Schedule indices named by ``active``: a choice of :data:`ACTIVE_CHOICES`, "0,1,4", or a list of indices.

    ``first_half`` is the paper's first ceil(T/2) steps.

    Raises:
        PlanError: unknown name, or an index outside 0..total-1.
    """
    half = math.ceil(total / 2)
    named = {
        "first_half": range(half),
        "second_half": range(half, total),
        "first_4": range(min(4, total)),
        "first_8": range(min(8, total)),
        "second_8": range(min(8, total), min(16, total)),
        "all": range(total),
    }
    if isinstance(active, str):
        if active in named:
            return list(named[active])
        try:
            active = [int(part) for part in active.replace(",", " ").split()]
        except ValueError:
            raise PlanError(
                f"active steps {active!r} is neither a choice ({', '.join(ACTIVE_CHOICES)}) nor indices such as '0,1,4'"
            ) from None
    indices = sorted(set(int(i) for i in active))
    if indices and not 0 <= indices[0] <= indices[-1] < total:
        wrong = [i for i in indices if not 0 <= i < total]
        raise PlanError(f"active steps {wrong} lie outside a schedule of {total} steps (0..{total - 1})")
    return indices


def parse_merges(text: str) -> dict[int, int]:
    """Read an explicit list such as ``"0:1 1:1 2:2 4:3"`` (step:merge) into {step: merge}.

    Raises:
        PlanError: an entry that is not step:merge.
    """
    merges: dict[int, int] = {}
    for part in text.replace(",", " ").split():
        step, _, merge = part.partition(":")
        try:
            merges[int(step)] = int(merge)
        except ValueError:
            raise PlanError(f"explicit merge {part!r} is not step:merge, for example 2:2") from None
    return merges


def plan_steps(
    sigmas: Sigmas,
    eta: float = 0.7,
    tau: float = 2.2,
    active: str | Sequence[int] = "first_half",
    grouping: str = "overlapping",
    *,
    merge: int | dict[int, int] | None = None,
    kernel: str = FLOW_SDE,
    entropy_unit: str = "exp",
    unreachable: str = "exclude",
    allow_flip: bool = False,
    granularity: Sequence[int] = (1,),
) -> Plan:
    """Choose the active steps and their merge lengths (E-GRPO Algorithm 1).

    Args:
        sigmas: any schedule that decreases from at most 1 to 0.
        eta: noise scale a of the kernel.
        tau: entropy threshold on e^{h/d}; 0 merges nothing.
        active: candidate steps, see :func:`active_indices`.
        grouping: ``overlapping`` makes every candidate active with its own merge; ``disjoint`` walks from the first
            candidate and continues where the merged step ended.
        merge: None for the adaptive length; an int for one fixed length; {step: length} for an explicit list, which
            also names the active steps.
        unreachable: what to do with a step whose merge to the end stays below tau: leave it out, or merge to the end.
        allow_flip: keep steps whose merge flips the latent's sign.
        granularity: strides of the ODE tails (G2RPO); 1 is the full tail.

    Raises:
        PlanError: bad schedule or setting, a merge that passes the end, a merge that flips the latent, or a plan
            without any active step.
    """
    values = checked_sigmas(sigmas)
    last = len(values) - 1
    if not eta > 0:
        raise PlanError(f"eta is {eta}: a plan needs noise to explore, use eta > 0 (the paper uses 0.7)")
    if grouping not in GROUPINGS:
        raise PlanError(f"unknown grouping {grouping!r}: choose one of {', '.join(GROUPINGS)}")
    if unreachable not in UNREACHABLE_CHOICES:
        raise PlanError(f"unknown choice {unreachable!r} for unreachable steps: {', '.join(UNREACHABLE_CHOICES)}")
    if not granularity or any(int(stride) < 1 for stride in granularity):
        raise PlanError(f"granularity {tuple(granularity)} must be strides of 1 or more, for example (1,) or (1, 2)")
    try:
        kernel_of(values, 0, 1, eta, kernel)
    except ValueError as error:
        raise PlanError(str(error)) from None

    def entropy(index: int, length: int) -> float:
        return step_entropy(values, index, length, eta, entropy_unit, kernel)

    explicit = dict(merge) if isinstance(merge, dict) else None
    candidates = active_indices(sorted(explicit), last) if explicit is not None else active_indices(active, last)
    notes: list[str] = []
    chosen: list[tuple[int, int]] = []
    position = candidates[0] if candidates else 0
    for index in candidates:
        if grouping == "disjoint" and index < position:
            continue
        if explicit is not None:
            length: int | None = explicit[index]
        elif merge is not None:
            length = int(merge)
        else:
            length = merge_length(entropy, index, last, tau)
        if length is None:
            if unreachable == "exclude":
                notes.append(f"step {index} left out: even merged to the end its entropy stays below tau {tau:g}")
                continue
            length = last - index
            notes.append(
                f"step {index} merged to the end: its entropy {entropy(index, length):.3f} is below tau {tau:g}"
            )
        if length < 1 or index + length > last:
            raise PlanError(
                f"step {index} merged over {length} passes the end of a schedule of {last} steps: "
                f"use a merge of 1..{last - index} there, or fewer active steps"
            )
        chosen.append((index, length))
        position = index + length

    steps = tuple(_plan_step(values, index, length, eta, kernel, entropy) for index, length in chosen)
    if not steps:
        raise PlanError(
            f"no step of {active!r} reaches entropy tau {tau:g} at eta {eta:g}: lower tau, raise eta, or pick other steps"
        )
    for step in steps:
        if step.std == 0.0:
            raise PlanError(
                f"step {step.index} merged over {step.merge} has no noise with kernel {kernel} and cannot be trained: "
                "end it before sigma 0"
            )
        if step.contraction <= 0 and not allow_flip:
            raise PlanError(
                f"step {step.index} merged over {step.merge} flips the latent: its contraction 1 - s^2 D / (2 sigma) is "
                f"{step.contraction:.3f}, and must stay above 0. Lower tau or eta, use a shorter merge, choose the cps "
                "kernel, or allow flips explicitly"
            )
        if step.noise_ratio == math.inf:
            notes.append(f"step {step.index} ends at sigma 0 with noise of std {step.std:.3f} left in the image")
        elif step.noise_ratio > ROUGH_NOISE_RATIO:
            notes.append(
                f"step {step.index} merged over {step.merge} leaves {step.noise_ratio:.2f} times the noise that the "
                "model is told: expect rough images"
            )
    return Plan(
        sigmas=values,
        steps=steps,
        eta=eta,
        tau=tau if merge is None else None,
        kernel=kernel,
        entropy_unit=entropy_unit,
        grouping=grouping,
        granularity=tuple(int(stride) for stride in granularity),
        notes=tuple(notes),
    )


def _plan_step(values, index: int, length: int, eta: float, kernel: str, entropy) -> PlanStep:
    coefficients = kernel_of(values, index, length, eta, kernel)
    return PlanStep(
        index=index,
        merge=length,
        sigma=values[index],
        sigma_next=values[index + length],
        entropy=entropy(index, length),
        contraction=coefficients.x_coefficient if kernel != CPS else 1.0,
        noise_ratio=noise_ratio(values, index, length, eta, kernel),
        std=coefficients.std,
    )


def quantile_tau(
    sigmas: Sigmas,
    quantile: float = 0.5,
    eta: float = 0.7,
    active: str | Sequence[int] = "first_half",
    kernel: str = FLOW_SDE,
    entropy_unit: str = "exp",
) -> float:
    """Automatic tau: a quantile of the candidates' own single-step entropies (beyond the paper).

    At 0 nothing merges; at 1 every step merges until it carries the entropy of the strongest one.

    Raises:
        PlanError: quantile outside 0..1, or no candidate.
    """
    if not 0 <= quantile <= 1:
        raise PlanError(f"the tau quantile is {quantile}; it must lie between 0 and 1")
    values = checked_sigmas(sigmas)
    indices = active_indices(active, len(values) - 1)
    if not indices:
        raise PlanError(f"no candidate step in {active!r}")
    entropies = [step_entropy(values, i, 1, eta, entropy_unit, kernel) for i in indices]
    return float(torch.quantile(torch.tensor(entropies, dtype=torch.float64), quantile))


def tau_for_groups(
    sigmas: Sigmas,
    groups: int,
    eta: float = 0.7,
    active: str | Sequence[int] = "first_half",
    grouping: str = "disjoint",
    kernel: str = FLOW_SDE,
    entropy_unit: str = "exp",
) -> float:
    """Automatic tau: the smallest threshold whose plan has the number of active groups nearest to ``groups``.

    Raises:
        PlanError: groups < 1, or no threshold gives a plan.
    """
    if groups < 1:
        raise PlanError(f"the target number of groups is {groups}; it must be at least 1")
    values = checked_sigmas(sigmas)
    last = len(values) - 1
    thresholds = sorted(
        {
            step_entropy(values, i, merge, eta, entropy_unit, kernel)
            for i in active_indices(active, last)
            for merge in range(1, last - i + 1)
        }
    )
    best: tuple[int, float] | None = None
    for tau in thresholds:
        try:
            plan = plan_steps(
                values, eta, tau, active, grouping, kernel=kernel, entropy_unit=entropy_unit, allow_flip=False
            )
        except PlanError:
            continue
        distance = abs(len(plan.steps) - groups)
        if best is None or distance < best[0]:
            best = (distance, tau)
    if best is None:
        raise PlanError(f"no threshold gives a valid plan for {active!r} at eta {eta:g}")
    return best[1]
