"""One transition: the published code's numbers, the ODE limit, and what the noise level becomes."""

import json
import math
from pathlib import Path

import pytest
import torch

from egrpo.schedule import flow_sigmas
from egrpo.sde import CPS, FLOW_SDE, KERNELS, euler, kernel_of, log_prob, noise_ratio, transition

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sde_step.json").read_text())["cases"]
PAPER = flow_sigmas(16, 3.0)


def steps_of(sigmas):
    last = len(sigmas) - 1
    return [(index, merge) for index in range(last) for merge in range(1, last - index + 1)]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"T{c['steps']}-s{c['shift']}-i{c['index']}-l{c['merge']}")
def test_golden_mean_std_and_log_prob(case):
    sigmas = flow_sigmas(case["steps"], case["shift"])
    mean, std = transition(tensor(case["x"]), tensor(case["v"]), sigmas, case["index"], case["merge"], case["eta"])
    assert_close(mean, tensor(case["mean"]))
    assert float(std) == pytest.approx(case["std"], abs=1e-9)
    if case["std"] > 0:
        assert_close(log_prob(tensor(case["x_next"]), mean, std), tensor(case["log_prob_mean"]))


def test_golden_has_sixty_cases():
    assert len(GOLDEN) == 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sigmas", [PAPER, flow_sigmas(7, 1.15)], ids=["T16", "T7"])
def test_without_noise_every_step_is_euler_bit_for_bit(sigmas, kernel, dtype):
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 3, 16, 8, 8, generator=generator, dtype=dtype)[:2]
    for index, merge in steps_of(sigmas):
        mean, std = transition(x, v, sigmas, index, merge, eta=0.0, kernel=kernel)
        assert torch.equal(mean, euler(x, v, sigmas[index], sigmas[index + merge])), (index, merge)
        assert float(std) == 0.0


@pytest.mark.parametrize(
    ("index", "merge", "ratio"), [(1, 1, 1.045), (2, 2, 1.07), (4, 3, 1.09), (1, 2, 1.20), (1, 4, 1.84)]
)
def test_noise_ratios_of_the_paper_setting(index, merge, ratio):
    assert noise_ratio(PAPER, index, merge, 0.7) == pytest.approx(ratio, abs=5e-3)


def test_long_merge_at_high_noise_flips_the_latent():
    assert kernel_of(PAPER, 1, 4, 0.7).x_coefficient < 0 < kernel_of(PAPER, 1, 2, 0.7).x_coefficient


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("index", "merge"), [(0, 1), (1, 1), (1, 4), (4, 3), (7, 6)])
def test_noise_ratio_is_what_a_point_mass_distribution_shows(kernel, index, merge):
    """All data at one image x_0: the exact velocity is (x - x_0) / sigma, and the noise after a step can be measured."""
    generator = torch.Generator().manual_seed(1)
    sigma, sigma_next = float(PAPER[index]), float(PAPER[index + merge])
    image = torch.randn(1, generator=generator, dtype=torch.float64)
    x = (1 - sigma) * image + sigma * torch.randn(1, 400_000, generator=generator, dtype=torch.float64)
    mean, std = transition(x, (x - image) / sigma, PAPER, index, merge, 0.7, kernel)
    x_next = mean + std * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    left = x_next - (1 - sigma_next) * image
    assert float(left.mean()) == pytest.approx(0.0, abs=5 * float(left.std()) / 400_000**0.5)
    assert float(left.std()) / sigma_next == pytest.approx(noise_ratio(PAPER, index, merge, 0.7, kernel), rel=5e-3)


def test_cps_keeps_the_noise_level_of_every_merge():
    for index, merge in steps_of(PAPER):
        assert noise_ratio(PAPER, index, merge, 0.7, CPS) == pytest.approx(1.0, abs=1e-12)


def test_cps_is_the_published_formula():
    """mean = x0_hat (1 - sigma') + x1_hat sqrt(sigma'^2 - c^2) with c = sigma' sin(a pi / 2)."""
    generator = torch.Generator().manual_seed(2)
    x, v = torch.randn(2, 1, 4, 4, 4, generator=generator, dtype=torch.float64)
    for index, merge in steps_of(PAPER):
        sigma, sigma_next = float(PAPER[index]), float(PAPER[index + merge])
        c = sigma_next * math.sin(0.7 * math.pi / 2)
        expected = (x - sigma * v) * (1 - sigma_next) + (x + (1 - sigma) * v) * math.sqrt(sigma_next**2 - c**2)
        mean, std = transition(x, v, PAPER, index, merge, 0.7, CPS)
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
        assert float(std) == pytest.approx(c, abs=1e-15)


def test_first_step_takes_its_denominator_from_the_second_sigma():
    s = 0.7 * math.sqrt(1.0 / (1.0 - float(PAPER[1])))
    assert kernel_of(PAPER, 0, 1, 0.7).std == pytest.approx(s * math.sqrt(1.0 - float(PAPER[1])))


def test_first_step_below_one_takes_its_own_sigma():
    std = kernel_of([0.995, 0.5, 0.0], 0, 1, 0.7).std
    assert std == pytest.approx(0.7 * math.sqrt(0.995 / (1.0 - 0.995)) * math.sqrt(0.995 - 0.5))


def test_log_prob_is_the_mean_gaussian_density_of_each_sample():
    generator = torch.Generator().manual_seed(3)
    x_next, mean = torch.randn(2, 3, 4, 5, 6, generator=generator, dtype=torch.float64)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(x_next).mean(dim=(1, 2, 3))
    # The constant log sqrt(2 pi) is kept in single precision, as in the published code.
    torch.testing.assert_close(log_prob(x_next, mean, 0.3), expected, rtol=0, atol=1e-7)


def test_log_prob_shares_one_mean_over_the_group():
    generator = torch.Generator().manual_seed(4)
    x_next, mean = torch.randn(5, 4, 2, 2, generator=generator), torch.randn(1, 4, 2, 2, generator=generator)
    assert torch.equal(log_prob(x_next, mean, 0.5), log_prob(x_next, mean.expand_as(x_next), 0.5))


def test_low_precision_states_are_raised_to_float32():
    x = torch.randn(1, 4, 2, 2).bfloat16()
    mean, std = transition(x, x, PAPER, 2, 2)
    assert mean.dtype == std.dtype == torch.float32
    assert log_prob(x, mean, std).dtype == torch.float32


def test_a_step_without_noise_has_no_density():
    with pytest.raises(ValueError, match="std is 0"):
        log_prob(torch.zeros(1, 2), torch.zeros(1, 2), 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((15, 2, 0.7, FLOW_SDE), "step 15 merged over 2 does not fit a schedule of 16"),
        ((-1, 1, 0.7, FLOW_SDE), "step -1"),
        ((3, 0, 0.7, FLOW_SDE), "merged over 0"),
        ((3, 1, -0.1, FLOW_SDE), "eta is -0.1"),
        ((3, 1, 1.1, CPS), "eta is 1.1"),
        ((3, 1, 0.7, "sde"), "unknown kernel 'sde'"),
    ],
)
def test_impossible_steps_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        kernel_of(PAPER, *arguments)
