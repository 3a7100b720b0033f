"""Evaluation repeats exactly, spends what it says, and is the trainer's own."""

from __future__ import annotations

import pytest
import torch

from egrpo.evaluation import evaluate_policy, evaluation_rows, evaluation_table
from egrpo.rewards import RewardSet, RewardTerm
from egrpo.schedule import flow_sigmas, plan_steps
from egrpo.trainer import Trainer, TrainSettings
from tests.unit.toy import BRIGHTNESS, PROMPTS, Brightness, Darkness, ToyPolicy

PLAN = plan_steps(flow_sigmas(8), tau=2.2)
TEXTS = list(PROMPTS.held_out)


def evaluate(policy=None, rewards=BRIGHTNESS, **options):
    policy = policy or ToyPolicy()
    return evaluate_policy(policy, rewards, TEXTS, policy.encode(TEXTS), PLAN, **options)


def trained_policy() -> ToyPolicy:
    policy = ToyPolicy()
    with torch.no_grad():
        policy.bias.fill_(-0.3)
    return policy


def test_it_is_what_the_trainer_evaluates():
    settings = TrainSettings(seed=5, eval_samples=3)
    theirs = Trainer(trained_policy(), BRIGHTNESS, PROMPTS, PLAN, settings).evaluate()
    ours = evaluate(trained_policy(), samples=3, seed=5)
    assert torch.equal(ours.images, theirs.images)
    assert torch.equal(ours.scores["brightness"], theirs.scores["brightness"])
    assert ours.reward == theirs.reward and ours.prompts == theirs.prompts


def test_evaluations_spent_are_those_announced():
    policy, told = ToyPolicy(), []
    evaluate(policy, samples=3, micro_batch=2, on_step=told.append)
    assert policy.evaluated == sum(told) == len(TEXTS) * 3 * PLAN.total_steps


def test_noise_does_not_depend_on_the_micro_batch_and_differs_between_samples():
    one, many = evaluate(samples=3, micro_batch=1), evaluate(samples=3, micro_batch=8)
    assert torch.allclose(one.images, many.images, atol=1e-6)
    assert len(one.scores["brightness"].unique()) == len(TEXTS) * 3
    assert not torch.equal(one.images, evaluate(samples=3, seed=1).images)


def test_base_leaves_the_lora_off():
    assert torch.equal(evaluate(trained_policy(), base=True).images, evaluate(ToyPolicy()).images)
    assert not torch.equal(evaluate(trained_policy()).images, evaluate(ToyPolicy()).images)


def test_watched_rewards_alone_can_be_evaluated():
    watched = RewardSet((RewardTerm(Brightness(), watch=True), RewardTerm(Darkness(), weight=2.0, watch=True)))
    result = evaluate(rewards=watched)
    assert result.reward == pytest.approx(0.0, abs=1e-6), "brightness and darkness cancel in their plain sum"


def test_table_and_rows_name_every_prompt_and_reward():
    both = RewardSet((RewardTerm(Brightness()), RewardTerm(Darkness())))
    before, after = evaluate(rewards=both, samples=2), evaluate(trained_policy(), both, samples=2)
    table = evaluation_table(before, after)
    assert all(table.count(text) == 2 for text in TEXTS), "once per reward"
    assert "100%" in table and " 0%" in table, "what brightness wins darkness loses"
    rows, labels, cells = evaluation_rows([("base", before), ("LoRA", after)])
    assert labels == [f"{name}: {text}" for text in TEXTS for name in ("base", "LoRA")]
    assert all(len(row) == len(cell) == 2 for row, cell in zip(rows, cells))
    assert cells[1][0] == f"brightness {after.scores['brightness'][0]:.3f}\ndarkness {after.scores['darkness'][0]:.3f}"
    assert "win rate" not in evaluation_table(before)


def test_the_host_can_stop_it_before_the_next_model_call():
    policy = ToyPolicy()
    policy.interrupt_after = 4
    with pytest.raises(KeyboardInterrupt):
        evaluate(policy, samples=3, micro_batch=2)
    assert policy.evaluated == 4


def test_a_velocity_that_is_not_finite_is_an_error():
    policy = ToyPolicy()
    with torch.no_grad():
        policy.bias[3] = torch.nan
    with pytest.raises(FloatingPointError, match="at sigma 1.0000 holds NaN"):
        evaluate(policy)
