"""Pictures of plans, runs and images. matplotlib is imported inside the functions: ComfyUI loads this module early.

Every figure is drawn on its own Agg canvas, never through pyplot, whose global state is shared with other packs and
is not safe in the worker thread that runs a workflow. Colours are those of Okabe and Ito, which stay apart for
colour-blind readers, and each one that carries meaning goes with a second mark (shape, dash or label).
"""

from __future__ import annotations

import math
import os
import textwrap
from typing import Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .schedule import ROUGH_NOISE_RATIO, Plan

BLUE, ORANGE, VERMILLION, GREEN, PURPLE = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7"
GREY, LIGHT_GREY, INK = "#6B6B6B", "#C8CCD0", "#1F2328"
DPI = 100
MAX_SIGMA_TICKS = 26
MAX_ARC_LABELS = 24

SPARKS = "▁▂▃▄▅▆▇█"


def to_tensor(image: Image.Image) -> Tensor:
    """A picture as ComfyUI's IMAGE: [1, H, W, 3] float32 in 0..1."""
    return torch.from_numpy(np.array(image.convert("RGB"), dtype=np.float32) / 255.0).unsqueeze(0)


def plot_plan(plan: Plan, size: tuple[int, int] = (1100, 620)) -> Image.Image:
    """Entropy of every step with the threshold, the jump of every active step, and the noise ratio it leaves.

    The horizontal axis counts states, so that the bar of step i stands between state i and state i + 1, and an arc
    leads from the state where an active step starts to the state where it ends.
    """
    figure, canvas = _figure(size)
    arcs, bars, ratios = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [1.0, 2.6, 1.1]})
    figure.suptitle(_plan_title(plan), fontsize=12, color=INK, wrap=True)
    _draw_arcs(arcs, plan)
    _draw_entropies(bars, plan)
    _draw_noise_ratios(ratios, plan)
    total = plan.total_steps
    stride = math.ceil((total + 1) / MAX_SIGMA_TICKS)
    # Counted back from the end, so that sigma 0 is always named.
    ticks = list(range(total, -1, -stride))[::-1]
    ratios.set_xlim(-0.3, total + 0.3)
    ratios.set_xticks(ticks, [f"{i}\n{plan.sigmas[i]:.2f}" for i in ticks], fontsize=8)
    ratios.set_xlabel("state i, and its σ below", fontsize=9, color=INK)
    for axes in (arcs, bars):
        axes.tick_params(labelbottom=False, bottom=False)
    return _rendered(canvas)


def _plan_title(plan: Plan) -> str:
    tau = "explicit merges" if plan.tau is None else f"τ = {plan.tau:g}"
    return (
        f"E-GRPO plan: T = {plan.total_steps}, {len(plan.steps)} active ({plan.grouping}), η = {plan.eta:g}, "
        f"kernel {plan.kernel}, {tau}"
    )


def _draw_arcs(axes, plan: Plan) -> None:
    """One half ellipse per active step; its height grows with the root of the merge so that 1 stays visible."""
    angle = np.linspace(0.0, math.pi, 48)
    for step in plan.steps:
        colour = _warning_colour(step.noise_ratio)
        x = step.index + step.merge * (1.0 - np.cos(angle)) / 2.0
        y = math.sqrt(step.merge) * np.sin(angle)
        axes.plot(x, y, color=colour, linewidth=1.6, solid_capstyle="round")
        head = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x[-1], 0.0), (x[-3], y[-3]), arrowprops=head)
        if len(plan.steps) <= MAX_ARC_LABELS:
            axes.text(
                step.index + step.merge / 2.0, math.sqrt(step.merge), str(step.merge),
                ha="center", va="center", fontsize=8, color=INK,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
    axes.set_ylim(0.0, 1.3 * math.sqrt(max(step.merge for step in plan.steps)))
    axes.set_yticks([])
    axes.set_ylabel("steps\nmerged", fontsize=9, color=INK)
    axes.spines["left"].set_visible(False)


def _draw_entropies(axes, plan: Plan) -> None:
    entropies = [value if math.isfinite(value) else math.nan for value in plan.all_entropies()]
    shown = [value for value in (*entropies, *(step.entropy for step in plan.steps)) if math.isfinite(value)]
    shown += [plan.tau] if plan.tau is not None else []
    low, high = min(shown), max(shown)
    # log2 entropies may be negative: their bars stand on the lower edge instead of hanging from 0.
    floor = 0.0 if plan.entropy_unit == "exp" else low - 0.15 * (high - low) - 0.1
    active = {step.index for step in plan.steps}
    for chosen, colour, label in ((True, BLUE, "single step, active"), (False, LIGHT_GREY, "single step, not active")):
        indices = [i for i in range(plan.total_steps) if (i in active) == chosen]
        if indices:
            heights = [entropies[i] - floor for i in indices]
            axes.bar([i + 0.5 for i in indices], heights, width=0.7, bottom=floor, color=colour, label=label)
    merged = [step for step in plan.steps if step.merge > 1]
    if merged:
        axes.vlines(
            [step.index + 0.5 for step in merged], [entropies[step.index] for step in merged],
            [step.entropy for step in merged], color=ORANGE, linewidth=1.4, linestyle=":",
        )  # fmt: skip
        axes.plot(
            [step.index + 0.5 for step in merged], [step.entropy for step in merged],
            "D", color=ORANGE, markeredgecolor=INK, markeredgewidth=0.7, markersize=7, label="after merging",
        )  # fmt: skip
    if plan.tau is not None:
        axes.axhline(plan.tau, color=INK, linewidth=1.2, linestyle="--")
        axes.annotate(
            f"τ = {plan.tau:g}", (1.0, plan.tau), (-4, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="bottom", fontsize=9, color=INK,
        )  # fmt: skip
    axes.set_ylim(floor, high + 0.18 * (high - floor))
    unit = "e^(h/d)" if plan.entropy_unit == "exp" else "log2"
    axes.set_ylabel(f"entropy, {unit}", fontsize=9, color=INK)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", color=LIGHT_GREY, alpha=0.5, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, fontsize=8, frameon=False, borderaxespad=0.1)


def _draw_noise_ratios(axes, plan: Plan) -> None:
    finite = [step.noise_ratio for step in plan.steps if math.isfinite(step.noise_ratio)]
    top = max([ROUGH_NOISE_RATIO, *finite])
    bottom = min([1.0, *finite])
    span = top - bottom
    ceiling = top + (0.35 if len(finite) == len(plan.steps) else 0.75) * span
    axes.axhline(1.0, color=GREY, linewidth=0.9)
    axes.axhline(ROUGH_NOISE_RATIO, color=VERMILLION, linewidth=0.9, linestyle="--")
    axes.annotate(
        f"rough above {ROUGH_NOISE_RATIO:g}", (1.0, ROUGH_NOISE_RATIO), (-4, 2), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", va="bottom", fontsize=8, color=VERMILLION,
    )  # fmt: skip
    for step in plan.steps:
        x, ratio, colour = step.index + 0.5, step.noise_ratio, _warning_colour(step.noise_ratio)
        if math.isinf(ratio):
            axes.annotate("∞", (x, ceiling), (0, -7), textcoords="offset points", ha="center", va="center",
                          fontsize=13, color=colour)  # fmt: skip
            continue
        axes.vlines(x, 1.0, ratio, color=colour, linewidth=1.6)
        axes.plot([x], [ratio], "s" if ratio > ROUGH_NOISE_RATIO else "o", color=colour, markersize=6)
    axes.set_ylim(bottom - 0.2 * span, ceiling)
    axes.set_ylabel("noise left /\nnoise told", fontsize=9, color=INK)
    axes.tick_params(axis="y", labelsize=8)


def _warning_colour(noise_ratio: float) -> str:
    return VERMILLION if noise_ratio > ROUGH_NOISE_RATIO else BLUE


SMALL_PANELS = {
    "grad_norm": "gradient norm",
    "kl": "KL to base, per dimension",
    "approx_kl": "KL to the rollout (k3 estimate)",
    "clip_fraction": "clip fraction",
    "ratio_drift": "ratio drift",
}


def plot_training(history: Sequence[Mapping], size: tuple[int, int] = (1100, 560)) -> Image.Image:
    """Reward curve of a run with its diagnostics.

    Args:
        history: rows of metrics in order: iteration, reward, and when known reward_std, anchor_reward, eval_reward,
            grad_norm, kl, approx_kl, clip_fraction, ratio_drift. A value of None, NaN or infinity leaves a gap in
            its curve; a row without the key (an evaluation logged on its own) does not belong to the curve.

    Raises:
        ValueError: no row.
    """
    if not history:
        raise ValueError("there is no iteration to plot yet: the history is empty")
    figure, canvas = _figure(size)
    iterations = np.array([float(row.get("iteration", i)) for i, row in enumerate(history)])
    panels = [key for key in SMALL_PANELS if any(key in row for row in history)]
    if panels:
        grid = figure.add_gridspec(len(panels), 2, width_ratios=[2.2, 1.0])
        main = figure.add_subplot(grid[:, 0])
    else:
        grid, main = None, figure.add_subplot()
    _draw_rewards(main, iterations, history)
    _style_iterations(main, iterations)
    main.set_xlabel("iteration", fontsize=9, color=INK)
    for row, key in enumerate(panels):
        axes = figure.add_subplot(grid[row, 1])
        _line(axes, *_curve(iterations, history, key), color=BLUE, linewidth=1.3)
        axes.set_title(SMALL_PANELS[key], fontsize=9, color=INK, loc="left")
        _style_iterations(axes, iterations)
        if row < len(panels) - 1:
            axes.tick_params(labelbottom=False)
    if panels:
        axes.set_xlabel("iteration", fontsize=9, color=INK)
    return _rendered(canvas)


def _draw_rewards(axes, iterations: np.ndarray, history: Sequence[Mapping]) -> None:
    x, reward = _curve(iterations, history, "reward")
    spread = np.array([_finite(row.get("reward_std")) for row in history if "reward" in row])
    average = _moving_average(reward)
    axes.fill_between(x, reward - spread, reward + spread, color=BLUE, alpha=0.14, linewidth=0)
    has_spread = bool(np.isfinite(spread).any())
    if has_spread and len(reward) == 1:
        axes.errorbar(x, reward, yerr=spread, color=BLUE, alpha=0.5, capsize=4)
    faint = {"alpha": 0.55, "linewidth": 1.1} if average is not None else {"linewidth": 1.8}
    _line(axes, x, reward, color=BLUE, label="training mean" + (" ± std" if has_spread else ""), **faint)
    if average is not None:
        axes.plot(x, average[1], color=BLUE, linewidth=2.4, label=f"moving average of {average[0]}")
    if any("anchor_reward" in row for row in history):
        anchor = _curve(iterations, history, "anchor_reward")
        _line(axes, *anchor, color=GREY, linewidth=1.1, linestyle="--", label="anchor (no noise)")
    measured = [i for i, row in enumerate(history) if row.get("eval_reward") is not None]
    if measured:
        held_out = _curve(iterations[measured], [history[i] for i in measured], "eval_reward")
        diamonds = {"marker": "D", "markersize": 6, "markeredgecolor": "white"}
        _line(axes, *held_out, color=VERMILLION, linewidth=1.5, label="held-out prompts", **diamonds)
    lost = int((~np.isfinite(reward)).sum())
    title = "Reward" + (f" ({lost} of {len(reward)} iterations without a finite value)" if lost else "")
    axes.set_title(title, fontsize=12, color=INK, loc="left")
    axes.set_ylabel("reward, higher is better", fontsize=9, color=INK)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=4, frameon=False)


def _curve(iterations: np.ndarray, history: Sequence[Mapping], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(iterations, values) float64 of the rows that have ``key``; NaN where the value is None or not finite."""
    having = [i for i, row in enumerate(history) if key in row]
    values = np.array([_finite(history[i][key]) for i in having], dtype=np.float64)
    return iterations[having], values


def _finite(value) -> float:
    return float(value) if value is not None and math.isfinite(value) else math.nan


def _moving_average(values: np.ndarray) -> tuple[int, np.ndarray] | None:
    """(window, trailing mean over the finite values of the window), NaN where the value itself is; None if short."""
    if len(values) < 6:
        return None
    window = max(3, len(values) // 10)
    averaged = np.full(len(values), math.nan)
    for i in np.flatnonzero(np.isfinite(values)):
        recent = values[max(0, i - window + 1) : i + 1]
        averaged[i] = recent[np.isfinite(recent)].mean()
    return window, averaged


def _line(axes, x: np.ndarray, y: np.ndarray, *, color: str, **style) -> None:
    """A curve that breaks at NaN; a point without finite neighbours, which a line would hide, gets a dot."""
    axes.plot(x, y, color=color, **style)
    finite = np.isfinite(y)
    padded = np.concatenate([[False], finite, [False]])
    alone = finite & ~padded[:-2] & ~padded[2:]
    if "marker" not in style and alone.any():
        axes.plot(x[alone], y[alone], "o", color=color, markersize=4.5)


def _style_iterations(axes, iterations: np.ndarray) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    first, last = float(iterations.min()), float(iterations.max())
    margin = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    # matplotlib's own formatter moves the exponent of small values into a corner, where the title stands.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    axes.tick_params(labelsize=8)
    axes.grid(color=LIGHT_GREY, alpha=0.5, linewidth=0.6)


def plot_comparison(
    names: Sequence[str], before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> Image.Image:
    """Scores of the same prompts without and with the LoRA, one panel with its own scale per reward.

    Thin lines are prompts (green up, vermillion and dashed down), the heavy one is their mean. A prompt whose score
    is not finite on either side is left out and counted in the panel's title.

    Raises:
        ValueError: no reward, or lists that do not pair prompt by prompt.
    """
    if not names:
        raise ValueError("there is no reward to compare: give at least one name")
    for name in names:
        sides = [len(scores[name]) if name in scores else 0 for scores in (before, after)]
        if sides[0] != sides[1] or not sides[0]:
            raise ValueError(
                f"reward {name!r} has {sides[0]} scores before and {sides[1]} after; each prompt needs one of both"
            )
    columns = min(4, len(names))
    lines = math.ceil(len(names) / columns)
    figure, canvas = _figure((max(420, 280 * columns), 60 + 340 * lines))
    figure.suptitle("Before and after, same prompts and seeds", fontsize=11, color=INK)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, name in zip(panels, names):
        _draw_pairs(axes, name, np.asarray(before[name], dtype=float), np.asarray(after[name], dtype=float))
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    return _rendered(canvas)


def _draw_pairs(axes, name: str, old: np.ndarray, new: np.ndarray) -> None:
    paired = np.isfinite(old) & np.isfinite(new)
    lost = int((~paired).sum())
    old, new = old[paired], new[paired]
    for start, end in zip(old, new):
        colour, dash = (GREEN, "-") if end > start else (VERMILLION, "--") if end < start else (GREY, "-")
        style = {"color": colour, "linestyle": dash, "linewidth": 0.9, "alpha": 0.6}
        axes.plot([0, 1], [start, end], marker="o", markersize=3.5, **style)
    title = textwrap.fill(name, 36) + "\n"
    if len(old):
        means = [old.mean(), new.mean()]
        axes.plot([0, 1], means, color=INK, linewidth=2.4, marker="s", markersize=7)
        for x, mean, side in ((0, means[0], "right"), (1, means[1], "left")):
            axes.annotate(f"{mean:.4g}", (x, mean), (-9 if x == 0 else 9, 0), textcoords="offset points",
                          ha=side, va="center", fontsize=9, color=INK, weight="bold")  # fmt: skip
        title += f"mean {means[1] - means[0]:+.3g}, {int((new > old).sum())} of {len(old)} up"
    else:
        axes.text(0.5, 0.5, "no finite score", transform=axes.transAxes, ha="center", color=GREY)
    axes.set_title(title + (f", {lost} left out" if lost else ""), fontsize=9, color=INK)
    axes.set_xlim(-0.95, 1.95)
    axes.set_xticks([0, 1], ["before", "after"], fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", color=LIGHT_GREY, alpha=0.5, linewidth=0.6)


PADDING = 10
LABEL_WIDTH = 180
LABEL_SIZE, CAPTION_SIZE, TITLE_SIZE = 14, 12, 18


def image_grid(
    rows: Sequence[Sequence[Tensor]],
    row_labels: Sequence[str],
    cell_labels: Sequence[Sequence[str]] | None = None,
    title: str = "",
    cell: int = 192,
) -> Image.Image:
    """A labelled grid. Images [H, W, 3] in 0..1 are scaled whole into cells of ``cell`` pixels, never cropped.

    Small images grow by nearest neighbour (their pixels stay visible), large ones shrink by Lanczos. Text wraps
    within its column and the grid grows to hold it. Pixels that are not finite are drawn black.

    Raises:
        ValueError: no image, or labels that do not match the images.
    """
    if not any(rows):
        raise ValueError("there is no image to show in the grid")
    if len(row_labels) != len(rows):
        raise ValueError(f"{len(row_labels)} row labels for {len(rows)} rows: give one per row, '' for none")
    captions = cell_labels if cell_labels is not None else [[""] * len(row) for row in rows]
    if [len(row) for row in captions] != [len(row) for row in rows]:
        raise ValueError("cell labels must have the same rows and lengths as the images; use '' for none")
    if cell < 32:
        raise ValueError(f"cell is {cell} pixels; labels need at least 32")

    label_font, caption_font, title_font = (_font(size) for size in (LABEL_SIZE, CAPTION_SIZE, TITLE_SIZE))
    longest = max((label_font.getlength(line) for label in row_labels for line in label.split("\n")), default=0.0)
    label_width = min(LABEL_WIDTH, math.ceil(longest))
    left = PADDING + (label_width + PADDING if label_width else 0)
    width = left + max(len(row) for row in rows) * (cell + PADDING)
    title_lines = _wrapped(title, title_font, width - 2 * PADDING)

    pictures = [[_fitted(image, cell) for image in row] for row in rows]
    caption_lines = [[_wrapped(text, caption_font, cell) for text in row] for row in captions]
    label_lines = [_wrapped(text, label_font, label_width) for text in row_labels]
    picture_heights = [max((picture.height for picture in row), default=0) for row in pictures]
    caption_heights = [max((_text_height(caption_font, lines) for lines in row), default=0) for row in caption_lines]
    heights = [
        max(picture + (4 + caption if caption else 0), _text_height(label_font, label))
        for picture, caption, label in zip(picture_heights, caption_heights, label_lines)
    ]
    top = PADDING + (_text_height(title_font, title_lines) + PADDING if title_lines else 0)
    canvas = Image.new("RGB", (width, top + sum(heights) + PADDING * len(rows)), "white")
    draw = ImageDraw.Draw(canvas)

    _write(draw, PADDING, PADDING, title_lines, title_font, INK)
    y = top
    for row, picture_row in enumerate(pictures):
        _write(draw, PADDING, y, label_lines[row], label_font, INK)
        for column, picture in enumerate(picture_row):
            x = left + column * (cell + PADDING)
            canvas.paste(picture, (x, y + picture_heights[row] - picture.height))
            _write(draw, x, y + picture_heights[row] + 4, caption_lines[row][column], caption_font, GREY)
        y += heights[row] + PADDING
    return canvas


def _fitted(image: Tensor, cell: int) -> Image.Image:
    """The whole image with its longer side scaled to ``cell``."""
    pixels = (image[..., :3].detach().float().cpu().nan_to_num(0.0).clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
    picture = Image.fromarray(pixels.numpy())
    scale = cell / max(picture.size)
    target = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(target, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)


def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans of matplotlib, so that text looks the same on machines without fonts."""
    import matplotlib

    return ImageFont.truetype(os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)


def _wrapped(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Lines of ``text`` no wider than ``width`` pixels, broken at spaces and, where one word is too long, inside it."""
    if not text:
        return []
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split():
            if line and font.getlength(f"{line} {word}") <= width:
                line = f"{line} {word}"
                continue
            if line:
                lines.append(line)
            line = word
            while font.getlength(line) > width and len(line) > 1:
                fits = next(n for n in range(len(line) - 1, 0, -1) if n == 1 or font.getlength(line[:n]) <= width)
                lines.append(line[:fits])
                line = line[fits:]
        lines.append(line)
    return lines


def _line_height(font: ImageFont.FreeTypeFont) -> int:
    return sum(font.getmetrics()) + 2


def _text_height(font: ImageFont.FreeTypeFont, lines: Sequence[str]) -> int:
    return _line_height(font) * len(lines)


def _write(draw: ImageDraw.ImageDraw, x: int, y: int, lines: Sequence[str], font, fill: str) -> None:
    for number, line in enumerate(lines):
        draw.text((x, y + number * _line_height(font)), line, font=font, fill=fill)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as at most ``width`` block characters, scaled from lowest to highest; blank where none is finite.

    More values than ``width`` are averaged in equal stretches. Equal values give a middle line.

    Raises:
        ValueError: width below 1.
    """
    if width < 1:
        raise ValueError(f"width is {width}; a sparkline needs at least 1 character")
    points = np.asarray(values, dtype=float)
    stretches = np.array_split(points, min(width, len(points))) if len(points) else []
    means = [float(part[np.isfinite(part)].mean()) if np.isfinite(part).any() else math.nan for part in stretches]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return " " * len(means)
    low, span = min(finite), max(finite) - min(finite)

    def block(mean: float) -> str:
        if math.isnan(mean):
            return " "
        height = (mean - low) / span if span > 0 else 0.5
        return SPARKS[min(len(SPARKS) - 1, int(height * len(SPARKS)))]

    return "".join(block(mean) for mean in means)


def _figure(size: tuple[int, int]):
    """(figure, its Agg canvas) of ``size`` pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI, layout="constrained", facecolor="white")
    return figure, FigureCanvasAgg(figure)


def _rendered(canvas) -> Image.Image:
    for axes in canvas.figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(GREY)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
