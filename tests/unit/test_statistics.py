"""Spread within a group is about pairs, not about where the group lies; a comparison is about pairs of scores."""

from __future__ import annotations

import itertools

import pytest
import torch

from egrpo.schedule import flow_sigmas, plan_steps
from egrpo.statistics import (
    compare,
    difference_to,
    grouped,
    pairwise_difference,
    rollout_statistics,
    statistics_table,
)

PLAN = plan_steps(flow_sigmas(8), active="0,1", tau=0.0)
COARSE_TOO = plan_steps(flow_sigmas(8), active="0,1", tau=0.0, granularity=(1, 2))


def random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def test_pairwise_difference_is_the_mean_over_pairs():
    images = random(5, 4, 6, 3)
    pairs = [(a - b).square().mean().sqrt().item() for a, b in itertools.combinations(images, 2)]
    assert pairwise_difference(images) == pytest.approx(sum(pairs) / len(pairs), rel=1e-6)


def test_pairwise_difference_ignores_a_common_shift_and_difference_to_does_not():
    images = random(3, 4, 4, 3)
    assert pairwise_difference(images + 0.25) == pytest.approx(pairwise_difference(images), rel=1e-5)
    assert pairwise_difference(images[:1].expand(3, -1, -1, -1)) == 0
    assert difference_to(images[:1] + 0.25, images[0]) == pytest.approx(0.25, rel=1e-5)


def test_a_group_of_one_has_no_pairs():
    with pytest.raises(ValueError, match="group size of 2"):
        pairwise_difference(random(1, 4, 4, 3))


@pytest.mark.parametrize("plan", [PLAN, COARSE_TOO], ids=["one granularity", "two"])
def test_every_step_is_measured_on_its_own_images_and_scores(plan):
    """A step whose images and scores are all alike has no spread, however different the other steps are."""
    size = 4
    images = random(plan.images(size), 4, 4, 3)
    scores = random(plan.images(size))
    per_step = size * len(plan.granularity)
    images[1 + per_step :] = images[0]
    scores[1 + per_step :] = 0.5
    first, second = rollout_statistics(plan, size, images, {"reward": scores})
    assert (first.step, second.step) == plan.steps
    assert first.image_difference > 0.1 and first.anchor_difference > 0.1
    assert (second.image_difference, second.anchor_difference) == (0, 0)
    groups = scores[1 : 1 + per_step].view(-1, size)
    assert first.reward_spreads["reward"] == pytest.approx(groups.std(dim=-1).mean().item(), rel=1e-6)
    assert first.reward_means["reward"] == pytest.approx(groups.mean().item(), rel=1e-6)
    assert (second.reward_means, second.reward_spreads) == ({"reward": 0.5}, {"reward": 0.0})


def test_counts_that_do_not_fit_the_plan_are_refused():
    with pytest.raises(ValueError, match="8 values for a plan of 9 images"):
        grouped(random(8), PLAN, 4)


def test_the_table_has_a_line_per_step_and_columns_only_for_what_was_scored():
    images = random(PLAN.images(2), 4, 4, 3)
    bare = statistics_table(PLAN, rollout_statistics(PLAN, 2, images))
    scored = statistics_table(PLAN, rollout_statistics(PLAN, 2, images, {"sharpness": random(PLAN.images(2))}))
    assert len(bare.splitlines()) == len(scored.splitlines()) == 1 + len(PLAN.steps)
    assert "spread" not in bare and "sharpness spread" in scored
    assert len({len(line) for line in scored.splitlines()}) == 1


def test_compare_is_paired():
    before, after = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 1.0, 7.0])
    result = compare(before, after)
    assert (result.before, result.after, result.difference) == (1.5, 2.5, 1.0)
    assert result.win_rate == (2 + 0.5) / 4
    assert result.standard_error == pytest.approx((after - before).std().item() / 2)
    assert compare(before + 100, after + 100).standard_error == pytest.approx(result.standard_error)
    assert compare(before[:1], after[:1]).standard_error is None


def test_compare_refuses_what_does_not_pair():
    with pytest.raises(ValueError, match="do not pair"):
        compare(torch.zeros(2), torch.zeros(3))
