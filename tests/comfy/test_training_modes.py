"""The trainer on ComfyUI's FLUX, in inference mode as a node runs: every option of the update, counted and repeatable."""

from __future__ import annotations

import pytest
import torch

from tests.comfy.test_gradients import FORMATS, load
from tests.comfy.tiny import conditioning

OPTIONS = {
    "a step per active step": {},
    "a step per prompt": {"update_every": 1},
    "a step per two prompts": {"update_every": 2, "prompts_per_iteration": 2},
    "KL, EMA, guard ratio": {"kl_beta": 0.1, "ema_decay": 0.9, "ratio": "guard"},
    "two inner updates": {"inner_updates": 2},
    "stale log-probabilities": {"stale_log_prob": True},
}


def make_trainer(pack_module, model, **settings):
    """A trainer whose images are its latents' first channels, so that no VAE or CLIP is needed."""
    policy_module = pack_module("nodes.comfy_policy")
    egrpo = {name: pack_module(f"egrpo.{name}") for name in ("trainer", "schedule", "prompts", "rewards")}

    class Policy(policy_module.ComfyPolicy):
        def encode(self, prompts):
            return [conditioning() for _ in prompts]

        def decode(self, latents):
            return latents[:, :3].movedim(1, -1).float().cpu()

    class Brightness(egrpo["rewards"].Reward):
        name = "brightness"

        def score(self, images, prompts):
            return images.mean(dim=(1, 2, 3))

    policy = Policy(model, None, None, width=32, height=32, rank=2, seed=1)
    trainer = egrpo["trainer"].Trainer(
        policy,
        egrpo["rewards"].RewardSet((egrpo["rewards"].RewardTerm(Brightness()),)),
        egrpo["prompts"].PromptSet(("a", "b"), ("c",)),
        egrpo["schedule"].plan_steps(egrpo["schedule"].flow_sigmas(6), active=[0, 2]),
        egrpo["trainer"].TrainSettings(
            **{"iterations": 2, "group_size": 3, "learning_rate": 1e-3, "eval_every": 0, "micro_batch": 2, **settings}
        ),
    )
    return policy, trainer


def run(policy, trainer) -> list[dict]:
    with torch.inference_mode(), policy:
        return [event.metrics for event in trainer.events() if type(event).__name__ == "Step"]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_the_update_trains(tiny, pack_module, name):
    policy, trainer = make_trainer(pack_module, load(tiny.diffusers, dtype=torch.float32), **OPTIONS[name])
    metrics = run(policy, trainer)
    assert len(metrics) == 2
    assert all(row["grad_norm"] > 0 and row["skipped_steps"] == 0 for row in metrics)
    assert max(adapter.up.abs().max() for _, adapter in policy.lora.named()) > 0
    if "inner_updates" not in OPTIONS[name] and "stale_log_prob" not in OPTIONS[name]:
        assert all(row["ratio_error"] == 0.0 for row in metrics)


@pytest.mark.parametrize("name", ["fp32", *FORMATS])
def test_ratio_to_the_rollout_is_exactly_one_before_any_update(tiny, pack_module, name):
    """One optimizer step per iteration: every group meets the rollout's own parameters, after unloading and reloading."""
    attribute, options = FORMATS.get(name, ("diffusers", {"dtype": torch.float32}))
    settings = {"update_every": 1, "stale_log_prob": True}
    metrics = run(*make_trainer(pack_module, load(getattr(tiny, attribute), **options), **settings))
    assert [row["rollout_ratio_error"] for row in metrics] == [0.0, 0.0]
    assert [row["ratio_error"] for row in metrics] == [0.0, 0.0]


def test_model_evaluations_are_those_of_the_plan(tiny, pack_module):
    """Latents that reach the diffusion model in one iteration, counted in the model itself."""
    model = load(tiny.diffusers, dtype=torch.float32)
    policy, trainer = make_trainer(pack_module, model, iterations=1)
    counts = {"forward": 0, "gradient": 0}
    original = model.model.apply_model

    def counting(x, *args, **kwargs):
        counts["gradient" if torch.is_grad_enabled() else "forward"] += len(x)
        return original(x, *args, **kwargs)

    with torch.inference_mode(), policy:
        events = trainer.events()
        next(events), next(events)
        model.model.apply_model = counting
        try:
            next(events), next(events)
        finally:
            del model.model.apply_model
    assert (counts["forward"], counts["gradient"]) == trainer.plan.evaluations(3)


def test_a_resumed_run_continues_bit_for_bit(tiny, pack_module):
    model = load(tiny.diffusers, dtype=torch.float32)

    def trained(iterations, state=None):
        policy, trainer = make_trainer(pack_module, model, iterations=iterations, ema_decay=0.9)
        with torch.inference_mode(), policy:
            if state:
                trainer.load_state(state)
            for _ in trainer.events():
                pass
            return trainer.state()

    whole, continued = trained(3), trained(3, trained(1))
    assert whole.tensors.keys() == continued.tensors.keys()
    assert all(torch.equal(whole.tensors[name], continued.tensors[name]) for name in whole.tensors)
