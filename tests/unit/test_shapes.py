"""The demo family's pictures and captions."""

import random
from itertools import combinations

import pytest
import torch

from egrpo.backends import demo, shapes
from egrpo.backends.shapes import Item, Scene


def scene(*items: str, background: str = "green") -> Scene:
    return Scene(tuple(Item(*item.split()) for item in items), background)


def draw(scenes, seed=0, **options):
    return shapes.render(scenes, torch.Generator().manual_seed(seed), **options)


def test_caption_lists_items_from_left_to_right_and_can_be_read_back():
    two = scene("large red circle", "small blue square", background="orange")
    assert shapes.caption(two) == "a large red circle and a small blue square on an orange background"
    for each in shapes.sample_scenes(200, 0):
        assert shapes.parse_caption(shapes.caption(each)) == each


@pytest.mark.parametrize("text", ["", "a red circle", "a large pink circle on a green background"])
def test_incomplete_or_foreign_captions_are_refused(text):
    with pytest.raises(ValueError, match="full caption"):
        shapes.parse_caption(text)


def test_the_text_encoder_knows_every_word():
    words = {word for each in shapes.sample_scenes(500, 1) for word in shapes.caption(each).split()}
    assert words <= set(demo.WORDS)


def test_dropping_words_never_makes_a_caption_wrong():
    rng = random.Random(3)
    for each in shapes.sample_scenes(100, 2):
        loose = shapes.loose_caption(each, rng, 0.5).replace(" an ", " a ").removeprefix("an ").removeprefix("a ")
        words = shapes.caption(each).replace(" an ", " a ").split()
        position = iter(words)
        assert all(word in position for word in loose.split())


def test_training_never_meets_held_out_combinations():
    def combination(item, background):
        return item.colour, item.shape, background

    train = {combination(i, s.background) for s in shapes.sample_scenes(6000, 0) for i in s.items}
    held_out = shapes.sample_scenes(300, 0, held_out=True)
    for each in held_out:
        assert any(combination(item, each.background) not in train for item in each.items)
    # Each two of the three stay known.
    unseen = {combination(item, each.background) for each in held_out for item in each.items} - train
    assert unseen
    for first, second in combinations(range(3), 2):
        pairs = {(row[first], row[second]) for row in train}
        assert {(row[first], row[second]) for row in unseen} <= pairs


def test_scenes_and_pictures_depend_on_their_seed_alone():
    scenes = shapes.sample_scenes(4, 5)
    assert scenes == shapes.sample_scenes(4, 5) != shapes.sample_scenes(4, 6)
    assert torch.equal(draw(scenes, 1), draw(scenes, 1))
    assert not torch.equal(draw(scenes, 1), draw(scenes, 2))


def test_items_stand_at_their_places_in_their_colours():
    image = draw([scene("small red square", "large blue circle", background="white")], pixels=128)[0]
    assert image.shape == (3, 128, 128) and 0 <= image.min() and image.max() <= 1
    for x, colour in ((0.25, "red"), (0.75, "blue"), (0.5, "white")):
        wanted = shapes.COLOUR_VALUES[shapes.COLOURS.index(colour)]
        assert (image[:, 64, int(x * 128)] - wanted).abs().max() < 0.1


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_large_items_of_two_never_touch(shape):
    images = draw([scene(f"large red {shape}", f"large red {shape}", background="white")] * 32)
    middle = images[:, 1, :, 31:33]  # green is high on white, low on red
    assert middle.min() > 0.5  # at most the soft edge of one of them


@pytest.mark.parametrize("kind", shapes.CONTRASTS)
def test_contrast_changes_what_it_says_and_nothing_else(kind):
    rng = random.Random(0)
    made = 0
    for each in shapes.sample_scenes(100, 7):
        other = shapes.contrast_scene(each, kind, rng)
        if other is None:
            continue
        made += 1
        assert other != each
        assert (other.background != each.background) == (kind == "background")
        assert (len(other.items) != len(each.items)) == (kind == "count")
        assert all(item.colour != other.background for item in other.items)
        if kind.startswith("swap "):
            name = kind.removeprefix("swap ")
            assert [getattr(i, name) for i in other.items] == [getattr(i, name) for i in reversed(each.items)]
        elif kind in ("size", "colour", "shape"):
            names = ("size", "colour", "shape")
            pairs = zip(each.items, other.items)
            assert [n for a, b in pairs for n in names if getattr(a, n) != getattr(b, n)] == [kind]
    assert made > 20


def test_unknown_kinds_are_refused():
    one = scene("large red circle")
    with pytest.raises(ValueError, match="swap colour"):
        shapes.contrast_scene(one, "place", random.Random(0))
    with pytest.raises(ValueError, match="warp"):
        draw([one], damage="burn")
