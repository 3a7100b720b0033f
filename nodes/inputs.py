"""Inputs that several nodes share, so that they mean and allow the same everywhere."""

from __future__ import annotations

from comfy_api.latest import io

MAX_SEED = 0xFFFFFFFFFFFFFFFF


def size(side: str, tooltip: str | None = None) -> io.Int.Input:
    """``width`` or ``height`` in pixels."""
    return io.Int.Input(
        side, default=512, min=16, max=16384, step=16, tooltip=tooltip or f"Image {side} in pixels, a multiple of 16."
    )


def seed(tooltip: str) -> io.Int.Input:
    """A seed that stays as it is between runs."""
    return io.Int.Input("seed", default=0, min=0, max=MAX_SEED, control_after_generate=False, tooltip=tooltip)


def guidance(tooltip: str) -> io.Float.Input:
    """FLUX's distilled guidance; the paper uses 3.5."""
    return io.Float.Input("guidance", default=3.5, min=0.0, max=100.0, step=0.1, advanced=True, tooltip=tooltip)


def micro_batch() -> io.Int.Input:
    """Latents per model call without gradient."""
    return io.Int.Input(
        "micro_batch",
        default=0,
        min=0,
        max=256,
        advanced=True,
        tooltip="Latents per model call. 0 chooses by free memory.",
    )
