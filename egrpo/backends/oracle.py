"""An exact judge of the demo family's pictures: reads background, count, sizes, colours and shapes from the pixels.

It learns nothing and no training sees it, so that it can say whether a rising reward means better pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import shapes
from .shapes import COLOUR_VALUES, COLOURS, RADIUS, SHAPES, SIZES, Item, Scene

FOREGROUND = 0.055
"""Squared RGB distance from the background at which a pixel belongs to an item."""
COLOUR_LIMIT = 0.045
"""Squared RGB distance within which a colour is still the palette's."""
SMALLEST_AREA = 0.012
PURITY, OVERLAP = 0.75, 0.75
"""An item needs this share of its inner pixels in one colour, and this overlap with the outline of its shape."""
PATCH = 24
ATTRIBUTES = ("background", "count", "size", "colour", "shape")


@dataclass(frozen=True)
class Found:
    """An item in a picture. ``colour`` and ``shape`` are None when they are no colour or shape of the family."""

    size: str
    colour: str | None
    shape: str | None
    overlap: float
    """With the nearest shape, 0..1."""


@dataclass(frozen=True)
class Reading:
    """What a picture shows, items from left to right."""

    background: str | None
    items: tuple[Found, ...]


@dataclass(frozen=True)
class Verdict:
    """How far a picture follows its caption."""

    right: bool
    """Everything is as the caption says, and nothing else is there."""
    fraction: float
    """Share of the checks passed: background, count, and three for each item that the caption names."""
    attributes: dict[str, float]
    """The same for each of :data:`ATTRIBUTES`, 0..1."""


def read(images: Tensor) -> list[Reading]:
    """Read pictures [B, 3, H, W] in 0..1 (square, 32 pixels or more)."""
    if images.ndim != 4 or images.shape[1] != 3 or images.shape[2] != images.shape[3]:
        raise ValueError(f"images have shape {tuple(images.shape)}; expected square images [B, 3, H, W] in 0..1")
    images = images.detach().float().clamp(0, 1).cpu()
    edge = max(1, images.shape[-1] // 32)
    borders = torch.cat(
        [images[..., :edge, :].flatten(2), images[..., -edge:, :].flatten(2), images[..., :edge].flatten(2)]
        + [images[..., -edge:].flatten(2)],
        dim=2,
    )
    backgrounds = borders.median(dim=2).values
    foreground = (images - backgrounds[:, :, None, None]).square().sum(1) > FOREGROUND
    labels = _components(foreground)
    return [_read_one(*parts) for parts in zip(images, backgrounds, labels)]


def judge(images: Tensor, scenes: Sequence[Scene]) -> list[Verdict]:
    """Compare pictures [B, 3, H, W] in 0..1 with what they should show."""
    return [_compare(reading, scene) for reading, scene in zip(read(images), scenes, strict=True)]


def summary(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Means over pictures: ``right``, ``fraction`` and each attribute."""
    rows = [{"right": float(v.right), "fraction": v.fraction, **v.attributes} for v in verdicts]
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}


def _components(mask: Tensor) -> Tensor:
    """Label connected areas (8 neighbours) of [B, H, W]; zero outside."""
    count, height, width = mask.shape
    ids = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, 1, height, width)
    labels = ids * mask[:, None]
    while True:
        wider = F.max_pool2d(labels, 3, 1, 1) * mask[:, None]
        if torch.equal(wider, labels):
            return labels[:, 0].long()
        labels = wider


def _palette(colours: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest palette index of [..., 3], and whether it is near enough to count."""
    distance = (colours[..., None, :] - COLOUR_VALUES).square().sum(-1)
    nearest = distance.min(-1)
    return nearest.indices, nearest.values < COLOUR_LIMIT


def _read_one(image: Tensor, background: Tensor, labels: Tensor) -> Reading:
    pixels = image.shape[-1]
    index, near = _palette(background)
    found = []
    for label in labels.unique().tolist():
        area = labels == label
        if label == 0 or area.sum() < SMALLEST_AREA * pixels * pixels:
            continue
        found.append(_read_item(image, background, area))
    found.sort(key=lambda pair: pair[0])
    return Reading(COLOURS[int(index)] if bool(near) else None, tuple(item for _, item in found))


def _read_item(image: Tensor, background: Tensor, area: Tensor) -> tuple[float, Found]:
    """Horizontal place and description of the item that covers ``area`` [H, W]."""
    inner = -F.max_pool2d(-area[None, None].float(), 3, 1, 1)[0, 0] > 0
    core = image[:, inner if inner.sum() >= 8 else area].T
    middle = core.median(dim=0).values
    # A ragged or mottled item shows other colours inside; only its true colour may pass.
    index, near = _palette(middle)
    pure = ((core - COLOUR_VALUES[index]).square().sum(-1) < 2 * COLOUR_LIMIT).float().mean() >= PURITY
    # How much of each pixel is item rather than background: the outline to a fraction of a pixel.
    step = middle - background
    cover = ((image - background[:, None, None]) * step[:, None, None]).sum(0) / step.square().sum()
    cover = cover.clamp(0, 1) * F.max_pool2d(area[None, None].float(), 3, 1, 1)[0, 0]
    patch, height, width = _patch(cover)
    kind, overlap = _nearest_shape(patch, height / width)
    radius = (height + width) / (2 * image.shape[-1]) / _extents()[kind]
    size = SIZES[int(radius > (RADIUS["small"] + RADIUS["large"]) / 2)]
    place = float((cover.sum(0) * torch.arange(image.shape[-1])).sum() / cover.sum())
    colour = COLOURS[int(index)] if bool(near & pure) else None
    return place, Found(size, colour, SHAPES[kind] if overlap >= OVERLAP else None, overlap)


def _patch(cover: Tensor) -> tuple[Tensor, float, float]:
    """The item cut out and brought to PATCH x PATCH, with its height and width in pixels."""
    rows, columns = (cover.amax(1) > 0.5).nonzero()[:, 0], (cover.amax(0) > 0.5).nonzero()[:, 0]
    if not len(rows) or not len(columns):
        rows = columns = torch.tensor([0])
    top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
    cut = cover[None, None, top:bottom, left:right]
    patch = F.interpolate(cut, size=(PATCH, PATCH), mode="bilinear", align_corners=False)[0, 0]
    return patch, float(bottom - top), float(right - left)


def _nearest_shape(patch: Tensor, aspect: float) -> tuple[int, float]:
    patches, kinds, aspects = _templates()
    overlap = torch.minimum(patches, patch).sum((1, 2)) / torch.maximum(patches, patch).sum((1, 2))
    # Cutting out hides stretching; count it against the overlap.
    ratio = aspects / aspect
    overlap = overlap * torch.minimum(ratio, 1 / ratio).clamp(max=0.9) / 0.9
    best = int(overlap.argmax())
    return int(kinds[best]), float(overlap[best])


@lru_cache(maxsize=1)
def _drawn() -> list[tuple[int, float, Tensor, float, float]]:
    """(shape, radius, patch, height, width) of each shape at each size and some offsets from the pixel raster."""
    pixels, rows = 64, []
    axis = torch.arange(pixels) + 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    for kind in range(len(SHAPES)):
        for radius in RADIUS.values():
            for dx, dy in ((0, 0), (0.5, 0), (0, 0.5), (0.5, 0.5)):
                scale = radius * pixels
                u, v = ((x - pixels / 2 - dx) / scale)[None], ((y - pixels / 2 - dy) / scale)[None]
                cover = (0.5 - shapes._distance(u, v, torch.tensor([kind]))[0] * scale).clamp(0, 1)
                patch, height, width = _patch(cover)
                rows.append((kind, scale / pixels, patch, height, width))
    return rows


@lru_cache(maxsize=1)
def _templates() -> tuple[Tensor, Tensor, Tensor]:
    rows = _drawn()
    patches = torch.stack([row[2] for row in rows])
    return patches, torch.tensor([row[0] for row in rows]), torch.tensor([row[3] / row[4] for row in rows])


@lru_cache(maxsize=1)
def _extents() -> list[float]:
    """Mean of height and width of each shape in units of its radius."""
    rows = _drawn()
    extents = []
    for kind in range(len(SHAPES)):
        values = [(row[3] + row[4]) / 2 / (row[1] * 64) for row in rows if row[0] == kind]
        extents.append(sum(values) / len(values))
    return extents


def _compare(reading: Reading, scene: Scene) -> Verdict:
    wanted, found = scene.items, reading.items
    background = float(reading.background == scene.background)
    count = float(len(found) == len(wanted))
    # Items keep their order; one that is missing counts as wrong in everything.
    paired = min(len(wanted), len(found))
    best = {"size": 0, "colour": 0, "shape": 0}
    for some_wanted in combinations(wanted, paired):
        for some_found in combinations(found, paired):
            checks = {name: _agree(some_wanted, some_found, name) for name in best}
            if sum(checks.values()) > sum(best.values()):
                best = checks
    passed = background + count + sum(best.values())
    total = 2 + 3 * len(wanted)
    attributes = {"background": background, "count": count} | {name: n / len(wanted) for name, n in best.items()}
    return Verdict(passed == total, passed / total, attributes)


def _agree(wanted: Sequence[Item], found: Sequence[Found], name: str) -> int:
    return sum(getattr(w, name) == getattr(f, name) for w, f in zip(wanted, found))
