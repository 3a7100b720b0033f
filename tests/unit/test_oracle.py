"""The judge of the demo family's pictures."""

import random

import pytest
import torch
import torch.nn.functional as F

from egrpo.backends import oracle, shapes
from egrpo.backends.shapes import Item, Scene


def draw(scenes, seed=0, **options):
    return shapes.render(scenes, torch.Generator().manual_seed(seed), **options)


def right(images, scenes):
    return oracle.summary(oracle.judge(images, scenes))["right"]


@pytest.fixture(scope="module")
def scenes():
    return shapes.sample_scenes(75, 11) + shapes.sample_scenes(25, 11, held_out=True)


@pytest.mark.parametrize("pixels", [64, 128])
def test_clean_pictures_are_right(scenes, pixels):
    assert right(draw(scenes, pixels=pixels), scenes) >= 0.97


def test_pictures_of_something_else_are_wrong(scenes):
    images = draw(scenes)
    assert right(images, scenes[1:] + scenes[:1]) <= 0.01
    assert right(torch.rand(20, 3, 64, 64), scenes[:20]) == 0
    assert right(torch.full((20, 3, 64, 64), 0.5), scenes[:20]) == 0


@pytest.mark.parametrize("kind", shapes.CONTRASTS)
def test_one_wrong_thing_is_seen_and_named(scenes, kind):
    rng = random.Random(0)
    pairs = [(s, other) for s in scenes if (other := shapes.contrast_scene(s, kind, rng)) is not None]
    drawn, wanted = [other for _, other in pairs], [s for s, _ in pairs]
    result = oracle.summary(oracle.judge(draw(drawn), wanted))
    assert result["right"] <= 0.01
    assert 0.3 < result["fraction"] < 0.95
    if kind != "count":  # with an item too few or too many, all its attributes are wrong
        wrong = {name for name in oracle.ATTRIBUTES if result[name] < 0.97}
        assert wrong == {kind.removeprefix("swap ")}


@pytest.mark.parametrize("damage", shapes.DAMAGES)
def test_damaged_shapes_do_not_pass(scenes, damage):
    result = oracle.summary(oracle.judge(draw(scenes, damage=damage), scenes))
    assert result["shape"] < 0.35
    assert result["background"] > 0.97


def test_slight_blur_and_noise_are_forgiven(scenes):
    images = draw(scenes)
    blurred = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    noise = 0.03 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    assert right(torch.lerp(images, blurred, 0.5) + noise, scenes) >= 0.95


def test_reading_lists_items_from_left_to_right():
    scene = Scene((Item("small", "white", "ring"), Item("large", "purple", "star")), "black")
    reading = oracle.read(draw([scene]))[0]
    assert reading.background == "black"
    assert [(item.size, item.colour, item.shape) for item in reading.items] == [
        ("small", "white", "ring"),
        ("large", "purple", "star"),
    ]


def test_missing_item_costs_its_three_checks_and_the_count():
    both = Scene((Item("small", "white", "ring"), Item("large", "purple", "star")), "black")
    one = Scene(both.items[:1], "black")
    verdict = oracle.judge(draw([one]), [both])[0]
    assert not verdict.right
    assert verdict.fraction == pytest.approx(4 / 8)
    assert verdict.attributes == {"background": 1, "count": 0, "size": 0.5, "colour": 0.5, "shape": 0.5}


def test_images_of_the_wrong_form_are_refused():
    with pytest.raises(ValueError, match="expected square images"):
        oracle.read(torch.zeros(64, 64, 3))
