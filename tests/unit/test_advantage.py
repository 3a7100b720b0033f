"""Group-relative advantages."""

import pytest
import torch

from egrpo.advantage import (
    ADVANTAGES_THEN_SUM,
    SUM_THEN_ADVANTAGES,
    combined_advantages,
    group_advantages,
    has_spread,
    weighted_reward,
)


def rewards(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_advantages_have_zero_mean_and_unit_unbiased_std_in_each_group():
    advantages = group_advantages(rewards(3, 5, 12))
    assert advantages.shape == (3, 5, 12)
    torch.testing.assert_close(advantages.mean(-1), torch.zeros(3, 5, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(advantages.std(-1), torch.ones(3, 5, dtype=torch.float64), rtol=0, atol=1e-6)


def test_two_members_stand_half_a_root_of_two_apart_from_their_mean():
    torch.testing.assert_close(group_advantages(torch.tensor([1.0, 3.0])), torch.tensor([-0.5, 0.5]) * 2**0.5)


def test_groups_do_not_see_each_other():
    both = rewards(2, 6)
    assert torch.equal(group_advantages(both)[1], group_advantages(both[1]))
    shifted = both + torch.tensor([[0.0], [100.0]])
    torch.testing.assert_close(group_advantages(shifted), group_advantages(both), rtol=0, atol=1e-6)


def test_an_outlier_is_clamped():
    values = torch.zeros(100)
    values[7] = 1.0
    assert group_advantages(values)[7] == 5.0
    assert group_advantages(values, clamp=2.0).abs().max() == 2.0


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3, 1e6])
def test_a_group_without_spread_teaches_nothing(value):
    values = torch.full((2, 6), value)
    values[1, 0] += 1.0
    assert has_spread(values).tolist() == [False, True]
    advantages = group_advantages(values)
    assert torch.equal(advantages[0], torch.zeros(6)) and advantages[1].abs().max() > 1


def test_rounding_is_no_spread():
    values = torch.full((8,), 0.1)
    values[3] = torch.nextafter(values[3], torch.tensor(1.0))
    assert not has_spread(values)


def test_small_but_real_spread_counts():
    values = 0.28 + 1e-5 * torch.arange(4.0)
    assert has_spread(values)
    assert group_advantages(values).std().item() == pytest.approx(1.0, abs=1e-2)


def test_bf16_rewards_give_float32_advantages():
    assert group_advantages(torch.tensor([0.0, 1.0, 2.0], dtype=torch.bfloat16)).dtype == torch.float32


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="group of 1"):
        group_advantages(torch.zeros(4, 1))


def test_normalise_then_sum_ignores_the_rewards_scales():
    a, b = rewards(4, 6, seed=1), rewards(4, 6, seed=2)
    weights = {"a": 1.0, "b": 0.5}
    plain = combined_advantages({"a": a, "b": b}, weights, ADVANTAGES_THEN_SUM)
    scaled = combined_advantages({"a": 1000 * a + 3, "b": b}, weights, ADVANTAGES_THEN_SUM)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(plain, group_advantages(a) + 0.5 * group_advantages(b))


def test_sum_then_normalise_follows_the_larger_reward():
    a, b = rewards(4, 6, seed=1), rewards(4, 6, seed=2)
    weights = {"a": 1.0, "b": 1.0}
    both = combined_advantages({"a": 1000 * a, "b": b}, weights, SUM_THEN_ADVANTAGES)
    torch.testing.assert_close(both, group_advantages(1000 * a + b))
    torch.testing.assert_close(both, group_advantages(a), rtol=0, atol=1e-2)


def test_only_weighted_rewards_are_added():
    values = {"a": rewards(6, seed=1), "b": rewards(6, seed=2)}
    for rule in (ADVANTAGES_THEN_SUM, SUM_THEN_ADVANTAGES):
        combined = combined_advantages(values, {"a": 1.0, "b": 0.0}, rule)
        torch.testing.assert_close(combined, group_advantages(values["a"]))
    torch.testing.assert_close(weighted_reward(values, {"a": 2.0, "b": -1.0}), 2 * values["a"] - values["b"])


def test_impossible_combinations_are_refused():
    with pytest.raises(ValueError, match="no reward"):
        combined_advantages({}, {})
    with pytest.raises(ValueError, match="unknown combination rule 'mean'"):
        combined_advantages({"a": rewards(4)}, {"a": 1.0}, "mean")
