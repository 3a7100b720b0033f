"""Rollout Preview and Evaluate on the demo models: what they show is what training does, and the MODEL stays as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.comfy.pack import pack_module as of_pack

SIZE, GROUP, SEED = 64, 3, 7
TEXTS = ("a red circle", "a blue square on a green background")
VALUES = {"width": SIZE, "height": SIZE, "guidance": 3.5, "seed": SEED, "micro_batch": 4}


@pytest.fixture(scope="module")
def demo(pack_module) -> SimpleNamespace:
    """MODEL, CLIP and VAE of the demo family, as its node gives them."""
    with torch.inference_mode():
        model, clip, vae = pack_module("nodes.demo").EGRPODemoModels.execute().result
    return SimpleNamespace(model=model, clip=clip, vae=vae)


@pytest.fixture(autouse=True)
def temporary_output(pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node previews are pictures in ComfyUI's temp folder."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))


@pytest.fixture(scope="module")
def plan(pack_module):
    schedule = pack_module("egrpo.schedule")
    return schedule.plan_steps(schedule.flow_sigmas(6), tau=0.0, active="0,2")


def brightness(fail: bool = False, watch: bool = False):
    base = of_pack("egrpo.rewards.base")

    class Brightness(base.Reward):
        name = "brightness"
        prompts: list[str] = []

        def score(self, images, prompts):
            if fail:
                raise RuntimeError("on purpose")
            type(self).prompts = list(prompts)
            return images.mean(dim=(1, 2, 3))

    return base.RewardSet((base.RewardTerm(Brightness(), watch=watch),))


def preview(demo, plan, **changes):
    source = {"clip": demo.clip, "prompt": TEXTS[0]}
    values = {**VALUES, "model": demo.model, "vae": demo.vae, "plan": plan, "group_size": GROUP, **source, **changes}
    with torch.inference_mode():  # as ComfyUI executes nodes
        return of_pack("nodes.preview").EGRPORolloutPreview.execute(**values)


def evaluate(demo, plan, **changes):
    prompts = of_pack("egrpo.prompts").PromptSet(("unused",), TEXTS)
    values = {**VALUES, "model": demo.model, "clip": demo.clip, "vae": demo.vae, "prompts": prompts, "plan": plan}
    values |= {"reward": brightness(), "strength": 1.0, "samples": 2, **changes}
    with torch.inference_mode():
        return of_pack("nodes.evaluate").EGRPOEvaluate.execute(**values)


def lora_of(demo) -> dict[str, torch.Tensor]:
    """A LORA_MODEL that does something."""
    policy = of_pack("nodes.comfy_policy").ComfyPolicy(demo.model, None, None, width=SIZE, height=SIZE, rank=2)
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode(False), torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy.lora_model()


def encoded(demo, text: str, **values) -> list:
    with torch.inference_mode():
        conditioning = demo.clip.encode_from_tokens_scheduled(demo.clip.tokenize(text))
        return [[c, {**d, **values}] for c, d in conditioning]


def sampled_latent(demo) -> torch.Tensor:
    """What the user's own sampler makes with the MODEL."""
    from comfy.sample import sample

    with torch.inference_mode():
        noise = torch.randn(1, 16, SIZE // 8, SIZE // 8, generator=torch.Generator().manual_seed(1))
        condition = encoded(demo, TEXTS[0], guidance=3.5)
        return sample(
            demo.model, noise, 3, 1.0, "euler", "simple", condition, condition, torch.zeros_like(noise), seed=1, disable_pbar=True
        )  # fmt: skip


class Untouched:
    """Asserts on leaving that weights, forwards, patches and the user's samples are what they were on entering."""

    def __init__(self, demo) -> None:
        self.demo = demo

    def _state(self) -> tuple:
        model = self.demo.model
        changed = [m for m in model.model.modules() if "forward" in m.__dict__ or m._forward_pre_hooks]
        return changed, sorted(model.patches), sorted(model.injections), sorted(model.model_options)

    def __enter__(self) -> None:
        self.weights = {name: p.clone() for name, p in self.demo.model.model.named_parameters()}
        self.state, self.latent = self._state(), sampled_latent(self.demo)

    def __exit__(self, *exc: object) -> None:
        import comfy.model_management

        assert self._state() == self.state and not self.state[0]
        assert not comfy.model_management.in_training
        assert torch.equal(sampled_latent(self.demo), self.latent)
        comfy.model_management.unload_all_models()
        after = dict(self.demo.model.model.named_parameters())
        assert all(torch.equal(after[name], value) for name, value in self.weights.items())


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch size of every call of a diffusion model from now on."""
    import comfy.model_base

    sizes: list[int] = []
    apply = comfy.model_base.BaseModel.apply_model

    def counted(self, x, *args, **kwargs):
        sizes.append(x.shape[0])
        return apply(self, x, *args, **kwargs)

    monkeypatch.setattr(comfy.model_base.BaseModel, "apply_model", counted)
    return sizes


def test_preview_spends_the_planned_evaluations_and_leaves_the_model_alone(demo, plan, monkeypatch) -> None:
    with Untouched(demo):
        calls = counting(monkeypatch)
        output = preview(demo, plan, reward=brightness())
        monkeypatch.undo()
    grid, latents, images, text = output.result
    planned = plan.evaluations(GROUP)[0]
    assert sum(calls) == planned
    assert f"model evaluations: {planned} counted, {planned} planned" in text
    assert images.shape == (plan.images(GROUP), SIZE, SIZE, 3)
    assert grid.ndim == 4 and grid.shape[0] == 1 and grid.shape[1] > 3 * SIZE
    assert "brightness spread" in text and len(text.splitlines()) == 1 + len(plan.steps) + 1
    assert output.ui["images"]


def test_preview_latents_decode_to_its_images(demo, plan) -> None:
    import nodes

    _, latents, images, _ = preview(demo, plan).result
    with torch.inference_mode():
        (decoded,) = nodes.VAEDecode().decode(demo.vae, latents)
    assert torch.allclose(decoded.clamp(0, 1), images, atol=1e-5)


def test_preview_is_the_first_rollout_of_training(demo, plan) -> None:
    trainer = of_pack("egrpo.trainer")
    images = preview(demo, plan).result[2]
    policy = of_pack("nodes.comfy_policy").ComfyPolicy(demo.model, demo.clip, demo.vae, width=SIZE, height=SIZE, rank=2)
    settings = trainer.TrainSettings(iterations=1, group_size=GROUP, seed=SEED, micro_batch=4)
    prompts = of_pack("egrpo.prompts").PromptSet(TEXTS[:1], TEXTS[:1])
    with torch.inference_mode(), policy:
        events = trainer.Trainer(policy, brightness(), prompts, plan, settings).events()
        first = next(event for event in events if isinstance(event, trainer.Rollouts))
        events.close()
    assert torch.allclose(first.prompts[0].images, images, atol=1e-5)


def test_conditioning_and_clip_with_prompt_give_the_same_rollout(demo, plan) -> None:
    by_clip = preview(demo, plan).result[2]
    plain = preview(demo, plan, clip=None, conditioning=encoded(demo, TEXTS[0])).result[2]
    assert torch.equal(by_clip, plain), "guidance is added where the conditioning has none"
    with_own = preview(demo, plan, clip=None, conditioning=encoded(demo, TEXTS[0], guidance=1.0)).result[2]
    assert not torch.equal(by_clip, with_own), "and kept where it has"


def test_preview_gives_the_reward_the_prompt_and_says_when_there_is_none(demo, plan) -> None:
    reward = brightness()
    conditioning = encoded(demo, TEXTS[0])
    preview(demo, plan, reward=reward)
    assert set(reward.terms[0].reward.prompts) == {TEXTS[0]}
    silent = preview(demo, plan, reward=reward, clip=None, conditioning=conditioning, prompt="").result[3]
    assert "empty prompt" in silent


def test_noisier_steps_spread_images_more(demo, pack_module) -> None:
    """The same step with more noise differs more; what Figure 1 of the paper rests on."""
    schedule = pack_module("egrpo.schedule")

    def spread(eta: float) -> float:
        plan = schedule.plan_steps(schedule.flow_sigmas(6), eta=eta, tau=0.0, active="1")
        images = preview(demo, plan).result[2]
        return pack_module("egrpo.statistics").pairwise_difference(images[1:])

    assert spread(0.9) > 1.3 * spread(0.3)


@pytest.mark.parametrize("node", [preview, evaluate])
def test_a_failing_reward_is_named_and_leaves_nothing_behind(demo, plan, node) -> None:
    with Untouched(demo):
        with pytest.raises(of_pack("egrpo.rewards.base").RewardError, match="brightness.*on purpose"):
            extra = {"lora": lora_of(demo)} if node is evaluate else {}
            node(demo, plan, reward=brightness(fail=True), **extra)


@pytest.mark.parametrize("node", [preview, evaluate])
def test_cancel_stops_within_one_model_call_and_leaves_nothing_behind(demo, plan, node, monkeypatch) -> None:
    import comfy.model_management

    with Untouched(demo):
        calls = counting(monkeypatch)
        apply = comfy.model_base.BaseModel.apply_model

        def cancelled_at_the_third(self, *args, **kwargs):
            if len(calls) == 2:
                comfy.model_management.interrupt_current_processing()
            return apply(self, *args, **kwargs)

        monkeypatch.setattr(comfy.model_base.BaseModel, "apply_model", cancelled_at_the_third)
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            node(demo, plan)
        monkeypatch.undo()
        assert len(calls) == 3


def wrong_model(demo):
    """The MODEL with epsilon-prediction sampling, as ModelSamplingDiscrete would make it."""
    import comfy.model_sampling

    class Epsilon(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):
        pass

    model = demo.model.clone()
    model.add_object_patch("model_sampling", Epsilon())
    return model


BAD = {
    "size": ({"width": 100}, "width is 100; it must be a multiple of 16"),
    "not rectified flow": ({"model": wrong_model}, "not a rectified-flow model"),
}
BAD_PREVIEW = {
    **BAD,
    "group of one": ({"group_size": 1}, "group_size is 1"),
    "no source": ({"clip": None}, "nothing to sample"),
    "two sources": ({"conditioning": [[torch.zeros(1, 2, 2), {}]]}, "both conditioning and clip"),
    "empty prompt": ({"prompt": "  "}, "prompt is empty"),
    "empty conditioning": ({"clip": None, "conditioning": []}, "holds no prompt"),
}
BAD_EVALUATE = {
    **BAD,
    "no samples": ({"samples": 0}, "samples is 0"),
    "no held-out prompts": (
        {"prompts": lambda demo: of_pack("egrpo.prompts").PromptSet(("a",), ())},
        "no held-out prompts",
    ),
    "LoRA of another model": ({"lora": {"other.lora_up.weight": torch.zeros(2, 2)}}, "no layer of this MODEL"),
}
CASES = [(preview, *case) for case in BAD_PREVIEW.values()] + [(evaluate, *case) for case in BAD_EVALUATE.values()]
NAMES = [f"{node}: {name}" for node, bad in (("preview", BAD_PREVIEW), ("evaluate", BAD_EVALUATE)) for name in bad]


@pytest.mark.parametrize(("node", "changes", "message"), CASES, ids=NAMES)
def test_bad_input_is_refused_before_anything_is_loaded(demo, plan, monkeypatch, node, changes, message) -> None:
    import comfy.model_management

    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", loaded)
    changes = {name: value(demo) if callable(value) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        node(demo, plan, **changes)


def test_evaluate_compares_from_the_same_noise_and_leaves_the_model_alone(demo, plan, monkeypatch) -> None:
    with Untouched(demo):
        calls = counting(monkeypatch)
        output = evaluate(demo, plan, lora=lora_of(demo))
        monkeypatch.undo()
    table, grid, plot = output.result
    assert sum(calls) == 2 * len(TEXTS) * 2 * plan.total_steps
    assert "win rate" in table and all(text in table for text in TEXTS)
    assert grid.shape[0] == plot.shape[0] == 1
    still = evaluate(demo, plan, lora=lora_of(demo), strength=0.0).result[0]
    assert "+0.0000   0.0000      50%" in still, "a LoRA of strength 0 ties with the base on every pair"
    assert "+0.0000   0.0000      50%" not in table


def test_evaluate_repeats_the_trainers_before_images(demo, plan) -> None:
    trainer = of_pack("egrpo.trainer")
    policy = of_pack("nodes.comfy_policy").ComfyPolicy(demo.model, demo.clip, demo.vae, width=SIZE, height=SIZE, rank=2)
    settings = trainer.TrainSettings(seed=SEED, eval_samples=2, micro_batch=4)
    prompts = of_pack("egrpo.prompts").PromptSet(("unused",), TEXTS)
    with torch.inference_mode(), policy:
        before = trainer.Trainer(policy, brightness(), prompts, plan, settings).evaluate()
    assert f"{before.scores['brightness'].mean().item():.4f}" in evaluate(demo, plan).result[0]


def test_evaluate_agrees_with_the_lora_on_load_lora_model(demo, plan) -> None:
    """Its second column is what a user gets from LoraModelLoader and a sampler."""
    from comfy_extras.nodes_train import LoraModelLoader

    lora = lora_of(demo)
    with torch.inference_mode():
        (patched,) = LoraModelLoader.execute(demo.model, lora, 0.7).result
    alone = evaluate(demo, plan, model=patched).result[0]
    both = evaluate(demo, plan, lora=lora, strength=0.7).result[0]
    mean = next(line.split()[1] for line in alone.splitlines() if line.startswith("brightness "))
    assert next(line.split()[2] for line in both.splitlines() if line.startswith("brightness ")) == mean


def test_evaluate_without_a_lora_scores_the_base_and_blocks_the_plot(demo, plan) -> None:
    from comfy_execution.graph_utils import ExecutionBlocker

    table, grid, plot = evaluate(demo, plan, reward=brightness(watch=True)).result
    assert "win rate" not in table and grid.shape[0] == 1
    assert isinstance(plot, ExecutionBlocker)


@pytest.mark.parametrize("name", ["preview.EGRPORolloutPreview", "evaluate.EGRPOEvaluate"])
def test_every_socket_and_widget_is_explained(pack_module, name) -> None:
    module, node = name.split(".")
    schema = getattr(pack_module(f"nodes.{module}"), node).GET_SCHEMA()
    assert all(item.tooltip for item in (*schema.inputs, *schema.outputs))
    assert schema.display_name.startswith("E-GRPO ") and schema.category.startswith("E-GRPO/")
