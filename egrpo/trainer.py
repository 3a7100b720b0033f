"""The training loop: rollout -> decode -> score -> advantage -> update, as a generator of typed events.

The trainer knows neither the model (:class:`egrpo.policy.Policy`) nor where anything is stored: progress bars, the
run folder, plots and tests listen to its events. All randomness of an iteration is a function of (seed, iteration,
prompt), so a run that continues from iteration k draws what the uninterrupted run would have drawn.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Callable, Iterator

import torch
from torch import Tensor

from .advantage import combined_advantages, weighted_reward
from .evaluation import Evaluation, evaluate_policy
from .objective import PLAIN_RATIO, RATIOS, clipped_surrogate, kl_to_base, log_ratio
from .policy import Condition, Policy, Velocity
from .prompts import PromptSet, checked_prompts
from .rewards.base import RewardSet
from .rollout import Group, Rollout, sample_rollout
from .sampling import derived_generator, initial_noise, watched
from .schedule import Plan
from .sde import log_prob, transition

CONDITIONS_AHEAD = 64
"""Iterations whose prompts are encoded in one go, so that the text encoder is loaded rarely."""


class SettingsError(ValueError):
    """A training setting that cannot work; the message names it, its value and the way out."""


@dataclass(frozen=True)
class TrainSettings:
    """Hyper-parameters of a run. Defaults follow the paper, except the learning rate, which is for a LoRA."""

    iterations: int = 100
    prompts_per_iteration: int = 1
    group_size: int = 8
    learning_rate: float = 1e-4
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    clip_range: float = 1e-4
    kl_beta: float = 0.0
    ratio: str = PLAIN_RATIO
    update_every: int = 0
    """Prompts per optimizer step; 0 takes a step after every active step, as the released code does."""
    inner_updates: int = 1
    """Passes over the same rollouts. The clip range acts from the second pass on."""
    stale_log_prob: bool = False
    """Take the old log-probability from the rollout instead of the update's first forward. They differ only when an
    earlier group of the same iteration has already moved the parameters."""
    ema_decay: float = 0.0
    eval_every: int = 10
    eval_samples: int = 1
    """Images per held-out prompt."""
    checkpoint_every: int = 50
    micro_batch: int = 0
    """Latents per model call in rollouts; 0 = as many as fit."""
    seed: int = 0

    def check(self) -> None:
        """Raise :class:`SettingsError` for the first setting that cannot work."""
        limits = {
            "iterations": 1,
            "prompts_per_iteration": 1,
            "group_size": 2,
            "inner_updates": 1,
            "eval_samples": 1,
            "update_every": 0,
            "eval_every": 0,
            "checkpoint_every": 0,
            "micro_batch": 0,
        }
        for name, least in limits.items():
            value = getattr(self, name)
            if value < least:
                why = " (a group of one has no relative advantage)" if name == "group_size" else ""
                raise SettingsError(f"{name} is {value}; it must be at least {least}{why}")
        for name in ("learning_rate", "clip_range", "max_grad_norm"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise SettingsError(f"{name} is {value}; it must be a positive number")
        for name in ("weight_decay", "kl_beta"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise SettingsError(f"{name} is {value}; it must be 0 or more")
        if not 0 <= self.ema_decay < 1:
            raise SettingsError(f"ema_decay is {self.ema_decay}; it must be 0 (off) or below 1, for example 0.99")
        if self.ratio not in RATIOS:
            raise SettingsError(f"unknown ratio {self.ratio!r}: choose one of {', '.join(RATIOS)}")


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass
class Started:
    """Before the first rollout: what the run will cost."""

    first_iteration: int
    iterations: int
    forward_evaluations: int
    """Model evaluations without gradient in the whole run, evaluations of held-out prompts included."""
    backward_evaluations: int
    images: int
    micro_batch: int
    seconds: float
    """Estimated from one timed model call, decode and score; rough."""
    memory: dict[str, int]
    """Bytes per phase as the backend estimates them; empty when it cannot."""


@dataclass
class PromptRollout:
    """One prompt's scored images, for galleries and previews."""

    prompt: str
    images: Tensor
    """[1 + K L G, H, W, 3]: the anchor, then groups by active step, granularity, sample."""
    rewards: dict[str, Tensor]
    """Per reward [K, L, G]."""
    anchor_rewards: dict[str, float]
    advantages: Tensor
    """[K, G], summed over granularities."""


@dataclass
class Rollouts:
    """The scored rollouts of one iteration, before its update."""

    iteration: int
    prompts: list[PromptRollout]


@dataclass
class Step:
    """One finished iteration with its metrics (floats by standard name)."""

    iteration: int
    metrics: dict[str, float]


@dataclass
class Checkpoint:
    """A consistent state at an iteration boundary, worth saving."""

    iteration: int


@dataclass
class Warned:
    """Something the user should know; training goes on."""

    iteration: int
    message: str


@dataclass
class Finished:
    """The last event of a run that was not interrupted."""

    iteration: int


Event = Started | Rollouts | Step | Evaluation | Checkpoint | Warned | Finished


@dataclass(frozen=True)
class Progress:
    """Micro-step progress within an iteration: latents evaluated so far of those expected."""

    iteration: int
    done: int
    total: int
    phase: str


@dataclass
class TrainState:
    """What a later run needs to continue exactly: tensors by name and plain values."""

    iteration: int
    tensors: dict[str, Tensor]
    values: dict = field(default_factory=dict)


# --- the loop --------------------------------------------------------------------------------------------------------


class Trainer:
    """E-GRPO on one policy.

    Args:
        on_progress: called after every model call with a :class:`Progress`.
        advantage_transform: maps the advantages [K, G] of one prompt before the update; for controls such as
            shuffling them.

    Raises:
        SettingsError, PromptError, ValueError: before any model is used, for settings that cannot work.
    """

    def __init__(
        self,
        policy: Policy,
        rewards: RewardSet,
        prompts: PromptSet,
        plan: Plan,
        settings: TrainSettings,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        advantage_transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        settings.check()
        checked_prompts(prompts.train, "training")
        checked_prompts(prompts.held_out, "held-out")
        if not rewards.weights:
            raise SettingsError("every reward is watch-only: give at least one reward to train on")
        self.policy, self.rewards, self.prompts, self.plan, self.settings = policy, rewards, prompts, plan, settings
        self.iteration = 0
        self.micro_batch = 1
        self._on_progress = on_progress
        self._advantage_transform = advantage_transform
        self._conditions: dict[str, Condition] = {}
        self._evaluated = 0
        self._optimizer_steps = 0
        with policy.normal_mode():
            self.optimizer = torch.optim.AdamW(
                policy.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
            )
            self._ema = [p.detach().clone() for p in policy.parameters()] if settings.ema_decay else []

    # state

    def state(self) -> TrainState:
        """The run's state on the CPU: LoRA, optimizer, EMA and the iteration. Exact at iteration boundaries."""
        tensors = {f"lora.{name}": t for name, t in self.policy.state_dict().items()}
        for i, parameter in enumerate(self.policy.parameters()):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{i}.{name}"] = value.detach().cpu().clone()
        tensors |= {f"ema.{i}": value.detach().cpu().clone() for i, value in enumerate(self._ema)}
        return TrainState(
            self.iteration,
            tensors,
            {"optimizer_steps": self._optimizer_steps, "settings": asdict(self.settings)},
        )

    def load_state(self, state: TrainState) -> None:
        """Continue from :meth:`state`; raises ValueError when the state belongs to another LoRA."""
        by_kind: dict[str, dict[str, Tensor]] = {"lora": {}, "optimizer": {}, "ema": {}}
        for name, tensor in state.tensors.items():
            kind, _, rest = name.partition(".")
            by_kind[kind][rest] = tensor
        with self.policy.normal_mode():
            self.policy.load_state_dict(by_kind["lora"])
            for i, parameter in enumerate(self.policy.parameters()):
                prefix = f"{i}."
                entries = {n[len(prefix) :]: t for n, t in by_kind["optimizer"].items() if n.startswith(prefix)}
                if entries:
                    self.optimizer.state[parameter] = {
                        name: value.clone() if name == "step" else value.to(parameter.device, copy=True)
                        for name, value in entries.items()
                    }
            if self._ema:
                sources = [by_kind["ema"].get(str(i), p.detach()) for i, p in enumerate(self.policy.parameters())]
                self._ema = [s.to(p.device, copy=True) for s, p in zip(sources, self.policy.parameters())]
        self.iteration = state.iteration
        self._optimizer_steps = state.values.get("optimizer_steps", 0)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The EMA in place of the current parameters (for evaluation and export); nothing without EMA."""
        if not self._ema:
            yield
            return
        parameters = self.policy.parameters()
        with self.policy.normal_mode(), torch.no_grad():
            current = [p.detach().clone() for p in parameters]
            for p, average in zip(parameters, self._ema):
                p.copy_(average)
        try:
            yield
        finally:
            with self.policy.normal_mode(), torch.no_grad():
                for p, value in zip(parameters, current):
                    p.copy_(value)

    # events

    def events(self) -> Iterator[Event]:
        """Run from the current iteration to the last, yielding what happens."""
        s = self.settings
        yield self._start()
        if self.iteration == 0:
            yield self.evaluate()
        while self.iteration < s.iterations:
            started = time.perf_counter()
            batch = self._rollouts()
            rolled_out = time.perf_counter()
            scored = [self._score(prompt, rollout, images) for prompt, _, rollout, images in self._decoded(batch)]
            yield Rollouts(self.iteration, scored)
            scoring_done = time.perf_counter()
            metrics = self._update(batch, scored)
            metrics |= self._reward_metrics(scored)
            now = time.perf_counter()
            metrics |= {
                "seconds_rollout": rolled_out - started,
                "seconds_scoring": scoring_done - rolled_out,
                "seconds_update": now - scoring_done,
                "seconds": now - started,
                "evaluations_per_second": metrics["evaluations"] / max(now - started, 1e-9),
            }
            for message in self._complaints(metrics):
                yield Warned(self.iteration, message)
            self.iteration += 1
            last = self.iteration == s.iterations
            yield Step(self.iteration, metrics)
            if last or (s.eval_every and self.iteration % s.eval_every == 0):
                yield self.evaluate()
            if last or (s.checkpoint_every and self.iteration % s.checkpoint_every == 0):
                yield Checkpoint(self.iteration)
        yield Finished(self.iteration)

    # phases

    def _start(self) -> Started:
        """Time one model call, decode and score, and work out the cost of the whole run."""
        s, plan = self.settings, self.plan
        self.micro_batch = self.policy.micro_batch(s.micro_batch)
        prompt = self.prompts.train[0]
        condition = self._condition_of([prompt])[0]
        noise = torch.randn((1, *self.policy.latent_shape), generator=derived_generator(s.seed, "timing"))

        def timed_calls(velocity) -> tuple[float, float]:
            x = noise.to(self.policy.device)
            velocity(x, plan.sigmas[0])
            begin = time.perf_counter()
            velocity(x, plan.sigmas[0])
            middle = time.perf_counter()
            velocity(x.repeat(self.micro_batch, 1, 1, 1), plan.sigmas[0])
            return middle - begin, (time.perf_counter() - middle) / self.micro_batch

        single, batched = self.policy.rollout(condition, timed_calls)
        begin = time.perf_counter()
        with self.policy.scoring():
            self.rewards.score(self.policy.decode(noise), [prompt])
        per_image = time.perf_counter() - begin

        forward, backward = plan.evaluations(s.group_size)
        left = s.iterations - self.iteration
        rollouts = left * s.prompts_per_iteration
        evaluations = sum(
            1
            for i in range(self.iteration, s.iterations + 1)
            if i == 0 or (i > self.iteration and (i == s.iterations or (s.eval_every and i % s.eval_every == 0)))
        )
        eval_images = evaluations * len(self.prompts.held_out) * s.eval_samples
        images = rollouts * plan.images(s.group_size) + eval_images
        backward_cost = 4 if not s.kl_beta else 5  # forward, recompute and backward of about two forwards
        seconds = (
            rollouts * (plan.total_steps * single + (forward - plan.total_steps) * batched)
            + rollouts * s.inner_updates * backward * backward_cost * single
            + eval_images * plan.total_steps * batched
            + images * per_image
        )
        return Started(
            self.iteration,
            s.iterations,
            rollouts * forward + eval_images * plan.total_steps,
            rollouts * backward * s.inner_updates,
            images,
            self.micro_batch,
            seconds,
            self.policy.memory_estimate(self.micro_batch),
        )

    def _rollouts(self) -> list[tuple[str, Condition, Rollout]]:
        s = self.settings
        prompts = self.prompts.batch(self.iteration, s.prompts_per_iteration, s.seed)
        total = s.prompts_per_iteration * self.plan.evaluations(s.group_size)[0]
        self._evaluated = 0
        batch = []
        for position, (prompt, condition) in enumerate(zip(prompts, self._condition_of(prompts))):
            generator = derived_generator(s.seed, "rollout", self.iteration, position)
            noise = initial_noise(self.policy, self.plan, generator)

            def work(velocity, noise=noise, generator=generator) -> Rollout:
                return sample_rollout(
                    watched(self.policy, velocity),
                    self.plan,
                    noise.to(self.policy.device),
                    s.group_size,
                    generator,
                    self.micro_batch,
                    on_step=partial(self._progress, total=total, phase="rollout"),
                )

            batch.append((prompt, condition, self.policy.rollout(condition, work)))
        return batch

    def _decoded(self, batch):
        """(prompt, condition, rollout, images) of each prompt; the reward models may use the device from here on."""
        with self.policy.scoring():
            for prompt, condition, rollout in batch:
                self.policy.check_interrupted()
                yield prompt, condition, rollout, self.policy.decode(rollout.latents())

    def _score(self, prompt: str, rollout: Rollout, images: Tensor) -> PromptRollout:
        self.policy.check_interrupted()
        scores = self.rewards.score(images, [prompt] * len(images))
        shape = (len(rollout.groups), len(self.plan.granularity), self.settings.group_size)
        rewards = {name: values[1:].view(shape) for name, values in scores.items()}
        trained = {name: rewards[name] for name in self.rewards.weights}
        advantages = combined_advantages(trained, self.rewards.weights, self.rewards.rule).sum(dim=1)
        if self._advantage_transform:
            advantages = self._advantage_transform(advantages)
        anchors = {name: values[0].item() for name, values in scores.items()}
        return PromptRollout(prompt, images, rewards, anchors, advantages)

    def _update(self, batch, scored: list[PromptRollout]) -> dict[str, float]:
        """Passes over the groups of an iteration; one forward with gradient per active step, at batch 1."""
        log = _UpdateLog()
        self.optimizer.zero_grad(set_to_none=True)
        lessons = [(condition, rollout, p.advantages) for (_, condition, rollout), p in zip(batch, scored)]
        together = self.settings.update_every or 1
        for _ in range(self.settings.inner_updates):
            for start in range(0, len(lessons), together):
                self._learn(lessons[start : start + together], log)
        metrics = log.metrics()
        metrics["evaluations"] = float(sum(rollout.evaluations for _, _, rollout in batch))
        metrics["optimizer_steps"] = float(self._optimizer_steps)
        metrics["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        return metrics

    def _learn(self, lessons: list[tuple[Condition, Rollout, Tensor]], log: "_UpdateLog") -> None:
        """Update on some prompts: a step per active step, or (update_every > 0) one step on their mean gradient."""
        per_step = self.settings.update_every == 0
        used = sum(int((advantages != 0).any(dim=-1).sum()) for _, _, advantages in lessons)
        for condition, rollout, advantages in lessons:

            def work(velocity: Velocity, base_velocity: Velocity, rollout=rollout, advantages=advantages) -> None:
                for group, group_advantages in zip(rollout.groups, advantages):
                    if not (group_advantages != 0).any():
                        log.skipped_groups += 1
                        continue
                    self._accumulate(velocity, base_velocity, group, group_advantages, 1 if per_step else used, log)
                    if per_step:
                        self._optimizer_step(log)

            self.policy.update(condition, work)
        if not per_step:
            with self.policy.normal_mode():
                self._optimizer_step(log)

    def _accumulate(self, velocity, base_velocity, group: Group, advantages: Tensor, share: int, log) -> None:
        """Forward and backward of one group: all G next states under the one new mean."""
        s, plan, step = self.settings, self.plan, group.step
        self.policy.check_interrupted()
        device = self.policy.device
        x, x_next, advantages = (_onto(t, device) for t in (group.x, group.x_next, advantages))
        v = velocity(x, step.sigma)
        mean, std = transition(x, v, plan.sigmas, step.index, step.merge, plan.eta, plan.kernel)
        current = log_prob(x_next, mean, std).detach()
        drift = _onto(group.log_prob, device)
        log.rollout_ratio_error = max(log.rollout_ratio_error, (torch.exp(current - drift) - 1).abs().max().item())
        if group.old_log_prob is None:
            group.old_log_prob = drift if s.stale_log_prob else current
            group.old_mean = _onto(group.mean, device) if s.stale_log_prob else mean.detach()
        surrogate = clipped_surrogate(
            log_ratio(x_next, mean, std, group.old_log_prob, group.old_mean, s.ratio), advantages, s.clip_range
        )
        loss = surrogate.loss
        if s.kl_beta:
            with torch.no_grad():
                base_v = base_velocity(x, step.sigma)
                base_mean, _ = transition(x, base_v, plan.sigmas, step.index, step.merge, plan.eta, plan.kernel)
            kl = kl_to_base(mean, base_mean, std)
            loss = loss + s.kl_beta * kl
            log.kl.append(kl.item())
        if not torch.isfinite(loss):
            self.optimizer.zero_grad(set_to_none=True)
            log.skipped_steps += 1
            return
        (loss / share).backward()
        log.add(surrogate, loss.item())

    def _optimizer_step(self, log) -> None:
        """Clip, step, forget the gradient; a gradient that is not finite is dropped and counted."""
        parameters = self.policy.parameters()
        if all(p.grad is None for p in parameters):
            return
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm).item()
        if math.isfinite(norm):
            self.optimizer.step()
            self._optimizer_steps += 1
            log.grad_norm.append(norm)
            with torch.no_grad():
                for average, p in zip(self._ema, parameters):
                    average.lerp_(p, 1.0 - self.settings.ema_decay)
        else:
            log.skipped_steps += 1
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> Evaluation:
        """Sample the held-out prompts by ODE from fixed noise and score them, with the EMA where there is one."""
        s, prompts = self.settings, list(self.prompts.held_out)
        total = len(prompts) * s.eval_samples * self.plan.total_steps
        self._evaluated = 0
        with self.averaged_weights():
            return evaluate_policy(
                self.policy,
                self.rewards,
                prompts,
                self._condition_of(prompts),
                self.plan,
                samples=s.eval_samples,
                seed=s.seed,
                micro_batch=self.micro_batch,
                iteration=self.iteration,
                on_step=partial(self._progress, total=total, phase="evaluation"),
            )

    # helpers

    def _condition_of(self, prompts: list[str]) -> list[Condition]:
        """Encoded prompts, encoding ahead those of the next iterations and forgetting the rest."""
        if any(prompt not in self._conditions for prompt in prompts):
            s = self.settings
            ahead = range(self.iteration, min(self.iteration + CONDITIONS_AHEAD, s.iterations))
            wanted = [*prompts, *self.prompts.held_out[:CONDITIONS_AHEAD]]
            for i in ahead:
                wanted += self.prompts.batch(i, s.prompts_per_iteration, s.seed)
            wanted = list(dict.fromkeys(wanted))
            missing = [prompt for prompt in wanted if prompt not in self._conditions]
            known = {prompt: self._conditions[prompt] for prompt in wanted if prompt in self._conditions}
            self._conditions = known | dict(zip(missing, self.policy.encode(missing)))
        return [self._conditions[prompt] for prompt in prompts]

    def _progress(self, latents: int, total: int, phase: str) -> None:
        self._evaluated += latents
        if self._on_progress:
            self._on_progress(Progress(self.iteration, self._evaluated, total, phase))

    def _reward_metrics(self, scored: list[PromptRollout]) -> dict[str, float]:
        weights = self.rewards.weights
        metrics: dict[str, float] = {}
        for name in scored[0].rewards:
            metrics[f"reward/{name}"] = _mean([p.rewards[name].mean().item() for p in scored])
            metrics[f"spread/{name}"] = _mean([p.rewards[name].std(dim=-1).mean().item() for p in scored])
        combined = [weighted_reward({n: p.rewards[n] for n in weights}, weights) for p in scored]
        metrics["reward"] = _mean([r.mean().item() for r in combined])
        metrics["reward_std"] = _mean([r.std(dim=-1).mean().item() for r in combined])
        metrics["anchor_reward"] = _mean([sum(w * p.anchor_rewards[n] for n, w in weights.items()) for p in scored])
        return metrics

    def _complaints(self, metrics: dict[str, float]) -> Iterator[str]:
        if metrics["skipped_steps"]:
            yield (
                f"{metrics['skipped_steps']:.0f} updates dropped because loss or gradient was not finite; "
                "lower the learning rate if this goes on"
            )
        if not metrics["used_groups"]:
            yield "no group had any spread in its rewards: nothing was learnt; raise eta or choose another reward"


@dataclass
class _UpdateLog:
    """Diagnostics gathered over one iteration's update."""

    loss: list[float] = field(default_factory=list)
    ratio_error: float = 0.0
    rollout_ratio_error: float = 0.0
    clip_fraction: list[float] = field(default_factory=list)
    approx_kl: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    skipped_groups: int = 0
    skipped_steps: int = 0

    def add(self, surrogate, loss: float) -> None:
        self.loss.append(loss)
        self.ratio_error = max(self.ratio_error, (surrogate.ratio - 1).abs().max().item())
        self.clip_fraction.append(surrogate.clip_fraction)
        self.approx_kl.append(surrogate.approx_kl)

    def metrics(self) -> dict[str, float]:
        """Means over the updates; what was not measured is left out, never written as zero."""
        means = {
            name: _mean(values)
            for name in ("loss", "clip_fraction", "approx_kl", "kl", "grad_norm")
            if (values := getattr(self, name))
        }
        return means | {
            "ratio_error": self.ratio_error,
            "rollout_ratio_error": self.rollout_ratio_error,
            "used_groups": float(len(self.loss)),
            "skipped_groups": float(self.skipped_groups),
            "skipped_steps": float(self.skipped_steps),
        }


def _onto(tensor: Tensor, device: torch.device) -> Tensor:
    """A fresh copy on the device: what a rollout made in inference mode cannot take part in autograd."""
    return tensor.to(device, copy=True)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
