"""The surrogate: at the old parameters it is the policy gradient, far from them it stops."""

import pytest
import torch

from egrpo.objective import GUARD_RATIO, PLAIN_RATIO, RATIOS, clipped_surrogate, kl_to_base, log_ratio
from egrpo.sde import log_prob

CLIP = 1e-4
STD = 0.4


def group(size=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(1, 4, 3, 3, generator=generator, dtype=torch.float64)
    x_next = mean + STD * torch.randn(size, 4, 3, 3, generator=generator, dtype=torch.float64)
    advantages = torch.randn(size, generator=generator, dtype=torch.float64)
    return mean, x_next, advantages


@pytest.mark.parametrize("kind", RATIOS)
def test_at_the_old_parameters_the_ratio_is_one_and_the_loss_is_minus_the_mean_advantage(kind):
    mean, x_next, advantages = group()
    logs = log_ratio(x_next, mean, STD, log_prob(x_next, mean, STD), mean, kind)
    surrogate = clipped_surrogate(logs, advantages, CLIP)
    assert torch.equal(surrogate.ratio, torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(surrogate.loss, -advantages.mean())
    assert surrogate.clip_fraction == 0.0 and surrogate.approx_kl == 0.0


def test_gradient_at_the_old_parameters_is_the_policy_gradient():
    old_mean, x_next, advantages = group()
    mean = old_mean.clone().requires_grad_()
    logs = log_ratio(x_next, mean, STD, log_prob(x_next, old_mean, STD), old_mean)
    (gradient,) = torch.autograd.grad(clipped_surrogate(logs, advantages, CLIP).loss, mean)
    # d log N(x'; mean, std) / d mean = (x' - mean) / std^2, averaged over the dimensions.
    score = (x_next - old_mean) / STD**2 / old_mean[0].numel()
    expected = -(advantages.view(-1, 1, 1, 1) * score).mean(dim=0, keepdim=True)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_value", [2 * CLIP, -2 * CLIP, 0.5 * CLIP, -0.5 * CLIP])
def test_the_clip_stops_the_gradient_only_where_the_policy_has_gone_far_the_rewarded_way(advantage, log_value):
    logs = torch.tensor([log_value], dtype=torch.float64, requires_grad=True)
    surrogate = clipped_surrogate(logs, torch.tensor([advantage], dtype=torch.float64), CLIP)
    surrogate.loss.backward()
    gone_far = abs(log_value) > CLIP and (log_value > 0) == (advantage > 0)
    assert (logs.grad.item() == 0.0) is gone_far
    assert surrogate.clip_fraction == float(abs(log_value) > CLIP)


def test_the_surrogate_is_a_lower_bound_of_the_unclipped_objective():
    logs = 1e-3 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    advantages = torch.randn(64, generator=torch.Generator().manual_seed(2))
    assert clipped_surrogate(logs, advantages, CLIP).loss >= -(logs.exp() * advantages).mean()


def test_approx_kl_is_never_negative():
    logs = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    assert clipped_surrogate(logs, torch.zeros(1000), CLIP).approx_kl > 0


def test_kl_to_the_base_is_zero_at_the_base_and_grows_with_the_square_of_the_distance():
    mean, _, _ = group()
    assert kl_to_base(mean, mean, STD) == 0.0
    assert kl_to_base(mean + 0.1, mean, STD).item() == pytest.approx(0.1**2 / (2 * STD**2))
    torch.testing.assert_close(kl_to_base(mean + 0.2, mean, STD), 4 * kl_to_base(mean + 0.1, mean, STD))


def test_kl_is_the_gaussian_divergence_per_dimension():
    mean, _, _ = group()
    other = mean + 0.05
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, STD), normal(other, STD)).mean()
    torch.testing.assert_close(kl_to_base(mean, other, STD), expected)


def test_guard_ratio_is_centred_where_the_plain_one_drifts():
    """On samples of the old policy E[log ratio] = -KL < 0; the guard adds the KL back."""
    old_mean, x_next, _ = group(size=20_000)
    mean = old_mean + 0.05
    old = log_prob(x_next, old_mean, STD)
    plain = log_ratio(x_next, mean, STD, old, old_mean, PLAIN_RATIO)
    guard = log_ratio(x_next, mean, STD, old, old_mean, GUARD_RATIO)
    error = 5 * float(plain.std()) / 20_000**0.5
    assert float(plain.mean()) == pytest.approx(-(0.05**2) / (2 * STD**2), abs=error)
    assert float(guard.mean()) == pytest.approx(0.0, abs=error)


def test_guard_ratio_has_the_same_spread_at_every_noise_level():
    spreads = []
    for std in (0.05, 0.4, 1.5):
        generator = torch.Generator().manual_seed(4)
        old_mean = torch.zeros(1, 4, 3, 3, dtype=torch.float64)
        x_next = std * torch.randn(4000, 4, 3, 3, generator=generator, dtype=torch.float64)
        old = log_prob(x_next, old_mean, std)
        spreads.append(float(log_ratio(x_next, old_mean + 0.01, std, old, old_mean, GUARD_RATIO).std()))
    assert max(spreads) / min(spreads) == pytest.approx(1.0, abs=1e-6)


def test_impossible_ratios_are_refused():
    mean, x_next, _ = group()
    old = log_prob(x_next, mean, STD)
    with pytest.raises(ValueError, match="unknown ratio 'none'"):
        log_ratio(x_next, mean, STD, old, mean, "none")
    with pytest.raises(ValueError, match="needs the mean"):
        log_ratio(x_next, mean, STD, old, None, GUARD_RATIO)
