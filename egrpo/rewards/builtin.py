"""Rewards that need no weights: training works with them before any reward model is installed.

All of them read RGB in 0..1 (an alpha channel is ignored, values outside are clamped as a saved picture would be) and
ignore the prompt.
"""

from __future__ import annotations

import io
import re
from typing import Sequence

import torch
from torch import Tensor

from .base import Reward, RewardError

JPEG_QUALITY = 95
"""Quality of DDPO's and Flow-GRPO's compressibility rewards."""

LUMA_WEIGHTS = (0.299, 0.587, 0.114)
"""Rec. 601, the luma that JPEG itself uses."""

SHARPNESS_FLOOR = 1e-6
"""Keeps the logarithm of a flat image finite; far below the Laplacian variance of 8-bit rounding (about 2.6e-5)."""

MAX_CONTRAST = 0.5
"""Largest standard deviation that values in 0..1 can have: half of them 0, half 1."""

BUILTIN_REWARDS: dict[str, str] = {
    "jpeg_compressibility": "Smooth, simple images: minus the size in kB of the image as a JPEG of quality 95.",
    "jpeg_incompressibility": "Detailed, busy images: the size in kB of the image as a JPEG of quality 95.",
    "target_colour": "Images of one colour: minus the mean RGB distance of the pixels to it (0 is best, -1 is worst).",
    "target_brightness": "Images of a given brightness: minus the distance of the mean luma to the target (0 is best).",
    "target_contrast": "Images of a given contrast: minus the distance of the luma's standard deviation to the target "
    "(0 is best).",
    "sharpness": "Crisp edges: log10 of the variance of the luma's Laplacian (-6 for a flat image).",
}
"""Kind -> one sentence for a tooltip; the kinds that :func:`builtin_reward` makes."""


class JpegCompressibility(Reward):
    """Minus the kilobytes (1000 bytes) of the image as a JPEG of quality 95 (DDPO, arXiv 2305.13301)."""

    name = "jpeg_compressibility"

    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return -jpeg_kilobytes(rgb(images, self.name))

    def settings(self) -> dict:
        return {"name": self.name, "quality": JPEG_QUALITY}


class JpegIncompressibility(Reward):
    """The kilobytes (1000 bytes) of the image as a JPEG of quality 95 (DDPO, arXiv 2305.13301)."""

    name = "jpeg_incompressibility"

    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return jpeg_kilobytes(rgb(images, self.name))

    def settings(self) -> dict:
        return {"name": self.name, "quality": JPEG_QUALITY}


class TargetColour(Reward):
    """Minus the mean over pixels of the RGB distance to a colour, from 0 (every pixel has it) to at worst -1.

    The distance is Euclidean over the three channels in 0..1, divided by sqrt(3) so that black to white is 1.

    Raises:
        ValueError: ``colour`` is not #RRGGBB.
    """

    name = "target_colour"

    def __init__(self, colour: str = "#ff0000"):
        self.colour, self._target = parse_colour(colour)

    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pixels = rgb(images, self.name)
        target = torch.tensor(self._target, device=pixels.device)
        return -(pixels - target).square().mean(dim=-1).sqrt().mean(dim=(1, 2))

    def settings(self) -> dict:
        return {"name": self.name, "colour": self.colour}


class TargetBrightness(Reward):
    """-|mean luma - target|.

    Raises:
        ValueError: ``target`` outside 0..1.
    """

    name = "target_brightness"

    def __init__(self, target: float = 0.5):
        self.target = checked_target(target, 1.0, self.name)

    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return -(luma(rgb(images, self.name)).mean(dim=(1, 2)) - self.target).abs()

    def settings(self) -> dict:
        return {"name": self.name, "target": self.target}


class TargetContrast(Reward):
    """-|standard deviation of luma - target|.

    Raises:
        ValueError: ``target`` outside 0..0.5, the range of the standard deviation of values in 0..1.
    """

    name = "target_contrast"

    def __init__(self, target: float = 0.25):
        self.target = checked_target(target, MAX_CONTRAST, self.name)

    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return -(luma(rgb(images, self.name)).flatten(1).std(dim=1, correction=0) - self.target).abs()

    def settings(self) -> dict:
        return {"name": self.name, "target": self.target}


class Sharpness(Reward):
    """log10(variance of the 4-neighbour Laplacian of luma + 1e-6), over the pixels that have all four neighbours.

    The variance spans orders of magnitude between a blurred and a crisp image; its logarithm keeps one noisy image
    from setting the scale of a group.
    """

    name = "sharpness"

    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        y = luma(rgb(images, self.name))
        if min(y.shape[1:]) < 3:
            raise RewardError(f"sharpness needs images of 3x3 pixels or more, got {y.shape[2]}x{y.shape[1]}")
        laplacian = y[:, :-2, 1:-1] + y[:, 2:, 1:-1] + y[:, 1:-1, :-2] + y[:, 1:-1, 2:] - 4.0 * y[:, 1:-1, 1:-1]
        return torch.log10(laplacian.flatten(1).var(dim=1, correction=0) + SHARPNESS_FLOOR)


def builtin_reward(kind: str, *, colour: str = "#ff0000", target: float = 0.5) -> Reward:
    """The reward named ``kind``, one of :data:`BUILTIN_REWARDS`.

    Args:
        colour: #RRGGBB, used by target_colour.
        target: used by target_brightness (0..1) and target_contrast (0..0.5).

    Raises:
        ValueError: unknown kind, or a colour or target that the kind does not accept.
    """
    if kind == "target_colour":
        return TargetColour(colour)
    if kind == "target_brightness":
        return TargetBrightness(target)
    if kind == "target_contrast":
        return TargetContrast(target)
    plain = {cls.name: cls for cls in (JpegCompressibility, JpegIncompressibility, Sharpness)}
    if kind not in plain:
        raise ValueError(f"unknown built-in reward {kind!r}: choose one of {', '.join(BUILTIN_REWARDS)}")
    return plain[kind]()


def rgb(images: Tensor, name: str) -> Tensor:
    """Images [B, H, W, C >= 3] as float32 RGB [B, H, W, 3] clamped to 0..1.

    Raises:
        RewardError: another shape, or pixels that are not finite (clamping would turn them into a made-up score).
    """
    if images.ndim != 4 or images.shape[-1] < 3:
        raise RewardError(f"reward {name!r} got images of shape {tuple(images.shape)}; expected [B, H, W, 3 or 4]")
    pixels = images[..., :3].float()
    if not bool(torch.isfinite(pixels).all()):
        raise RewardError(
            f"reward {name!r} got an image with pixels that are not finite: the decoded latents have overflowed. "
            "Lower the learning rate, or decode in a higher precision"
        )
    return pixels.clamp(0.0, 1.0)


def luma(pixels: Tensor) -> Tensor:
    """Rec. 601 luma [B, H, W] of RGB [B, H, W, 3]."""
    return pixels @ torch.tensor(LUMA_WEIGHTS, device=pixels.device)


def jpeg_kilobytes(pixels: Tensor) -> Tensor:
    """Size in units of 1000 bytes of each image [B, H, W, 3] as a JPEG of quality 95; [B] float32 on the CPU."""
    from PIL import Image

    sizes = []
    for array in (pixels * 255.0).round().to(torch.uint8).cpu().numpy():
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, format="JPEG", quality=JPEG_QUALITY)
        sizes.append(buffer.tell() / 1000.0)
    return torch.tensor(sizes, dtype=torch.float32)


def parse_colour(colour: str) -> tuple[str, tuple[float, float, float]]:
    """``#RRGGBB`` (the hash may be missing) as its lower-case form and as RGB in 0..1.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"#?([0-9a-fA-F]{6})", str(colour).strip())
    if not match:
        raise ValueError(f"colour {colour!r} is not of the form #RRGGBB, for example #ff0000 for red")
    digits = match[1].lower()
    red, green, blue = bytes.fromhex(digits)
    return f"#{digits}", (red / 255.0, green / 255.0, blue / 255.0)


def checked_target(target: float, limit: float, name: str) -> float:
    """``target`` as a float in 0..limit, else ValueError."""
    try:
        value = float(target)
    except (TypeError, ValueError):
        raise ValueError(f"target {target!r} of {name} is not a number; it must lie between 0 and {limit:g}") from None
    if not 0.0 <= value <= limit:
        raise ValueError(f"target {value:g} of {name} is out of range; it must lie between 0 and {limit:g}")
    return value
