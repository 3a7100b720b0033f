"""Facts of the pictures: their size, what they show and what they must not hide."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from egrpo import plots
from egrpo.schedule import flow_sigmas, plan_steps


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB")).astype(int)


def shows(image: Image.Image, colour: str) -> np.ndarray:
    """Boolean [H, W]: pixels within rounding of ``colour``."""
    rgb = np.array(list(bytes.fromhex(colour.lstrip("#"))))
    return (np.abs(pixels(image) - rgb) <= 3).all(axis=-1)


def is_drawn(image: Image.Image) -> bool:
    return bool((pixels(image) < 128).any() and (pixels(image) > 240).any())


def rows(count: int, **more) -> list[dict]:
    fixed = {"reward_std": 0.02, "anchor_reward": 0.4, **more}
    return [{"iteration": i, "reward": 0.5 + 0.01 * i, **fixed} for i in range(count)]


PLANS = {
    "paper": plan_steps(flow_sigmas(16)),
    "ends_at_zero": plan_steps(flow_sigmas(16), active="all", grouping="disjoint", tau=2.6, allow_flip=True,
                               unreachable="merge_to_end"),
    "explicit": plan_steps(flow_sigmas(4), merge={0: 1, 1: 2}),
    "log2_cps": plan_steps(flow_sigmas(50), active="all", kernel="cps", tau=-1.0, entropy_unit="log2"),
    "one_step": plan_steps(flow_sigmas(1), merge=1),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("size", [(1100, 620), (640, 400)])
def test_every_plan_is_drawn_at_the_asked_size(name, size):
    image = plots.plot_plan(PLANS[name], size)
    assert image.size == size and is_drawn(image)


def test_a_step_that_leaves_too_much_noise_is_drawn_in_the_warning_colour():
    assert any(math.isinf(step.noise_ratio) for step in PLANS["ends_at_zero"].steps)
    quiet, loud = plots.plot_plan(PLANS["paper"]), plots.plot_plan(PLANS["ends_at_zero"])
    # The upper fifth holds only the arcs; the warning line itself stands in the lowest panel.
    arcs = slice(0, quiet.height // 5)
    assert not shows(quiet, plots.VERMILLION)[arcs].any()
    assert shows(loud, plots.VERMILLION)[arcs].any()


@pytest.mark.parametrize("history", [
    rows(1), rows(2), rows(40, kl=1e-5, grad_norm=0.4, clip_fraction=0.1, ratio_drift=1e-4, eval_reward=0.5),
    [{"iteration": 7, "reward": math.nan}], [{"iteration": 0, "reward": None}, {"iteration": 1, "reward": math.inf}],
    rows(3, grad_norm=math.nan, eval_reward=math.nan),
])  # fmt: skip
def test_a_run_of_any_length_is_drawn_at_the_asked_size(history):
    image = plots.plot_training(history, (900, 500))
    assert image.size == (900, 500) and is_drawn(image)


def test_an_iteration_without_a_finite_value_leaves_a_gap_in_the_curve():
    def curve_columns(history):
        # The legend below the axes has the colour of the curve too.
        return shows(plots.plot_training(history, (900, 500)), plots.BLUE)[:420].any(axis=0)

    whole = [{"iteration": i, "reward": float(i % 2)} for i in range(30)]
    broken = [dict(row, reward=math.nan) if 10 <= row["iteration"] < 20 else row for row in whole]
    complete, gapped = curve_columns(whole), curve_columns(broken)
    inside = slice(int(0.45 * 900), int(0.6 * 900))
    assert complete[inside].any() and not gapped[inside].any()
    assert gapped[: inside.start].any() and gapped[inside.stop :].any()


def test_a_finite_value_between_two_gaps_is_still_visible():
    history = [{"iteration": i, "reward": 1.0 if i == 2 else math.nan} for i in range(5)]
    image = plots.plot_training(history, (900, 500))
    assert shows(image, plots.BLUE)[60:420, 300:600].any()


def test_an_evaluation_logged_in_a_row_of_its_own_does_not_break_the_training_curve():
    training = rows(4)
    evaluation = [{"iteration": i, "eval_reward": 0.5} for i in range(4)]
    mixed = [row for pair in zip(evaluation, training) for row in pair]
    merged = [{**row, "eval_reward": 0.5} for row in training]
    assert np.array_equal(pixels(plots.plot_training(mixed)), pixels(plots.plot_training(merged)))
    assert is_drawn(plots.plot_training(evaluation))


def test_an_empty_history_is_refused():
    with pytest.raises(ValueError, match="empty"):
        plots.plot_training([])


def test_small_images_grow_by_whole_pixels_and_are_never_cropped():
    image = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(0))
    grid = plots.image_grid([[image]], [""], cell=64)
    p = plots.PADDING
    shown = pixels(grid)[p : p + 64 : 16, p : p + 32 : 16]
    assert np.abs(shown - (image * 255).round().numpy()).max() <= 1
    assert (pixels(grid)[p : p + 64, p + 32 :] == 255).all()


def test_large_images_of_any_shape_are_shown_whole():
    red, blue = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    wide = torch.cat([red.expand(100, 150, 3), blue.expand(100, 150, 3)], dim=1)
    grid = pixels(plots.image_grid([[wide]], ["wide"], [["caption"]], cell=96))
    counts = [(np.abs(grid - np.array(c)).sum(-1) < 20).sum() for c in ((255, 0, 0), (0, 0, 255))]
    assert counts[0] == pytest.approx(counts[1], rel=0.05) and sum(counts) == pytest.approx(96 * 32, rel=0.1)


@pytest.mark.parametrize("text", ["a photograph of a red fox in the snow", "w" * 200, "two\nlines", "word " * 60, ""])
@pytest.mark.parametrize("width", [32, 180])
def test_wrapped_text_fits_its_column_and_loses_nothing(text, width):
    font = plots._font(12)
    lines = plots._wrapped(text, font, width)
    assert all(font.getlength(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_labels_and_captions_stay_off_the_images_and_inside_the_grid():
    black = torch.zeros(64, 64, 3)
    words = "an extremely long description " * 6
    grid = pixels(plots.image_grid([[black] * 3] * 2, [words] * 2, [[words] * 3] * 2, title=words, cell=96))
    height, width, _ = grid.shape
    assert (grid[:, : plots.PADDING] == 255).all() and (grid[:, width - plots.PADDING :] == 255).all()
    assert (grid[height - 4 :] == 255).all()
    # Every image is still a whole black square: 6 of 96 x 96 pixels, text is never pure black.
    assert (grid == 0).all(axis=-1).sum() == 6 * 96 * 96
    black_rows, black_columns = np.nonzero((grid == 0).all(axis=-1))
    first, second = black_rows.min(), black_rows.max() - 95
    ink = (grid < 250).any(axis=-1)[:, black_columns.min() :]
    # The captions of the upper row are as complete as those of the lower one, which nothing follows.
    assert ink[first + 96 : second].sum() == ink[second + 96 :].sum() > 0


def test_rows_of_unequal_length_and_rgba_images_are_accepted():
    image = torch.rand(16, 16, 4)
    plots.image_grid([[image, image], [image], []], ["a", "b", "c"], [["x", "y"], ["z"], []])


@pytest.mark.parametrize("arguments, said", [
    (([], []), "no image"),
    (([[]], [""]), "no image"),
    (([[torch.rand(8, 8, 3)]], []), "row labels"),
    (([[torch.rand(8, 8, 3)]], [""], [[]]), "cell labels"),
])  # fmt: skip
def test_a_grid_that_does_not_match_its_labels_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        plots.image_grid(*arguments)


def test_a_comparison_is_drawn_for_one_and_for_many_rewards():
    scores = {f"reward_{i}": [0.1 * i, 0.2, math.nan] for i in range(6)}
    better = {name: [value + 0.1 for value in values] for name, values in scores.items()}
    assert is_drawn(plots.plot_comparison(["reward_0"], scores, better))
    many = plots.plot_comparison(list(scores), scores, better)
    assert is_drawn(many) and many.height > plots.plot_comparison(["reward_0"], scores, better).height


def test_prompts_that_got_worse_are_drawn_in_another_colour_than_those_that_got_better():
    up = plots.plot_comparison(["r"], {"r": [0.0, 0.1]}, {"r": [1.0, 1.1]})
    down = plots.plot_comparison(["r"], {"r": [1.0, 1.1]}, {"r": [0.0, 0.1]})
    hue = lambda image: pixels(image)[..., 1] - pixels(image)[..., 0]  # noqa: E731
    assert (hue(up) > 40).any() and not (hue(up) < -40).any()
    assert (hue(down) < -40).any() and not (hue(down) > 40).any()


def test_a_comparison_needs_a_score_of_each_prompt_on_both_sides():
    with pytest.raises(ValueError, match="2 scores before and 1 after"):
        plots.plot_comparison(["r"], {"r": [1.0, 2.0]}, {"r": [1.0]})
    with pytest.raises(ValueError, match="0 after"):
        plots.plot_comparison(["r"], {"r": [1.0, 2.0]}, {})
    with pytest.raises(ValueError, match="no reward"):
        plots.plot_comparison([], {}, {})


def test_to_tensor_keeps_every_pixel():
    array = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    tensor = plots.to_tensor(Image.fromarray(array))
    assert tensor.shape == (1, 4, 5, 3) and tensor.dtype == torch.float32
    assert torch.equal((tensor[0] * 255).round().to(torch.uint8), torch.from_numpy(array))


def test_a_sparkline_rises_with_its_values_and_is_blank_where_there_are_none():
    assert plots.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == plots.SPARKS
    assert plots.sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert len(plots.sparkline(range(1000), width=40)) == 40
    assert len(set(plots.sparkline([3.0] * 9))) == 1
    assert plots.sparkline([]) == "" and plots.sparkline([math.inf, math.nan]) == "  "
    with pytest.raises(ValueError, match="width"):
        plots.sparkline([1.0], width=0)


def test_the_module_loads_no_matplotlib_and_drawing_loads_no_pyplot():
    code = (
        "import sys; from egrpo import plots; assert 'matplotlib' not in sys.modules; "
        "plots.plot_training([{'reward': 1.0}]); assert 'matplotlib.pyplot' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(root)})
