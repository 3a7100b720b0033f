"""Plan, Prompts, Reward and the Merged-Step Sampler, run as ComfyUI runs them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from egrpo.schedule import flow_sigmas, plan_steps
from egrpo.sde import transition
from tests.comfy.tiny import TinyCheckpoints, conditioning
from tools.comfyui import ComfyError


@pytest.fixture(scope="module")
def node(pack_module):
    """``node("plan.EGRPOPlan", steps=8)``: execute with the schema's defaults for what is not given."""

    def execute(path: str, **given: Any) -> tuple:
        module, name = path.split(".")
        cls = getattr(pack_module(f"nodes.{module}"), name)
        values = {
            item.id: item.default for item in cls.GET_SCHEMA().inputs if getattr(item, "default", None) is not None
        }
        return cls.execute(**{**values, **given})

    return execute


@pytest.fixture(scope="module")
def run_plan(node, comfy_path, tmp_path_factory: pytest.TempPathFactory):
    import folder_paths

    patch = pytest.MonkeyPatch()
    patch.setattr(folder_paths, "temp_directory", str(tmp_path_factory.mktemp("temp")))
    yield lambda **given: node("plan.EGRPOPlan", **given)
    patch.undo()


def merges(plan) -> list[tuple[int, int]]:
    return [(step.index, step.merge) for step in plan.steps]


# E-GRPO Plan


def test_the_default_plan_is_the_papers(run_plan) -> None:
    plan, sigmas, plot, table = run_plan().result
    assert plan.to_dict() == plan_steps(flow_sigmas(16)).to_dict()
    assert [merge for _, merge in merges(plan)] == [1, 1, 2, 2, 2, 3, 3, 3]
    assert sigmas.dtype == torch.float32 and torch.equal(sigmas, flow_sigmas(16).float())
    assert plot.ndim == 4 and plot.shape[0] == 1 and plot.shape[-1] == 3
    forward, backward = plan.evaluations(8)
    assert f"{forward} model evaluations, {backward} with gradient" in table


def test_the_plan_shows_itself(run_plan) -> None:
    output = run_plan()
    assert output.ui["text"] == [output.result[3]]
    assert output.ui["images"][0]["type"] == "temp"


def test_connected_sigmas_replace_steps_and_shift(run_plan) -> None:
    given = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])
    plan, sigmas, _, _ = run_plan(sigmas=given, merging="none", steps=999).result
    assert torch.equal(sigmas, given)
    assert plan.total_steps == 4


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"merging": "none"}, [(i, 1) for i in range(8)]),
        ({"merging": "fixed_2", "active_steps": "first_4"}, [(i, 2) for i in range(4)]),
        ({"merging": "fixed_4", "active_steps": "custom", "custom_steps": "8 9", "kernel": "cps"}, [(8, 4), (9, 4)]),
        ({"merging": "explicit", "explicit_merges": "0:1 1:1 2:2 4:3"}, [(0, 1), (1, 1), (2, 2), (4, 3)]),
        ({"active_steps": "custom", "custom_steps": "1, 4"}, [(1, 1), (4, 2)]),
        ({"tau": 2.6, "grouping": "disjoint"}, [(0, 1), (1, 1), (2, 2), (4, 3), (7, 4)]),
        ({"tau_mode": "quantile", "tau_quantile": 0.0}, [(i, 1) for i in range(8)]),
        ({"tau_mode": "groups", "target_groups": 5, "grouping": "disjoint"}, 5),
    ],
)
def test_settings_reach_the_plan(run_plan, given, expected) -> None:
    plan = run_plan(**given).result[0]
    assert (merges(plan) if isinstance(expected, list) else len(plan.steps)) == expected


@pytest.mark.parametrize(
    "given, message",
    [
        ({"sigmas": torch.tensor([1.0, 0.5, 0.6, 0.0])}, "sigma 2 (0.6) is not below sigma 1"),
        ({"sigmas": torch.tensor([14.6, 3.0, 0.0])}, "not the sigmas of a rectified flow"),
        ({"merging": "explicit", "explicit_merges": "14:3"}, "step 14 merged over 3 passes the end"),
        ({"merging": "fixed_6"}, "step 0 merged over 6 flips the latent"),
        ({"merging": "explicit"}, "explicit_merges is empty"),
        ({"active_steps": "custom"}, "custom_steps is empty"),
        ({"active_steps": "custom", "custom_steps": "3,40"}, "active steps [40] lie outside"),
        ({"eta": 0.0}, "eta is 0.0"),
        ({"eta": 2.0, "kernel": "cps"}, "eta is 2.0, but the cps kernel takes 0"),
        ({"tau": 20.0}, "lower tau, raise eta"),
    ],
)
def test_bad_plans_say_what_is_wrong(run_plan, given, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_plan(**given)


def test_a_flip_can_be_allowed(run_plan) -> None:
    plan = run_plan(merging="fixed_6", allow_flip=True).result[0]
    assert plan.steps[0].contraction < 0


def test_free_text_is_checked_before_the_queue(pack_module) -> None:
    check = pack_module("nodes.plan").EGRPOPlan.validate_inputs
    assert check(custom_steps="", explicit_merges="") is True
    assert check(custom_steps="0,1 4", explicit_merges="0:1, 2:2") is True
    assert check(custom_steps=None, explicit_merges=None) is True, "linked values arrive as None"
    assert "'one'" in check(custom_steps="one", explicit_merges="")
    assert "'3-2'" in check(custom_steps="", explicit_merges="1:1 3-2")


# E-GRPO Prompts


@pytest.fixture
def input_folder(comfy_path, tmp_path, monkeypatch: pytest.MonkeyPatch):
    import folder_paths

    folder = tmp_path / "input"
    folder.mkdir()
    monkeypatch.setattr(folder_paths, "input_directory", str(folder))
    return folder


def test_prompts_from_lines(node) -> None:
    prompts, summary, count = node("prompts.EGRPOPrompts", text="one\n\n two \none\nthree\n", held_out=1).result
    assert prompts.train == ("one", "two") and prompts.held_out == ("three",)
    assert count == 2
    assert summary.splitlines()[0] == "2 training prompts from text:" and "  three" in summary


def test_too_few_prompts_to_hold_out_is_said(node) -> None:
    summary = node("prompts.EGRPOPrompts", text="only this", held_out=4).result[1]
    assert "1 prompts for evaluation (also trained on)" in summary


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "json", "csv"])
def test_prompts_from_a_file(node, pack_module, input_folder, suffix) -> None:
    rows = [{"prompt": "from, the file"}, {"prompt": "second"}]
    text = {
        "txt": "from, the file\nsecond\n",
        "jsonl": "\n".join(map(json.dumps, rows)),
        "json": json.dumps(rows),
        "csv": 'id,prompt\n1,"from, the file"\n2,second\n',
    }[suffix]
    name = f"prompts.{suffix}"
    (input_folder / name).write_text(text, encoding="utf-8")
    (input_folder / "picture.png").touch()
    assert pack_module("nodes.prompts").prompt_files() == [name]
    prompts, summary, _ = node("prompts.EGRPOPrompts", text="first line", file=name, held_out=0).result
    assert prompts.train == ("first line", "from, the file", "second")
    assert f"text and {name}" in summary


def test_an_edited_file_is_read_again(pack_module, input_folder) -> None:
    fingerprint = pack_module("nodes.prompts").EGRPOPrompts.fingerprint_inputs
    (input_folder / "a.txt").write_text("one")
    first = fingerprint(file="a.txt", text="", seed=0)
    assert fingerprint(file="a.txt", text="", seed=0) == first
    (input_folder / "a.txt").write_text("two")
    assert fingerprint(file="a.txt", text="", seed=0) != first


@pytest.mark.parametrize(
    "given, message",
    [
        ({"text": "  \n \n"}, "no prompts in text: give at least one line"),
        ({"file": "absent.txt"}, "prompt file absent.txt does not exist"),
        ({"file": "empty.txt"}, "no prompts in empty.txt"),
        ({"file": "../secret.txt"}, "outside ComfyUI's input folder"),
        ({"file": "link.txt"}, "outside ComfyUI's input folder"),
        ({"file": "broken.jsonl"}, "broken.jsonl line 1 is not valid JSON"),
        ({"file": "titles.csv"}, "titles.csv line 2 has no prompt / caption / text field, only title"),
    ],
)
def test_bad_prompts_say_what_is_wrong(node, input_folder, given, message) -> None:
    (input_folder.parent / "secret.txt").write_text("secret")
    (input_folder / "link.txt").symlink_to(input_folder.parent / "secret.txt")
    (input_folder / "empty.txt").touch()
    (input_folder / "broken.jsonl").write_text("{")
    (input_folder / "titles.csv").write_text("title\nx\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        node("prompts.EGRPOPrompts", **given)


# E-GRPO Reward


def test_a_reward_scores(node) -> None:
    (rewards,) = node("reward.EGRPOReward", kind="target_colour", colour="#00FF00", weight=-2.0).result
    images = torch.zeros(2, 8, 8, 3)
    images[1, ..., 1] = 1.0
    scores = rewards.score(images, ["", ""])["target_colour"]
    assert scores[1] == 0 and scores[0] < -0.5
    assert rewards.weights == {"target_colour": -2.0}


def test_every_kind_makes_a_reward(node, pack_module) -> None:
    for kind in pack_module("egrpo.rewards.builtin").BUILTIN_REWARDS:
        (rewards,) = node("reward.EGRPOReward", kind=kind).result
        assert list(rewards.weights) == [kind]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"colour": "red"}, "colour 'red' is not of the form #RRGGBB"),
        ({"kind": "target_contrast", "target": 0.9}, "must lie between 0 and 0.5"),
        ({"weight": 0.0}, "weight is 0"),
    ],
)
def test_bad_rewards_say_what_is_wrong(node, pack_module, given, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        node("reward.EGRPOReward", **given)
    if "colour" in given:
        assert message in pack_module("nodes.reward").EGRPOReward.validate_inputs(**given)


# E-GRPO Merged-Step Sampler


@pytest.fixture(scope="module")
def flux(tiny: TinyCheckpoints):
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(tiny.diffusers), model_options={"dtype": torch.float32})


@pytest.fixture(scope="module")
def sample(flux):
    """Latents of SamplerCustom from given start (zeros: pure noise), under inference mode as in ComfyUI."""
    from comfy_extras.nodes_custom_sampler import SamplerCustom

    def run(sampler, sigmas, *, model=flux, batch: int = 1, latent: dict | None = None, **given) -> torch.Tensor:
        latent = latent or {"samples": torch.zeros(batch, 16, 8, 8)}
        options = {"add_noise": True, "noise_seed": 3, "cfg": 1.0, **given}
        with torch.inference_mode():
            output = SamplerCustom.execute(
                model, positive=conditioning(), negative=conditioning(), sampler=sampler, sigmas=sigmas,
                latent_image=latent, **options,
            )  # fmt: skip
        return output.result[0]["samples"]

    return run


@pytest.fixture(scope="module")
def merged(node):
    return lambda **given: node("sampler.EGRPOMergedStepSampler", **given).result[0]


SIGMAS = flow_sigmas(6).float()


def euler():
    import comfy.samplers

    return comfy.samplers.sampler_object("euler")


@pytest.mark.parametrize("sigmas", [SIGMAS, SIGMAS[:4], SIGMAS[2:]], ids=["whole", "first part", "second part"])
def test_without_a_random_step_it_is_comfyuis_euler_bit_for_bit(sample, merged, sigmas) -> None:
    assert torch.equal(sample(merged(index=-1), sigmas), sample(euler(), sigmas))


def test_it_works_in_sampler_custom_advanced(sample, merged, flux) -> None:
    from comfy_extras.nodes_custom_sampler import CFGGuider, RandomNoise, SamplerCustomAdvanced

    sampler = merged(index=1, merge=2, seed=4)
    (noise,) = RandomNoise.execute(3).result
    (guider,) = CFGGuider.execute(flux, conditioning(), conditioning(), 1.0).result
    with torch.inference_mode():
        output = SamplerCustomAdvanced.execute(
            noise, guider, sampler, SIGMAS, {"samples": torch.zeros(1, 16, 8, 8)}
        ).result[0]
    assert torch.equal(output["samples"], sample(sampler, SIGMAS))


def test_guidance_and_masks_act_as_with_euler(sample, merged) -> None:
    latent = {"samples": torch.ones(1, 16, 8, 8), "noise_mask": torch.ones(1, 1, 64, 64)}
    latent["noise_mask"][..., :32] = 0
    ours = sample(merged(index=-1), SIGMAS, latent=latent, cfg=3.0)
    assert torch.equal(ours, sample(euler(), SIGMAS, latent=latent, cfg=3.0))
    random = sample(merged(index=1, merge=1), SIGMAS, latent=latent, cfg=3.0)
    assert torch.allclose(random[..., :4], latent["samples"][..., :4], atol=1e-5)
    assert not torch.allclose(random[..., 4:], ours[..., 4:], atol=0.01)


def test_eta_zero_is_euler_on_the_sigmas_without_the_merged_ones(sample, merged) -> None:
    ours = sample(merged(index=1, merge=2, eta=0.0), SIGMAS)
    assert torch.allclose(ours, sample(euler(), SIGMAS[[0, 1, 3, 4, 5, 6]]), atol=1e-6)


def test_the_seed_alone_decides_the_random_step(sample, merged) -> None:
    first, again, other = (sample(merged(index=1, merge=2, seed=seed), SIGMAS) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.1


@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
def test_the_random_step_is_egrpos_transition(pack_module, flux, kernel) -> None:
    """On a model whose velocity is known: x_0 = 0.5 x gives v = 0.5 x / sigma."""
    import types

    sampler = pack_module("nodes.sampler")
    x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))

    class Model:
        inner_model = types.SimpleNamespace(model_patcher=flux)

        def __call__(self, x, sigma):
            return 0.5 * x

    two_steps = SIGMAS[[0, 2, 4]]
    out = sampler.sample_merged_step(Model(), x, two_steps, index=0, merge=1, kernel=kernel, seed=5, disable=True)
    mean, std = transition(x, 0.5 * x, two_steps, 0, 1, 0.7, kernel)
    noise = sampler.seeded_noise(x, 5)
    middle = mean + std * noise
    expected = middle + (float(two_steps[2]) - float(two_steps[1])) * 0.5 * middle / float(two_steps[1])
    assert torch.allclose(out, expected, atol=1e-5)


def test_noise_differs_between_images_and_not_with_the_batch_size(pack_module) -> None:
    noise = pack_module("nodes.sampler").seeded_noise
    three = noise(torch.zeros(3, 16, 5, 3), 1)
    assert not torch.equal(three[0], three[1])
    assert torch.equal(three[:2], noise(torch.zeros(2, 16, 5, 3), 1))


def test_a_merged_step_saves_evaluations_and_progress_still_ends(pack_module, flux) -> None:
    import types

    calls, progress = [], []

    class Model:
        inner_model = types.SimpleNamespace(model_patcher=flux)

        def __call__(self, x, sigma):
            calls.append(float(sigma))
            return x

    x = torch.ones(1, 16, 2, 2)
    run = pack_module("nodes.sampler").sample_merged_step
    run(Model(), x, SIGMAS, callback=lambda info: progress.append(info["i"]), index=3, merge=3, eta=0.1, disable=True)
    assert calls == SIGMAS[:4].tolist()
    assert progress == [0, 1, 2, 5]


def test_merge_zero_is_the_plans_adaptive_merge(pack_module) -> None:
    chosen_merge = pack_module("nodes.sampler").chosen_merge
    sigmas = flow_sigmas(16).tolist()
    for step in plan_steps(sigmas).steps:
        assert chosen_merge(sigmas, step.index, 0, 0.7, 2.2, "flow_sde", False) == step.merge


@pytest.mark.parametrize(
    "given, message",
    [
        ({"index": 6}, "index is 6, but the sigmas have 6 steps"),
        ({"index": 4, "merge": 3}, "step 4 merged over 3 passes the end of 6 steps"),
        ({"index": 0, "merge": 5}, "step 0 merged over 5 flips the latent"),
        ({"index": 5, "tau": 20.0}, "below tau 20"),
        ({"index": 1, "merge": 1, "eta": 3.0, "kernel": "cps"}, "eta is 3.0, but the cps kernel takes 0"),
    ],
)
def test_bad_steps_say_what_is_wrong(sample, merged, given, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sample(merged(**given), SIGMAS)


def test_bad_sigmas_say_what_is_wrong(sample, merged) -> None:
    with pytest.raises(ValueError, match="must strictly decrease"):
        sample(merged(index=0, merge=1), torch.tensor([1.0, 1.0, 0.0]))


@pytest.mark.parametrize("kind", ["eps", "v_prediction"])
def test_other_models_are_refused_by_name(sample, merged, flux, kind) -> None:
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete

    (other,) = ModelSamplingDiscrete().patch(flux, kind, False)
    with pytest.raises(ValueError, match=f"Flux is not a rectified-flow model .*{kind.upper()}"):
        sample(merged(index=0, merge=1), SIGMAS, model=other)


def test_shifted_flux_is_accepted(sample, merged, flux) -> None:
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    (shifted,) = ModelSamplingFlux().patch(flux, 1.15, 0.5, 512, 512)
    assert torch.equal(sample(merged(index=-1), SIGMAS, model=shifted), sample(euler(), SIGMAS, model=shifted))


# In a server


def graph(**plan) -> dict:
    """Demo models and a plan, then sampling with the plan's sigmas."""
    defaults = {
        "steps": 4, "shift": 3.0, "eta": 0.7, "tau_mode": "fixed", "tau": 2.2, "tau_quantile": 0.75, "target_groups": 4,
        "active_steps": "first_half", "custom_steps": "", "merging": "none", "explicit_merges": "",
        "grouping": "overlapping", "kernel": "flow_sde", "entropy_unit": "exp", "unreachable": "exclude",
        "allow_flip": False, "group_size": 8,
    }  # fmt: skip
    sampler = {"index": 0, "merge": 1, "eta": 0.7, "tau": 2.2, "kernel": "flow_sde", "seed": 1, "allow_flip": False}
    sampling = {
        "model": ["1", 0], "add_noise": True, "noise_seed": 0, "cfg": 1.0, "positive": ["2", 0], "negative": ["2", 0],
        "sampler": ["4", 0], "sigmas": ["5", 1], "latent_image": ["3", 0],
    }  # fmt: skip
    return {
        "1": {"class_type": "EGRPODemoModels", "inputs": {"checkpoint": "clean"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"text": "a red circle", "clip": ["1", 1]}},
        "3": {"class_type": "EmptySD3LatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 2}},
        "4": {"class_type": "EGRPOMergedStepSampler", "inputs": sampler},
        "5": {"class_type": "EGRPOPlan", "inputs": {**defaults, **plan}},
        "6": {"class_type": "SamplerCustom", "inputs": sampling},
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["1", 2]}},
        "8": {"class_type": "PreviewImage", "inputs": {"images": ["7", 0]}},
    }


def test_a_server_samples_with_plan_and_sampler(server) -> None:
    outputs = server.run(graph())
    assert len(outputs["8"]["images"]) == 2
    assert "2 active" in outputs["5"]["text"][0] and outputs["5"]["images"]


def test_a_server_reports_a_bad_plan_before_it_loads_a_model(server) -> None:
    started = []

    def note(kind: str, data: dict) -> None:
        if kind == "executing" and data.get("node"):
            started.append(data["node"])

    with pytest.raises(ComfyError, match="step 0 merged over 4 flips the latent"):
        server.run(graph(merging="fixed_4", active_steps="custom", custom_steps="0"), note)
    assert started == ["5"]


def test_a_server_refuses_bad_text_and_bad_numbers_unqueued(server) -> None:
    with pytest.raises(ComfyError, match="'x' is neither a choice"):
        server.queue(graph(custom_steps="x"))
    with pytest.raises(ComfyError, match="steps"):
        server.queue(graph(steps=0))
