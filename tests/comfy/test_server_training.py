"""The whole loop in a real server, over HTTP and its websocket: training, what it leaves, and how it fails."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.conftest import COMFYUI
from tools.comfyui import ComfyServer

API = Path(__file__).resolve().parents[1] / "api"
TEST_NODES = Path(__file__).with_name("server_nodes") / "egrpo_test_nodes.py"
DEMO_TRAIN = json.loads((API / "demo_train.json").read_text(encoding="utf-8"))
MODELS, PROMPTS, REWARD, PLAN, TRAIN, BEFORE_AFTER, CURVES, REPORT = "1", "2", "3", "4", "5", "7", "8", "9"
GROUP_SIZE, ACTIVE = 4, 2
ROLLOUT_IMAGES = 1 + ACTIVE * GROUP_SIZE
SHORT = {
    "iterations": 2, "prompts_per_iteration": 1, "group_size": GROUP_SIZE, "eval_every": 0, "eval_samples": 1,
    "checkpoint_every": 1, "micro_batch": 4, "update_every": 0,
}  # fmt: skip
BLUE = {"kind": "target_colour", "colour": "#2060e0", "target": 0.5, "weight": 1.0}
"""A reward that takes no time, in place of the demo's CLIP."""
SHORT_PLAN = {"steps": 6, "active_steps": "custom", "custom_steps": "0, 2", "group_size": GROUP_SIZE}
STEP_SECONDS = 10
"""Far more than one micro-step takes, far less than the rest of the run that is cancelled."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """As the session's server, with the nodes of ``server_nodes`` as well."""
    with ComfyServer(
        COMFYUI,
        base=tmp_path_factory.mktemp("training"),
        cpu=True,
        packs=[TEST_NODES],
        environment={"OMP_NUM_THREADS": "1"},
    ) as running:
        yield running


def node(kind: str, **inputs: Any) -> dict:
    return {"class_type": kind, "inputs": inputs}


def training(name: str, plan: dict | None = None, **changes: Any) -> dict:
    """The demo workflow, shortened, with a reward that takes no time."""
    prompt = copy.deepcopy(DEMO_TRAIN)
    prompt[REWARD] = {"class_type": "EGRPOReward", "inputs": dict(BLUE)}
    prompt[PROMPTS]["inputs"].update(held_out=1)
    prompt[PLAN]["inputs"].update(SHORT_PLAN, **(plan or {}))
    prompt[TRAIN]["inputs"].update(SHORT, name=name, **changes)
    return prompt


def sampling(model: list, mark: str) -> dict:
    """A latent of ``model`` by ComfyUI's KSampler, and its hash; node ids end in ``mark``."""
    sampler = node(
        "KSampler", model=model, positive=["text" + mark, 0], negative=["text" + mark, 0], latent_image=["empty" + mark, 0],
        seed=7, steps=4, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0,
    )  # fmt: skip
    return {
        "text" + mark: node("CLIPTextEncode", text="a red circle on a white background", clip=[MODELS, 1]),
        "empty" + mark: node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "sample" + mark: sampler,
        "hash" + mark: node("EGRPOTestLatentHash", latent=["sample" + mark, 0]),
    }


def inspection(mark: str, after: list | None = None) -> dict:
    """Facts of the demo MODEL as it lies there, the hash of a latent from it, and its facts again after that.

    All are computed afresh for every ``mark``. A clone with a LoRA may lie on the model at first; sampling puts the MODEL
    itself there.
    """
    when = {} if after is None else {"after": after}
    return {
        MODELS: node("EGRPODemoModels", checkpoint="rl_base"),
        "found" + mark: node("EGRPOTestModelFacts", model=[MODELS, 0], note=mark, **when),
        "model" + mark: node("EGRPOTestAfter", model=[MODELS, 0], note=mark, after=["found" + mark, 0]),
        **sampling(["model" + mark, 0], mark),
        "used" + mark: node("EGRPOTestModelFacts", model=[MODELS, 0], note=mark, after=["hash" + mark, 0]),
    }


@dataclass
class Inspected:
    """What :func:`inspection` has found out."""

    latent: str
    found: dict
    used: dict

    @classmethod
    def of(cls, outputs: dict, mark: str) -> Inspected:
        found, used = (json.loads(outputs[name + mark]["text"][0]) for name in ("found", "used"))
        return cls(outputs["hash" + mark]["text"][0], found, used)


def inspect(server: ComfyServer, mark: str) -> Inspected:
    return Inspected.of(server.run(inspection(mark), timeout=120), mark)


def assert_untouched(before: Inspected, after: Inspected) -> None:
    """The MODEL object that was given to training, still in the server's cache, is as it was."""
    assert after.found["object"] == before.used["object"], "not the same MODEL, so the comparison would prove nothing"
    assert after.found == after.used == before.used
    assert after.latent == before.latent
    leftovers = (
        "wrapped forwards",
        "hooks",
        "parameters with gradient",
        "injections",
        "in training",
        "attached elsewhere",
    )
    assert not any(after.found[name] for name in leftovers), after.found


@dataclass
class Ended:
    """A prompt that did not succeed."""

    entry: dict

    @property
    def message(self) -> dict:
        """The data of the message that ended it."""
        return self.entry["status"]["messages"][-1][1]

    @property
    def kind(self) -> str:
        return self.entry["status"]["messages"][-1][0]


def run_to_failure(server: ComfyServer, prompt: dict) -> Ended:
    ended = Ended(server.wait(server.queue(prompt), timeout=120))
    assert ended.entry["status"]["status_str"] == "error"
    return ended


def runs(server: ComfyServer, name: str) -> list[Path]:
    return sorted((server.output / "egrpo").glob(f"{name}_*"))


def lora_file(server: ComfyServer, run: Path) -> Path:
    return server.base / "models" / "loras" / f"{run.name}.safetensors"


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_state_kept(server: ComfyServer, run: Path, iteration: int) -> None:
    """A checkpoint of ``iteration`` and the LoRA, in the run and where ComfyUI looks for it."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert int(newest.name) == iteration
    assert json.loads((newest / "state.json").read_text(encoding="utf-8"))["iteration"] == iteration
    assert load_file(newest / "state.safetensors")
    assert load_file(run / "lora.safetensors")
    assert load_file(lora_file(server, run))
    assert not list(run.rglob("*.partial"))


# Success


@dataclass
class Trained:
    """What one prompt gave that samples, trains, samples again, and uses the LoRA."""

    outputs: dict
    run: Path
    lora: Path


@pytest.fixture(scope="module")
def trained(server) -> Trained:
    """Sampling, then training on the same MODEL, then sampling again, within one prompt."""
    prompt = training("whole")
    prompt |= inspection("-a") | inspection("-b", after=[TRAIN, 4])
    prompt["earlier"] = node("EGRPOTestAfter", model=[MODELS, 0], note="", after=["used-a", 0])
    prompt[TRAIN]["inputs"]["model"] = ["earlier", 0]
    prompt["with-lora"] = node(
        "LoraModelLoader", model=["model-b", 0], lora=[TRAIN, 0], strength_model=1.0, bypass=False
    )
    prompt |= sampling(["with-lora", 0], "-c")
    prompt["save"] = node("SaveLoRA", lora=[TRAIN, 0], prefix="loras/built_in", steps=2)
    prompt["loss"] = node("LossGraphNode", loss=[TRAIN, 1], filename_prefix="loss")
    outputs = server.run(prompt, timeout=240)
    (run,) = runs(server, "whole")
    return Trained(outputs, run, lora_file(server, run))


def test_the_demo_workflow_trains_and_leaves_its_results(server, trained) -> None:
    for kept in (BEFORE_AFTER, CURVES):
        (image,) = trained.outputs[kept]["images"]
        assert (server.output / image["subfolder"] / image["filename"]).stat().st_size > 1000
    report = trained.outputs[REPORT]["text"][0]
    assert trained.lora.name in report and str(trained.run) in report
    assert (trained.run / "report.txt").read_text(encoding="utf-8") == report
    rows = metrics(trained.run)
    assert [row["iteration"] for row in rows if "reward" in row] == [1, 2]
    assert [row["iteration"] for row in rows if "eval_reward" in row] == [0, 2]
    assert_state_kept(server, trained.run, 2)
    with safe_open(trained.lora, "pt") as file:
        assert json.loads(file.metadata()["egrpo.settings"])["group_size"] == GROUP_SIZE
        assert file.metadata()["iterations"] == "2"


def test_progress_moves_within_an_iteration(server) -> None:
    seen = []
    prompt = training("progress", iterations=1, group_size=24, micro_batch=1)
    server.run(prompt, lambda kind, data: seen.append((kind, data)), timeout=120)
    values = [data["value"] for kind, data in seen if kind == "progress" and data.get("node") == TRAIN]
    assert values == sorted(values) and values[-1] == 1000
    assert any(0 < value < 1000 for value in values)


def test_the_model_samples_bit_for_bit_as_before_training(trained) -> None:
    before, after = (Inspected.of(trained.outputs, mark) for mark in ("-a", "-b"))
    assert_untouched(before, after)
    with_lora = trained.outputs["hash-c"]["text"][0]
    assert with_lora != before.latent, "LoraModelLoader with the trained LoRA changes nothing"


def test_load_lora_finds_the_file_and_uses_every_key(server, trained) -> None:
    start = len(server.log())
    prompt = {
        MODELS: node("EGRPODemoModels", checkpoint="rl_base"),
        "lora": node("LoraLoaderModelOnly", model=[MODELS, 0], lora_name=trained.lora.name, strength_model=1.0),
        **sampling(["lora", 0], "-file"),
    }
    outputs = server.run(prompt, timeout=120)
    assert "lora key not loaded" not in server.log()[start:]
    assert outputs["hash-file"]["text"][0] != trained.outputs["hash-a"]["text"][0]


def test_save_lora_writes_what_training_saved(server, trained) -> None:
    """ComfyUI's SaveLoRA gets the same matrices in ComfyUI's own naming: fused where diffusers has them split."""
    (file,) = (server.output / "loras").glob("built_in*.safetensors")
    built_in, ours = load_file(file), load_file(trained.lora)
    assert built_in.keys() != ours.keys()

    def size(state: dict) -> float:
        ups = [key for key in state if key.endswith(("lora_up.weight", "lora_B.weight"))]
        return sum(state[key].double().square().sum().item() for key in ups)

    assert size(built_in) == pytest.approx(size(ours), rel=1e-6) and size(ours) > 0
    (graph,) = trained.outputs["loss"]["images"]
    assert graph["filename"]


def test_the_saved_lora_gives_equal_velocities_in_diffusers(trained, pack_module) -> None:
    """peft's own loading in diffusers against ComfyUI's LoraLoader, on the demo FLUX."""
    import comfy.sd

    from egrpo.backends import demo
    from egrpo.backends.diffusers_flux import image_ids, pack_latents, unpack_latents

    with torch.inference_mode():
        model, clip, _ = pack_module("nodes.demo").EGRPODemoModels.execute().result
        # Stronger than two iterations make it, so that a wrong factor could not hide below the tolerance.
        state = {key: 20 * value if "lora_B" in key else value for key, value in load_file(trained.lora).items()}
        patched, _ = comfy.sd.load_lora_for_models(model, None, dict(state), 1.0, 0.0)
        x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))

        def in_comfyui(model) -> torch.Tensor:
            policy = pack_module("nodes.comfy_policy").ComfyPolicy(model, clip, None, width=64, height=64, rank=1)
            with policy:
                condition = policy.encode(["a blue star"])[0]
                return policy.rollout(condition, lambda velocity: velocity(x, 0.8), base=True)

        plain, ours = in_comfyui(model), in_comfyui(patched)

    files = demo.demo_files()
    transformer = demo.load_transformer(files.flux)
    transformer.load_lora_adapter(state, prefix="transformer")
    assert transformer.peft_config
    with torch.no_grad():
        sequence, pooled = demo.encode_text(demo.load_text_encoder(files.text_encoder), "a blue star")
        theirs = transformer(
            hidden_states=pack_latents(x),
            encoder_hidden_states=sequence.expand(2, -1, -1),
            pooled_projections=pooled.expand(2, -1),
            timestep=torch.full((2,), 0.8),
            guidance=torch.full((2,), 3.5),
            img_ids=image_ids(8, 8, torch.device("cpu")),
            txt_ids=torch.zeros(sequence.shape[1], 3),
        ).sample
    theirs = unpack_latents(theirs, 8, 8)
    assert (ours - plain).abs().max() > 0.01
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


# Cancel, exceptions, out of memory


def test_cancel_stops_within_a_micro_step_saves_and_leaves_nothing(server, record_property) -> None:
    before = inspect(server, "before cancel")
    prompt = training("cancelled", iterations=60)  # few enough for the bar to move within an iteration
    prompt_id = server.queue(prompt)
    progress: list[float] = []
    interrupted_at: list[tuple[float, int]] = []

    def watch(kind: str, data: dict) -> None:
        if kind != "progress" or data.get("node") != TRAIN:
            return
        progress.append(data["value"])
        # In the middle of an iteration's rollouts, when at least one iteration has been trained.
        if data["value"] > 1000 and data["value"] % 1000 and not interrupted_at:
            interrupted_at.append((time.monotonic(), len(progress)))
            server.interrupt()

    entry = server.wait(prompt_id, watch, timeout=120)
    seconds = time.monotonic() - interrupted_at[0][0]
    record_property("seconds from cancel to the end", round(seconds, 3))
    assert Ended(entry).kind == "execution_interrupted"
    assert seconds < STEP_SECONDS
    (run,) = runs(server, "cancelled")
    trained = sum("reward" in row for row in metrics(run))
    assert 1 <= trained < 50
    assert_state_kept(server, run, trained)
    assert_untouched(before, inspect(server, "after cancel"))


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_a_failing_reward_is_named_and_the_run_kept(server, fault) -> None:
    before = inspect(server, f"before {fault}")
    prompt = training(f"reward {fault}", iterations=5)
    prompt["faulty"] = node("EGRPOTestFaultyReward", reward=[REWARD, 0], fault=fault, at=2, images=ROLLOUT_IMAGES)
    prompt[TRAIN]["inputs"]["reward"] = ["faulty", 0]
    ended = run_to_failure(server, prompt)
    message = ended.message["exception_message"]
    assert ended.message["node_id"] == TRAIN and "'faulty'" in message
    assert "for prompt 'a" in message, message
    assert ("returned nan" if fault == "nan" else "RuntimeError: failed on purpose") in message
    (run,) = runs(server, f"reward {fault}")
    assert sum("reward" in row for row in metrics(run)) == 1
    assert_state_kept(server, run, 1)
    assert_untouched(before, inspect(server, f"after {fault}"))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_in_an_update_leaves_nothing(server, where) -> None:
    """In the second active step of the second iteration's update: with gradients, adapters and hooks in use."""
    before = inspect(server, f"before {where}")
    prompt = training(f"memory {where}", iterations=5)
    prompt["failing"] = node("EGRPOTestOutOfMemory", model=[MODELS, 0], where=where, at=2 * ACTIVE)
    prompt[TRAIN]["inputs"]["model"] = ["failing", 0]
    ended = run_to_failure(server, prompt)
    assert ended.message["node_id"] == TRAIN
    assert ended.message["exception_type"].endswith("OutOfMemoryError")
    assert "on purpose" in ended.message["exception_message"]
    (run,) = runs(server, f"memory {where}")
    assert sum("reward" in row for row in metrics(run)) == 1
    assert_state_kept(server, run, 1)
    assert_untouched(before, inspect(server, f"after {where}"))


# Bad input


def with_epsilon_model(prompt: dict) -> None:
    prompt["epsilon"] = node("ModelSamplingDiscrete", model=[MODELS, 0], sampling="eps", zsnr=False)
    prompt[TRAIN]["inputs"]["model"] = ["epsilon", 0]


def with_rising_sigmas(prompt: dict) -> None:
    prompt["sigmas"] = node("ManualSigmas", sigmas="1.0, 0.6, 0.8, 0.0")
    prompt[PLAN]["inputs"]["sigmas"] = ["sigmas", 0]


def changed(node_id: str, **inputs: Any):
    return lambda prompt: prompt[node_id]["inputs"].update(inputs)


BAD_INPUT = {
    "empty prompts": (changed(PROMPTS, text=" \n "), PROMPTS, "no prompts in text"),
    "sigmas not decreasing": (with_rising_sigmas, PLAN, "must strictly decrease"),
    "a merge that flips the latent": (
        changed(PLAN, steps=16, custom_steps="0", merging="fixed_4"), PLAN, "step 0 merged over 4 flips the latent",
    ),
    "a merge that passes the end": (
        changed(PLAN, merging="explicit", explicit_merges="5:4"), PLAN, "step 5 merged over 4 passes the end",
    ),
    "40 x 64 pixels": (changed(TRAIN, width=40), TRAIN, "width is 40; it must be a multiple of 16"),
    "unknown targets": (changed(TRAIN, targets="no_such_layer"), TRAIN, "'no_such_layer' matches no Linear"),
    "epsilon model": (with_epsilon_model, TRAIN, "not a rectified-flow model"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_explained_before_a_model_is_loaded(server, case) -> None:
    """Loaders may have run, but no model has been put to use and no run begun."""
    change, where, message = BAD_INPUT[case]
    prompt = training("bad input")
    change(prompt)
    start = len(server.log())
    ended = run_to_failure(server, prompt)
    assert ended.message["node_id"] == where
    assert message in ended.message["exception_message"]
    assert "Requested to load" not in server.log()[start:]
    assert not runs(server, "bad input")


@pytest.mark.parametrize(
    "node_id, inputs, message",
    [
        (PROMPTS, {"file": "missing.txt"}, "missing.txt"),
        (TRAIN, {"group_size": 1}, "group_size"),
        (TRAIN, {"rank": 0}, "rank"),
        (TRAIN, {"start_from": "missing.safetensors"}, "missing.safetensors"),
        (REWARD, {"colour": "blue"}, "colour 'blue' is not of the form #RRGGBB"),
        (PLAN, {"custom_steps": "x"}, "'x' is neither a choice"),
    ],
    ids=["missing prompt file", "group of one", "rank 0", "missing LoRA", "unknown colour", "unreadable steps"],
)
def test_what_can_be_seen_beforehand_is_refused_unqueued(server, node_id, inputs, message) -> None:
    """ComfyUI still runs the output nodes that are valid; training, which needs all of them, does not begin."""
    prompt = training("bad input")
    prompt[node_id]["inputs"].update(inputs)
    answer = server.post("/prompt", {"prompt": prompt, "client_id": server.client_id})
    problem = answer["node_errors"][node_id]
    assert message in json.dumps(problem["errors"])
    assert TRAIN in problem["dependent_outputs"]
    entry = server.wait(answer["prompt_id"], timeout=60)
    assert MODELS not in entry["outputs"] and TRAIN not in entry["outputs"]
    assert not runs(server, "bad input")
