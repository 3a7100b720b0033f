"""Rewards of the demo family: a tiny CLIP, learned from drawn shapes, and an exact judge that nothing is trained on."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import demo, oracle
from ..backends.shapes import parse_caption
from .base import Reward, RewardError, RewardSet, RewardTerm

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

DEMO_REWARDS = {
    "demo_clip": "How well the picture fits its prompt, by the demo family's own tiny CLIP (cosine, -1 to 1).",
    "demo_oracle": "Share of the prompt's facts that the picture shows: background, count, sizes, colours, shapes (0 to 1).",
}
"""Kind -> one sentence for a tooltip; the kinds that :func:`demo_reward` makes."""


class DemoClip(Reward):
    """Cosine of a tiny open_clip model's image and text features; loaded at the first score."""

    name = "demo_clip"

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @cached_property
    def _model(self) -> tuple[torch.nn.Module, Callable[[list[str]], Tensor], int]:
        from open_clip.model import CLIP
        from open_clip.tokenizer import SimpleTokenizer
        from safetensors.torch import load_file

        path = self._path or demo.demo_files().clip
        config = demo.read_description(path)["config"]
        with torch.inference_mode(False):
            model = CLIP(**config)
            model.load_state_dict(load_file(path))
        tokenizer = SimpleTokenizer(context_length=config["text_cfg"]["context_length"])
        return model.eval().requires_grad_(False), tokenizer, config["vision_cfg"]["image_size"]

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        model, tokenizer, pixels = self._model
        x = images[..., :3].movedim(-1, 1).float().cpu().clamp(0, 1)
        if x.shape[-2:] != (pixels, pixels):
            x = F.interpolate(x, (pixels, pixels), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
        unique = list(dict.fromkeys(prompts))
        texts = F.normalize(model.encode_text(tokenizer(unique)).float(), dim=-1)
        texts = texts[[unique.index(prompt) for prompt in prompts]]
        pieces = [F.normalize(model.encode_image(piece).float(), dim=-1) for piece in ((x - mean) / std).split(64)]
        return (torch.cat(pieces) * texts).sum(-1)


class DemoOracle(Reward):
    """Share of the facts of a full caption that the picture shows, read from its pixels (:mod:`egrpo.backends.oracle`)."""

    name = "demo_oracle"

    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.tensor([verdict.fraction for verdict in judged(images, prompts)])


def judged(images: Tensor, prompts: Sequence[str]) -> list[oracle.Verdict]:
    """The oracle's verdicts on images [B, H, W, 3] in 0..1 against full captions of the demo family.

    Raises:
        RewardError: a prompt that is no full caption; nothing exact can be said about it.
    """
    try:
        scenes = [parse_caption(prompt) for prompt in prompts]
    except ValueError as error:
        raise RewardError(f"demo_oracle: {error}") from None
    return oracle.judge(images[..., :3].movedim(-1, 1), scenes)


def demo_reward(kind: str) -> Reward:
    """The demo reward of that kind, see :data:`DEMO_REWARDS`.

    Raises:
        ValueError: unknown kind.
    """
    if kind == DemoClip.name:
        return DemoClip()
    if kind == DemoOracle.name:
        return DemoOracle()
    raise ValueError(f"unknown demo reward {kind!r}: choose one of {', '.join(DEMO_REWARDS)}")


def demo_reward_set() -> RewardSet:
    """What the demo trains on: the CLIP, watched by the oracle."""
    return RewardSet((RewardTerm(DemoClip()), RewardTerm(DemoOracle(), watch=True)))
