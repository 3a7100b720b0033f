"""What a reward is, and how several are carried together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Sequence

import torch
from torch import Tensor

from ..advantage import ADVANTAGES_THEN_SUM, COMBINE_RULES


class RewardError(RuntimeError):
    """A reward that failed or returned an unusable value; training stops and keeps the run."""


class Reward(ABC):
    """Scores images; higher is better. Never returns a made-up value: it raises."""

    name: str
    """Short identifier shown in tables and used as a metric name."""

    @abstractmethod
    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Raw scores [B] float32 for images [B, H, W, 3] float in 0..1 and one prompt per image."""

    def settings(self) -> dict:
        """Plain values that identify this reward in a run's files."""
        return {"name": self.name}


@dataclass(frozen=True)
class RewardTerm:
    """One reward of a set. A watched reward is scored and logged, never trained on."""

    reward: Reward
    weight: float = 1.0
    watch: bool = False


@dataclass(frozen=True)
class RewardSet:
    """The rewards of a run with their weights; what an EGRPO_REWARD socket carries."""

    terms: tuple[RewardTerm, ...]
    rule: str = ADVANTAGES_THEN_SUM

    def __post_init__(self) -> None:
        names = [term.reward.name for term in self.terms]
        if len(set(names)) != len(names):
            raise ValueError(f"two rewards share a name: {', '.join(names)}")
        if self.rule not in COMBINE_RULES:
            raise ValueError(f"unknown combination rule {self.rule!r}: choose one of {', '.join(COMBINE_RULES)}")

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the rewards that are trained on."""
        return {term.reward.name: term.weight for term in self.terms if not term.watch}

    def score(self, images: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Scores of every reward by name, each [B] float32 on the CPU.

        Raises:
            RewardError: a reward failed, returned the wrong shape, or a value that is not finite; the message names
                the reward and the prompt.
        """
        scores = {}
        for term in self.terms:
            reward = term.reward
            try:
                values = reward.score(images, prompts)
            except RewardError:
                raise
            except Exception as error:
                raise RewardError(
                    f"reward {reward.name!r} failed on {len(prompts)} images, the first for prompt "
                    f"{prompts[0]!r}: {type(error).__name__}: {error}"
                ) from error
            values = torch.as_tensor(values).detach().float().cpu()
            if values.shape != (len(images),):
                raise RewardError(
                    f"reward {reward.name!r} returned shape {tuple(values.shape)} for {len(images)} images; "
                    f"expected ({len(images)},)"
                )
            for value, prompt in zip(values.tolist(), prompts):
                if value != value or value in (float("inf"), float("-inf")):
                    raise RewardError(
                        f"reward {reward.name!r} returned {value} for prompt {prompt!r}. A reward must be a finite "
                        "number for every image; fix the reward, or remove the prompt"
                    )
            scores[reward.name] = values
        return scores

    def settings(self) -> dict:
        return {
            "rule": self.rule,
            "terms": [{**t.reward.settings(), "weight": t.weight, "watch": t.watch} for t in self.terms],
        }
