"""Captioned pictures drawn by code: coloured shapes on a plain background.

A caption lists the shapes from left to right, so it says everything about the picture but a little jitter, and
:mod:`egrpo.backends.oracle` can read it back. One item in seven (a colour, shape and background together) is kept out
of training altogether; see :func:`is_held_out`.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from itertools import product
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PALETTE = {
    "red": (205, 25, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (250, 225, 50),
    "purple": (145, 55, 180),
    "orange": (245, 130, 20),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "star", "ring")
RADIUS = {"small": 0.15, "large": 0.21}
"""Radius of the circle, as a fraction of the image; the other shapes are drawn about as wide."""
SIZES = tuple(RADIUS)
CENTRES = {1: (0.5,), 2: (0.25, 0.75)}
"""Horizontal places of one item and of two."""

JITTER_PLACE, JITTER_RADIUS, JITTER_COLOUR, LIGHTING = 0.012, 0.03, 0.025, 0.03
COLOUR_VALUES = torch.tensor(list(PALETTE.values()), dtype=torch.float32) / 255
"""[8, 3] RGB in 0..1, in the order of :data:`COLOURS`."""

_TRIANGLE, _SQUARE, _STAR_OUTER, _STAR_INNER, _RING_HOLE = 1.2, 0.86, 1.14, 0.48, 0.55
DAMAGES = ("warp", "blob", "melt")


@dataclass(frozen=True)
class Item:
    """One shape."""

    size: str
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """One or two items, left to right, on a background of a colour that no item has."""

    items: tuple[Item, ...]
    background: str


def caption(scene: Scene) -> str:
    """The full caption, for example ``a large red circle and a small blue square on a green background``."""
    items = " and ".join(f"a {item}" for item in scene.items)
    return f"{items} on {_article(scene.background)} {scene.background} background"


def loose_caption(scene: Scene, rng: random.Random, drop: float) -> str:
    """A caption in which each size word, and the background, is left out with probability ``drop``."""
    phrases = []
    for item in scene.items:
        words = f"{item.colour} {item.shape}" if rng.random() < drop else str(item)
        phrases.append(f"{_article(words)} {words}")
    text = " and ".join(phrases)
    if rng.random() >= drop:
        text += f" on {_article(scene.background)} {scene.background} background"
    return text


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


_ITEM = rf"an? ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_CAPTION = re.compile(rf"{_ITEM}(?: and {_ITEM})? on an? ({'|'.join(COLOURS)}) background")


def parse_caption(text: str) -> Scene:
    """The scene of a full caption.

    Raises:
        ValueError: not a full caption of this family.
    """
    match = _CAPTION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(
            f"{text!r} is not a full caption of the demo family; write it as "
            "'a large red circle and a small blue square on a green background'"
        )
    *words, background = match.groups()
    return Scene(tuple(Item(*words[i : i + 3]) for i in (0, 3) if words[i]), background)


def is_held_out(scene: Scene) -> bool:
    """Whether an item's colour, shape and background together are kept out of training.

    Every colour, shape and background, and every two of them, remains in training.
    """
    return any(_held_out(item, scene.background) for item in scene.items)


def _held_out(item: Item, background: str) -> bool:
    return (COLOURS.index(item.colour) + 3 * SHAPES.index(item.shape) + 2 * COLOURS.index(background)) % 7 == 0


def sample_scene(rng: random.Random, *, held_out: bool = False, two: float = 0.6) -> Scene:
    """A random scene, of two items with probability ``two``; from the held-out combinations or from the others."""
    while True:
        background = rng.choice(COLOURS)
        colours = [colour for colour in COLOURS if colour != background]
        count = 2 if rng.random() < two else 1
        items = tuple(Item(rng.choice(SIZES), rng.choice(colours), rng.choice(SHAPES)) for _ in range(count))
        scene = Scene(items, background)
        if is_held_out(scene) == held_out:
            return scene


def sample_scenes(count: int, seed: int, *, held_out: bool = False, two: float = 0.6) -> list[Scene]:
    """``count`` random scenes, the same for the same seed."""
    rng = random.Random(seed)
    return [sample_scene(rng, held_out=held_out, two=two) for _ in range(count)]


def contrast_scene(scene: Scene, kind: str, rng: random.Random) -> Scene | None:
    """``scene`` with one thing wrong; None when that is not possible.

    Args:
        kind: ``colour``, ``shape`` or ``size`` of one item, ``background``, ``count`` (an item more or fewer), or
            ``swap colour``, ``swap shape``, ``swap size`` (between two items).
    """
    items, background = list(scene.items), scene.background
    at = rng.randrange(len(items))
    item = items[at]
    used = {background, *(other.colour for other in items)}
    if kind.startswith("swap "):
        name = kind.removeprefix("swap ")
        if len(items) < 2 or getattr(items[0], name) == getattr(items[1], name):
            return None
        values = [getattr(other, name) for other in items]
        items = [Item(**{**vars(other), name: value}) for other, value in zip(items, reversed(values))]
    elif kind == "colour":
        items[at] = Item(item.size, rng.choice([c for c in COLOURS if c not in (item.colour, background)]), item.shape)
    elif kind == "shape":
        items[at] = Item(item.size, item.colour, rng.choice([s for s in SHAPES if s != item.shape]))
    elif kind == "size":
        items[at] = Item("small" if item.size == "large" else "large", item.colour, item.shape)
    elif kind == "background":
        background = rng.choice([colour for colour in COLOURS if colour not in used])
    elif kind == "count":
        if len(items) == 2:
            items = [item]
        else:
            colour = rng.choice([colour for colour in COLOURS if colour != background])
            items.insert(rng.randrange(2), Item(rng.choice(SIZES), colour, rng.choice(SHAPES)))
    else:
        raise ValueError(f"unknown kind of contrast {kind!r}; choose one of {', '.join(CONTRASTS)}")
    return Scene(tuple(items), background)


CONTRASTS = ("colour", "shape", "size", "background", "count", "swap colour", "swap shape", "swap size")


# --- drawing ---------------------------------------------------------------------------------------------------------


def render(
    scenes: Sequence[Scene], generator: torch.Generator, pixels: int = 64, *, damage: str | None = None
) -> Tensor:
    """Draw scenes.

    Args:
        pixels: width and height.
        damage: draw every item badly: ``warp`` (wavy outlines), ``blob`` (a lump instead of the shape) or ``melt``
            (dissolved, with holes). The colours, the places and roughly the sizes stay right.

    Returns:
        [B, 3, pixels, pixels] in 0..1.
    """
    if damage not in (None, *DAMAGES):
        raise ValueError(f"unknown damage {damage!r}; choose one of {', '.join(DAMAGES)}")
    count = len(scenes)

    def spread(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator) * 2 - 1

    axis = (torch.arange(pixels) + 0.5) / pixels
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    backgrounds = COLOUR_VALUES[[COLOURS.index(scene.background) for scene in scenes]]
    # Soft light from one side, so that even plain areas are not quite flat.
    angle, strength = spread(1, 1) * math.pi, LIGHTING * spread(1, 1)
    light = strength * (angle.cos() * (2 * x - 1) + angle.sin() * (2 * y - 1))
    images = (backgrounds + JITTER_COLOUR * spread(3))[:, :, None, None] + light[:, None]

    for place in range(2):
        centres_y, radii, colours = 0.5 + JITTER_PLACE * spread(), 1 + JITTER_RADIUS * spread(), spread(3)
        centres_x = JITTER_PLACE * spread()
        present = [index for index, scene in enumerate(scenes) if place < len(scene.items)]
        if not present:
            continue
        items = [scenes[index].items[place] for index in present]
        middle = torch.tensor([CENTRES[len(scenes[index].items)][place] for index in present])
        radius = torch.tensor([RADIUS[item.size] for item in items]) * radii[present]
        u = (x - (middle + centres_x[present])[:, None, None]) / radius[:, None, None]
        v = (y - centres_y[present][:, None, None]) / radius[:, None, None]
        if damage == "warp":
            u, v = _warp(u, v, generator)
        kinds = torch.tensor([SHAPES.index(item.shape) for item in items])
        distance = _blob(u, v, generator) if damage == "blob" else _distance(u, v, kinds)
        if damage == "melt":
            distance = distance + 0.5 * _smooth_noise(len(items), pixels, max(3, pixels // 9), generator)
        cover = (0.5 - distance * radius[:, None, None] * pixels).clamp(0, 1)[:, None]
        values = COLOUR_VALUES[[COLOURS.index(item.colour) for item in items]] + JITTER_COLOUR * colours[present]
        images[present] = images[present] * (1 - cover) + values[:, :, None, None] * cover
    return images.clamp(0, 1)


def _distance(u: Tensor, v: Tensor, kinds: Tensor) -> Tensor:
    """Signed distance [N, H, W] to each item's outline, inside negative, in units of the radius; v points down."""
    length = (u.square() + v.square()).sqrt()
    outlines = torch.stack(
        [
            length - 1,
            torch.maximum(u.abs(), v.abs()) - _SQUARE,
            _star(u, v - 0.25 * _TRIANGLE, 3, _TRIANGLE, _TRIANGLE / 2),
            _star(u, v - 0.1 * _STAR_OUTER, 5, _STAR_OUTER, _STAR_INNER),
            torch.maximum(length - 1, _RING_HOLE - length),
        ]
    )
    return outlines[kinds, torch.arange(len(kinds))]


def _star(u: Tensor, v: Tensor, points: int, outer: float, inner: float) -> Tensor:
    """Distance to the edge of a star that points up; with inner = outer · cos(π/points), a regular polygon."""
    sector = math.pi / points
    # Fold into the half sector between a point (angle 0) and the notch next to it (angle `sector`).
    angle = torch.atan2(u, -v)
    angle = (torch.remainder(angle + sector, 2 * sector) - sector).abs()
    length = (u.square() + v.square()).sqrt()
    along, across = length * angle.cos(), length * angle.sin()
    edge = (inner * math.cos(sector) - outer, inner * math.sin(sector))
    norm = math.hypot(*edge)
    return ((along - outer) * edge[1] - across * edge[0]) / norm


def _warp(u: Tensor, v: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    def wave(a: Tensor, b: Tensor) -> Tensor:
        shape = (len(a), 1, 1)
        frequency = 2.5 + 3.0 * torch.rand(shape, generator=generator)
        phase, slant = (2 * math.pi * torch.rand(shape, generator=generator) for _ in range(2))
        amount = 0.16 + 0.14 * torch.rand(shape, generator=generator)
        return amount * torch.sin(frequency * (slant.cos() * a + slant.sin() * b) + phase)

    return u + wave(u, v), v + wave(v, u)


def _blob(u: Tensor, v: Tensor, generator: torch.Generator) -> Tensor:
    angle, radius = torch.atan2(v, u), 0.88
    for order in (2, 3, 4):
        phase = 2 * math.pi * torch.rand(len(u), 1, 1, generator=generator)
        amount = (0.1 + 0.16 * torch.rand(len(u), 1, 1, generator=generator)) / (order / 2)
        radius = radius + amount * torch.sin(order * angle + phase)
    return (u.square() + v.square()).sqrt() - radius


def _smooth_noise(count: int, pixels: int, cells: int, generator: torch.Generator) -> Tensor:
    coarse = torch.randn(count, 1, cells, cells, generator=generator)
    return F.interpolate(coarse, size=(pixels, pixels), mode="bicubic", align_corners=False)[:, 0]


def all_items() -> list[Item]:
    """Every item of the vocabulary."""
    return [Item(*values) for values in product(SIZES, COLOURS, SHAPES)]
