"""Facts of the rewards that need no weights."""

import pytest
import torch

from egrpo.rewards import RewardError, RewardSet, RewardTerm
from egrpo.rewards.builtin import BUILTIN_REWARDS, builtin_reward


def noise(batch: int = 2, size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.rand(batch, size, size, channels, generator=torch.Generator().manual_seed(0))


def solid(*rgb: float, size: int = 32) -> torch.Tensor:
    return torch.tensor(rgb).expand(1, size, size, 3).clone()


def score(kind: str, images: torch.Tensor, **settings) -> torch.Tensor:
    return builtin_reward(kind, **settings).score(images, ["a prompt"] * len(images))


@pytest.mark.parametrize("kind", BUILTIN_REWARDS)
def test_every_kind_scores_a_batch_in_float32_as_it_scores_each_image_alone(kind):
    images = noise(batch=3)
    scores = score(kind, images)
    assert scores.shape == (3,) and scores.dtype == torch.float32 and torch.isfinite(scores).all()
    alone = torch.cat([score(kind, image[None]) for image in images])
    assert torch.allclose(scores, alone, atol=1e-6)


@pytest.mark.parametrize("kind", BUILTIN_REWARDS)
def test_alpha_is_ignored_and_values_outside_the_range_are_clamped(kind):
    rgba = noise(channels=4)
    assert torch.equal(score(kind, rgba), score(kind, rgba[..., :3]))
    wild = noise() * 3.0 - 1.0
    assert torch.equal(score(kind, wild), score(kind, wild.clamp(0, 1)))


@pytest.mark.parametrize("kind", BUILTIN_REWARDS)
def test_half_precision_images_are_scored_in_float32(kind):
    images = noise().to(torch.bfloat16)
    assert torch.equal(score(kind, images), score(kind, images.float()))


@pytest.mark.parametrize("kind", BUILTIN_REWARDS)
def test_pixels_that_are_not_finite_raise_instead_of_scoring(kind):
    images = noise()
    images[1, 3, 4, 0] = float("nan")
    with pytest.raises(RewardError, match=kind):
        score(kind, images)


@pytest.mark.parametrize("kind", BUILTIN_REWARDS)
def test_settings_rebuild_the_reward(kind):
    settings = builtin_reward(kind, colour="#12ab9F", target=0.3).settings()
    assert settings.pop("name") == kind
    settings.pop("quality", None)
    images = noise()
    assert torch.equal(score(kind, images, **settings), score(kind, images, colour="#12ab9F", target=0.3))


@pytest.mark.parametrize("colour", ["#ff0000", "#336699", "#000000"])
def test_the_solid_target_colour_scores_zero_and_nothing_scores_more(colour):
    rgb = [value / 255 for value in bytes.fromhex(colour[1:])]
    assert score("target_colour", solid(*rgb), colour=colour).item() == 0.0
    others = torch.cat([noise(), solid(0.2, 0.9, 0.4), solid(1.0, 1.0, 1.0)])
    assert (score("target_colour", others, colour=colour) < 0).all()


def test_black_is_at_distance_one_from_white_and_one_channel_at_its_root_third():
    assert score("target_colour", solid(0.0, 0.0, 0.0), colour="#ffffff").item() == pytest.approx(-1.0)
    assert score("target_colour", solid(0.0, 0.0, 0.0), colour="#ff0000").item() == pytest.approx(-(3**-0.5))


def test_the_target_colour_counts_pixels_and_not_their_average():
    checkered = torch.zeros(1, 8, 8, 3)
    checkered[:, ::2] = 1.0
    grey = solid(0.5, 0.5, 0.5, size=8)
    assert score("target_colour", checkered, colour="#808080") < score("target_colour", grey, colour="#808080")


def test_noise_is_less_compressible_than_a_flat_image():
    images = torch.cat([noise(1), solid(0.5, 0.5, 0.5)])
    compressible, incompressible = score("jpeg_compressibility", images), score("jpeg_incompressibility", images)
    assert compressible[0] < compressible[1] < 0
    assert torch.equal(incompressible, -compressible)


def test_brightness_is_best_at_its_target():
    greys = torch.cat([solid(g, g, g) for g in (0.1, 0.3, 0.5, 0.9)])
    scores = score("target_brightness", greys, target=0.3)
    assert torch.allclose(scores, torch.tensor([-0.2, 0.0, -0.2, -0.6]), atol=1e-6)
    green_is_brighter = score("target_brightness", torch.cat([solid(0, 1.0, 0), solid(0, 0, 1.0)]), target=1.0)
    assert green_is_brighter[0] > green_is_brighter[1]


def test_contrast_of_half_black_half_white_is_one_half():
    halves = torch.zeros(1, 8, 8, 3)
    halves[:, :4] = 1.0
    assert score("target_contrast", halves, target=0.5).item() == pytest.approx(0.0, abs=1e-6)
    assert score("target_contrast", solid(0.4, 0.4, 0.4), target=0.25).item() == pytest.approx(-0.25, abs=1e-6)


def test_blurring_lowers_sharpness_and_a_flat_image_or_a_ramp_has_none():
    sharp = noise(1)
    blurred = torch.nn.functional.avg_pool2d(sharp.movedim(-1, 1), 3, 1, 1).movedim(1, -1)
    assert score("sharpness", sharp) > score("sharpness", blurred) + 0.5
    ramp = torch.linspace(0, 1, 32).view(1, 1, 32, 1).expand(1, 32, 32, 3)
    assert score("sharpness", torch.cat([solid(0.3, 0.3, 0.3), ramp])).tolist() == pytest.approx([-6.0, -6.0], abs=1e-3)


@pytest.mark.parametrize(
    "kind, settings, accepted",
    [
        ("target_colour", {"colour": "red"}, "#RRGGBB"),
        ("target_colour", {"colour": "#ff00"}, "#RRGGBB"),
        ("target_colour", {"colour": "#ff00zz"}, "#RRGGBB"),
        ("target_brightness", {"target": 1.2}, "between 0 and 1"),
        ("target_brightness", {"target": float("nan")}, "between 0 and 1"),
        ("target_brightness", {"target": None}, "between 0 and 1"),
        ("target_contrast", {"target": 0.6}, "between 0 and 0.5"),
        ("shininess", {}, "jpeg_compressibility"),
    ],
)
def test_bad_settings_name_what_is_accepted(kind, settings, accepted):
    with pytest.raises(ValueError, match=accepted):
        builtin_reward(kind, **settings)


@pytest.mark.parametrize("images", [torch.rand(8, 8, 3), torch.rand(1, 8, 8, 1), torch.rand(1, 3, 8, 2)])
def test_wrong_shapes_are_refused(images):
    with pytest.raises(RewardError, match="expected"):
        builtin_reward("target_colour").score(images, ["a"])


def test_all_kinds_work_together_in_a_reward_set():
    rewards = RewardSet(tuple(RewardTerm(builtin_reward(kind)) for kind in BUILTIN_REWARDS))
    assert set(rewards.score(noise(), ["a", "b"])) == set(BUILTIN_REWARDS)
