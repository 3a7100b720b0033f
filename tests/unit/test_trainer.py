"""The loop learns what it is rewarded for, spends what the plan says, and continues exactly where it stopped."""

from __future__ import annotations

import json

import pytest
import torch

from egrpo.prompts import PromptError, PromptSet
from egrpo.rewards import Reward, RewardError, RewardSet, RewardTerm
from egrpo.run import Run, RunError, checked_name, execute, lora_metadata
from egrpo.schedule import flow_sigmas, plan_steps
from egrpo.trainer import (
    Checkpoint,
    Evaluation,
    Finished,
    Progress,
    Rollouts,
    SettingsError,
    Started,
    Step,
    Trainer,
    TrainSettings,
    Warned,
)
from tests.unit.toy import BRIGHTNESS, PROMPTS, Brightness, Darkness, ToyPolicy

PLAN = plan_steps(flow_sigmas(8), tau=2.2)
QUICK = dict(iterations=4, group_size=4, learning_rate=1e-2, eval_every=2, checkpoint_every=2)


def make_trainer(policy=None, rewards=BRIGHTNESS, plan=PLAN, prompts=PROMPTS, **settings) -> Trainer:
    options = {name: settings.pop(name) for name in ("on_progress", "advantage_transform") if name in settings}
    return Trainer(policy or ToyPolicy(), rewards, prompts, plan, TrainSettings(**{**QUICK, **settings}), **options)


def steps(events) -> list[dict]:
    return [event.metrics for event in events if isinstance(event, Step)]


def test_events_come_in_order():
    kinds = [type(event) for event in make_trainer().events()]
    once = [Rollouts, Step]
    evaluated = [*once, *once, Evaluation, Checkpoint]
    assert kinds == [Started, Evaluation, *evaluated, *evaluated, Finished]


def test_reward_rises_and_shuffled_advantages_do_not():
    def gain(**options) -> float:
        evaluations = [e for e in make_trainer(iterations=60, eval_samples=8, **options).events() if type(e) is Evaluation]
        return evaluations[-1].reward - evaluations[0].reward

    generator = torch.Generator().manual_seed(0)

    def shuffled(advantages):
        return advantages[:, torch.randperm(advantages.shape[1], generator=generator)]

    learnt = gain()
    assert learnt > 0.5
    assert abs(gain(advantage_transform=shuffled)) < learnt / 4


def test_opposite_reward_moves_the_other_way():
    evaluations = [
        event.scores["darkness"].mean()
        for event in make_trainer(rewards=RewardSet((RewardTerm(Darkness()),)), iterations=30).events()
        if isinstance(event, Evaluation)
    ]
    assert evaluations[-1] > evaluations[0] + 0.1


@pytest.mark.parametrize("settings", [{}, {"update_every": 1}, {"update_every": 2, "prompts_per_iteration": 2}])
def test_ratio_is_exactly_one_at_every_groups_first_update(settings):
    assert all(metrics["ratio_error"] == 0.0 for metrics in steps(make_trainer(**settings).events()))


def test_stale_log_prob_equals_the_rollouts_while_parameters_are_unchanged():
    plan = plan_steps(flow_sigmas(8), active=[0])
    for metrics in steps(make_trainer(plan=plan, stale_log_prob=True).events()):
        assert metrics["ratio_error"] == metrics["rollout_ratio_error"] == 0.0


def test_second_inner_update_moves_the_ratio_and_meets_the_clip():
    metrics = steps(make_trainer(inner_updates=2, learning_rate=0.1).events())
    assert all(row["ratio_error"] > 0 for row in metrics)
    assert any(row["clip_fraction"] > 0 for row in metrics)


@pytest.mark.parametrize("granularity", [(1,), (1, 2)])
def test_model_evaluations_are_those_of_the_plan(granularity):
    policy = ToyPolicy()
    plan = plan_steps(flow_sigmas(16), granularity=granularity)
    trainer = make_trainer(policy, plan=plan, iterations=1, eval_every=0)
    events = trainer.events()
    started = next(events)
    next(events)  # evaluation before
    policy.evaluated = policy.with_gradient = 0
    rollouts = next(events)
    forward, backward = plan.evaluations(4)
    assert policy.evaluated == forward
    step = next(events)
    assert policy.with_gradient == backward
    assert policy.evaluated == forward + backward
    assert step.metrics["evaluations"] == forward
    assert started.backward_evaluations == backward
    assert started.forward_evaluations == forward + 2 * len(PROMPTS.held_out) * plan.total_steps
    assert len(rollouts.prompts[0].images) == plan.images(4)


def test_progress_reaches_its_total():
    seen: list[Progress] = []
    for _ in make_trainer(on_progress=seen.append).events():
        pass
    per_iteration = [p for p in seen if p.phase == "rollout" and p.iteration == 0]
    assert per_iteration[-1].done == per_iteration[-1].total == PLAN.evaluations(4)[0]


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs():
    def final(seed):
        policy = ToyPolicy()
        for _ in make_trainer(policy, seed=seed).events():
            pass
        return policy.state_dict()

    first, again, other = final(1), final(1), final(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["bias"], other["bias"])


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_resume_continues_bit_for_bit(tmp_path, ema_decay):
    def run(iterations, folder, state=None):
        policy = ToyPolicy(seed=0)
        trainer = make_trainer(policy, iterations=iterations, ema_decay=ema_decay, checkpoint_every=3)
        if state:
            trainer.load_state(state)
        execute(trainer, folder, {})
        return trainer.state()

    whole = run(6, Run.create(tmp_path, "whole", {}))
    first = Run.create(tmp_path, "first", {})
    run(3, first)
    state = first.load_checkpoint()
    assert state.iteration == 3
    continued = run(6, first, state)
    assert whole.tensors.keys() == continued.tensors.keys()
    assert all(torch.equal(whole.tensors[name], continued.tensors[name]) for name in whole.tensors)
    assert (ema_decay > 0) == any(name.startswith("ema.") for name in whole.tensors)


def test_kl_holds_the_policy_near_its_base():
    def distance(beta):
        policy = ToyPolicy()
        metrics = steps(make_trainer(policy, iterations=30, kl_beta=beta).events())
        assert ("kl" in metrics[-1]) == (beta > 0)
        return policy.bias.norm().item()

    assert distance(100.0) < distance(0.0) / 2


def test_watched_reward_is_scored_but_not_learnt():
    both = RewardSet((RewardTerm(Brightness()), RewardTerm(Darkness(), watch=True)))
    alone, watched = ToyPolicy(), ToyPolicy()
    list(make_trainer(alone).events())
    metrics = steps(make_trainer(watched, rewards=both).events())
    assert torch.equal(alone.bias, watched.bias)
    assert metrics[0]["reward/darkness"] == pytest.approx(-metrics[0]["reward/brightness"])


class Constant(Reward):
    name = "constant"

    def score(self, images, prompts):
        return torch.full((len(images),), 0.1)


def test_groups_without_spread_teach_nothing_and_are_counted():
    policy = ToyPolicy()
    events = list(make_trainer(policy, rewards=RewardSet((RewardTerm(Constant()),))).events())
    assert all(metrics["skipped_groups"] == len(PLAN.steps) for metrics in steps(events))
    assert policy.bias.abs().max() == 0
    assert any(isinstance(event, Warned) and "spread" in event.message for event in events)


class Faulty(Reward):
    """Returns NaN from its third call on."""

    name = "faulty"

    def __init__(self):
        self.calls = 0

    def score(self, images, prompts):
        self.calls += 1
        scores = images.mean(dim=(1, 2, 3))
        return scores * float("nan") if self.calls > 5 else scores


def test_nan_reward_names_reward_and_prompt_and_keeps_the_run(tmp_path):
    run = Run.create(tmp_path, "nan", {})
    trainer = make_trainer(rewards=RewardSet((RewardTerm(Faulty()),)), eval_every=0)
    with pytest.raises(RewardError, match=r"'faulty' returned nan for prompt '(red|green|blue)'"):
        execute(trainer, run, lora_metadata(trainer))
    assert run.load_checkpoint().iteration == trainer.iteration > 0
    assert (run.folder / "lora.safetensors").is_file()


def test_interrupt_saves_the_state_and_resumes_to_the_same_end(tmp_path):
    whole = ToyPolicy()
    list(make_trainer(whole).events())
    policy, run = ToyPolicy(), Run.create(tmp_path, "cut", {})
    trainer = make_trainer(policy)
    policy.interrupt_after = 300  # inside a rollout, after some iterations
    with pytest.raises(KeyboardInterrupt):
        execute(trainer, run, {})
    state = run.load_checkpoint()
    assert 0 < state.iteration < 4
    continued = ToyPolicy()
    trainer = make_trainer(continued)
    trainer.load_state(state)
    execute(trainer, run, {})
    assert torch.equal(continued.bias, whole.bias)


def test_non_finite_velocity_is_named():
    policy = ToyPolicy()
    policy.bias.data[0] = float("inf")
    with pytest.raises(FloatingPointError, match="velocity at sigma"):
        list(make_trainer(policy).events())


def test_run_folder_holds_what_happened(tmp_path):
    run = Run.create(tmp_path, "kept", {"a": 1})
    outcome = execute(make_trainer(), run, {"egrpo.note": "x"})
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == run.history == outcome.history
    assert [row["iteration"] for row in rows if "seconds" in row] == [1, 2, 3, 4]
    assert [row["iteration"] for row in rows if "eval_reward" in row] == [0, 2, 4]
    assert [p.name for p in run.checkpoints()] == ["000002", "000004"]
    assert Run.open(run.folder).config == {"a": 1}
    assert (run.folder / "images" / "held_out_000004.png").is_file()
    assert Run.create(tmp_path, "kept", {}).folder != run.folder


def test_truncated_checkpoint_falls_back_to_the_one_before(tmp_path, caplog):
    run = Run.create(tmp_path, "broken", {})
    execute(make_trainer(), run, {})
    newest = run.checkpoints()[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:50])
    assert run.load_checkpoint().iteration == 2
    assert "000004" in caplog.text


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 200, "a..b", "nul\0"])
def test_names_that_could_leave_their_folder_are_refused(name):
    with pytest.raises(RunError):
        checked_name(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "group_size is 1"),
        ({"iterations": 0}, "iterations is 0"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"ratio": "other"}, "unknown ratio"),
        ({"kl_beta": -1.0}, "kl_beta"),
    ],
)
def test_bad_settings_are_named_before_anything_runs(settings, message):
    policy = ToyPolicy()
    with pytest.raises(SettingsError, match=message):
        make_trainer(policy, **settings)
    assert policy.evaluated == 0


def test_missing_prompts_and_rewards_are_named():
    with pytest.raises(PromptError, match="training"):
        make_trainer(prompts=PromptSet((), ("x",)))
    with pytest.raises(SettingsError, match="watch-only"):
        make_trainer(rewards=RewardSet((RewardTerm(Brightness(), watch=True),)))
