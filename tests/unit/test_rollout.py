"""The sampling part of Algorithm 1 on a velocity whose answers are known."""

import pytest
import torch

from egrpo.rollout import sample_anchor, sample_rollout
from egrpo.schedule import flow_sigmas, plan_steps
from egrpo.sde import euler, log_prob, transition

PAPER = flow_sigmas(16, 3.0)
PLANS = {
    "paper": plan_steps(PAPER),
    "published list": plan_steps(PAPER, merge={0: 1, 1: 1, 2: 2, 4: 3}),
    "two granularities": plan_steps(PAPER, active="0 3", granularity=(1, 3)),
    "to the end": plan_steps(PAPER, merge={12: 4, 14: 1}, eta=0.2),
    "cps": plan_steps(PAPER, tau=1.0, kernel="cps"),
}


class LinearVelocity:
    """v = a x + b sigma, counting the latents it is asked for and the sigmas it is told."""

    def __init__(self):
        self.evaluations = 0
        self.batches = []

    def __call__(self, x, sigma):
        self.evaluations += len(x)
        self.batches.append((sigma, len(x)))
        return 0.3 * x + 0.1 * sigma


def noise(seed=0):
    return torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(seed))


def rollout(plan, group_size=3, micro_batch=8, seed=1, velocity=None):
    generator = torch.Generator().manual_seed(seed)
    return sample_rollout(velocity or LinearVelocity(), plan, noise(), group_size, generator, micro_batch)


def same(first, second):
    pairs = [(first.anchor, second.anchor)]
    for a, b in zip(first.groups, second.groups, strict=True):
        pairs += [(a.x, b.x), (a.mean, b.mean), (a.x_next, b.x_next), (a.log_prob, b.log_prob), (a.finals, b.finals)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("group_size", [1, 3, 12])
def test_counted_evaluations_are_those_of_the_plan(name, group_size):
    velocity = LinearVelocity()
    result = rollout(PLANS[name], group_size, velocity=velocity)
    assert velocity.evaluations == result.evaluations == PLANS[name].evaluations(group_size)[0]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("micro_batch", [1, 2, 5, 1000])
def test_the_micro_batch_does_not_change_the_result(name, micro_batch):
    assert same(rollout(PLANS[name], micro_batch=micro_batch), rollout(PLANS[name]))


def test_no_call_exceeds_the_micro_batch_and_groups_at_one_sigma_share_calls():
    velocity = LinearVelocity()
    rollout(PLANS["paper"], group_size=3, micro_batch=7, velocity=velocity)
    assert max(size for _, size in velocity.batches) == 7
    sigmas = [sigma for sigma, _ in velocity.batches[16:]]
    assert sigmas == sorted(sigmas, reverse=True)


def test_the_generator_alone_decides():
    plan = PLANS["paper"]
    assert same(rollout(plan, seed=5), rollout(plan, seed=5))
    assert not same(rollout(plan, seed=5), rollout(plan, seed=6))


def test_group_members_differ_and_share_start_and_mean():
    for group in rollout(PLANS["paper"]).groups:
        assert group.x.shape == group.mean.shape == (1, 4, 4, 4)
        assert group.x_next.shape == (3, 4, 4, 4) and group.finals.shape == (1, 3, 4, 4, 4)
        assert len({tuple(final.flatten().tolist()) for final in group.finals[0]}) == 3


def test_anchor_is_plain_euler():
    velocity, x = LinearVelocity(), noise()
    for sigma, sigma_next in zip(PAPER.tolist(), PAPER.tolist()[1:]):
        x = euler(x, velocity(x, sigma), sigma, sigma_next)
    assert torch.equal(rollout(PLANS["paper"]).anchor, x)


@pytest.mark.parametrize("name", PLANS)
def test_transitions_start_from_the_anchor_and_its_velocity(name):
    plan, velocity = PLANS[name], LinearVelocity()
    _, states = sample_anchor(velocity, plan, noise())
    for group in rollout(plan).groups:
        step = group.step
        x, v = states[step.index]
        assert torch.equal(group.x, x) and torch.equal(v, velocity(x, plan.sigmas[step.index]))
        mean, std = transition(x, v, plan.sigmas, step.index, step.merge, plan.eta, plan.kernel)
        assert torch.equal(group.mean, mean)
        assert torch.equal(group.log_prob, log_prob(group.x_next, mean, std))


@pytest.mark.parametrize("name", PLANS)
def test_tails_continue_where_the_merged_step_ended_and_reach_sigma_zero(name):
    plan, velocity = PLANS[name], LinearVelocity()
    for group in rollout(plan).groups:
        for stride, finals in zip(plan.granularity, group.finals, strict=True):
            x = group.x_next
            indices = [*range(group.step.index + group.step.merge, 16, stride), 16]
            for i, j in zip(indices, indices[1:]):
                x = euler(x, velocity(x, plan.sigmas[i]), plan.sigmas[i], plan.sigmas[j])
            torch.testing.assert_close(finals, x)


@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
def test_branches_approach_the_anchor_as_the_noise_vanishes(kernel):
    distances = []
    for eta in (1e-1, 1e-2, 1e-3):
        result = rollout(plan_steps(PAPER, eta=eta, tau=0.0, kernel=kernel))
        distances.append(max(float((group.finals - result.anchor).abs().max()) for group in result.groups))
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 0.02 * distances[0] and distances[2] < 1e-2


def test_latents_hold_the_anchor_first_then_every_group():
    plan = PLANS["two granularities"]
    result = rollout(plan)
    latents = result.latents()
    assert len(latents) == plan.images(3) == 1 + 2 * 2 * 3
    assert torch.equal(latents[:1], result.anchor)
    assert torch.equal(latents[7:], result.groups[1].finals.flatten(0, 1))


def test_progress_is_told_every_evaluation():
    told = []
    plan = PLANS["paper"]
    sample_rollout(LinearVelocity(), plan, noise(), 3, torch.Generator().manual_seed(0), 4, told.append)
    assert sum(told) == plan.evaluations(3)[0] and max(told) == 4
