"""The trained demo family: intact files, pictures that follow their prompts, a base with headroom, a reward that sees."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from egrpo.backends import demo, oracle, shapes
from egrpo.backends.diffusers_flux import DiffusersFluxPolicy
from egrpo.evaluation import evaluate_policy
from egrpo.rewards import RewardError, RewardSet, RewardTerm
from egrpo.rewards.demo import DemoClip, DemoOracle, demo_reward_set, judged
from egrpo.schedule import flow_sigmas, plan_steps

MEGABYTES = 28


@pytest.fixture(scope="module")
def files() -> demo.DemoFiles:
    return demo.demo_files()


@pytest.fixture(scope="module")
def encoder(files: demo.DemoFiles) -> demo.DemoTextEncoder:
    return demo.load_text_encoder(files.text_encoder)


# --- files


def test_the_family_is_small() -> None:
    assert sum(path.stat().st_size for path in demo.demo_folder().rglob("*.safetensors")) <= MEGABYTES * 1e6


@pytest.fixture
def copied(files: demo.DemoFiles, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo.demo_folder(), tmp_path / "demo"))


def test_a_damaged_file_is_named(copied: Path) -> None:
    path = demo.demo_paths(copied).vae
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(demo.DemoError, match=f"{path.name}.*damaged"):
        demo.demo_files(copied)


def test_a_missing_file_is_named(copied: Path) -> None:
    demo.demo_paths(copied).clip.unlink()
    with pytest.raises(demo.DemoError, match="egrpo_demo_clip.safetensors.*missing"):
        demo.demo_files(copied)


def test_a_folder_without_the_family_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(demo.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(demo.DemoError, match=demo.FOLDER_VARIABLE):
        demo.demo_files()


def test_an_unknown_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown demo checkpoint 'best': choose one of rl_base, clean"):
        demo.demo_files(checkpoint="best")


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other.safetensors is not a file of the demo family"):
        demo.load_transformer(tmp_path / "other.safetensors")


def test_held_out_prompts_show_what_training_does_not() -> None:
    assert not any(shapes.is_held_out(shapes.parse_caption(prompt)) for prompt in demo.TRAIN_PROMPTS)
    assert all(shapes.is_held_out(shapes.parse_caption(prompt)) for prompt in demo.HELD_OUT_PROMPTS)


# --- pictures


def facts(checkpoint: str) -> dict[str, float]:
    """The oracle's summary of 16-step pictures of the held-out prompts."""
    policy = DiffusersFluxPolicy.from_demo(checkpoint=checkpoint, device="cpu")
    prompts = list(demo.HELD_OUT_PROMPTS)
    plan = plan_steps(flow_sigmas(16))
    rewards = RewardSet((RewardTerm(DemoOracle()),))
    evaluation = evaluate_policy(policy, rewards, prompts, policy.encode(prompts), plan, samples=3, micro_batch=3)
    return oracle.summary(judged(evaluation.images, [prompt for prompt in prompts for _ in range(3)]))


def test_the_clean_model_follows_held_out_prompts_and_the_base_has_headroom() -> None:
    clean, base = facts(demo.CLEAN), facts(demo.RL_BASE)
    assert clean["right"] >= 0.6
    assert base["fraction"] < clean["fraction"] - 0.2
    assert 0.3 < base["fraction"] < 0.8


def test_pictures_survive_the_vae(files: demo.DemoFiles) -> None:
    vae = demo.load_vae(files.vae)
    scenes = shapes.sample_scenes(48, seed=5)
    images = shapes.render(scenes, torch.Generator().manual_seed(0), demo.PIXELS)
    with torch.no_grad():
        again = vae.decode(vae.encode(images * 2 - 1).latents).sample / 2 + 0.5
    assert (images - again).square().mean().sqrt() < 0.05
    assert oracle.summary(oracle.judge(again, scenes))["right"] >= 0.85


# --- reward


@pytest.mark.parametrize("kind", shapes.CONTRASTS)
def test_the_clip_prefers_the_right_picture(kind: str) -> None:
    rng, generator, pairs = random.Random(11), torch.Generator().manual_seed(11), []
    while len(pairs) < 64:
        scene = shapes.sample_scene(rng, held_out=len(pairs) % 2 == 0)
        other = shapes.contrast_scene(scene, kind, rng)
        if other is not None:
            pairs.append((scene, other))
    prompts = [shapes.caption(scene) for scene, _ in pairs]
    right, wrong = (
        DemoClip().score(shapes.render(scenes, generator, demo.PIXELS).movedim(1, -1), prompts)
        for scenes in (list(side) for side in zip(*pairs))
    )
    assert (right > wrong).float().mean() >= 0.9


@pytest.mark.parametrize("damage", shapes.DAMAGES)
def test_the_clip_prefers_clean_shapes(damage: str) -> None:
    scenes = shapes.sample_scenes(64, seed=12)
    generator = torch.Generator().manual_seed(12)
    prompts = [shapes.caption(scene) for scene in scenes]
    clean = DemoClip().score(shapes.render(scenes, generator, demo.PIXELS).movedim(1, -1), prompts)
    damaged = DemoClip().score(shapes.render(scenes, generator, demo.PIXELS, damage=damage).movedim(1, -1), prompts)
    assert (clean > damaged).float().mean() >= 0.9


def test_the_oracle_refuses_prompts_that_it_cannot_read() -> None:
    with pytest.raises(RewardError, match="'a cat' is not a full caption"):
        demo_reward_set().score(torch.zeros(1, 64, 64, 3), ["a cat"])


def test_rewards_read_alpha_and_other_sizes() -> None:
    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    prompt = demo.TRAIN_PROMPTS[:1]
    with_alpha = torch.cat([image, torch.ones(1, 64, 64, 1)], dim=-1)
    clip = DemoClip()
    assert torch.equal(clip.score(image, prompt), clip.score(with_alpha, prompt))
    assert clip.score(torch.zeros(2, 128, 96, 3), prompt * 2).shape == (2,)


def test_the_clip_loads_in_the_form_of_hps_checkpoints(files: demo.DemoFiles, tmp_path: Path) -> None:
    """``{"state_dict": …}`` as HPSv2.1 is published, read by open_clip's own loader from a file."""
    import open_clip
    from safetensors.torch import load_file

    torch.save({"state_dict": load_file(files.clip)}, tmp_path / "hps.pt")
    config = demo.read_description(files.clip)["config"]
    (tmp_path / "demo_hps.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "demo_hps.json")
    model, _, _ = open_clip.create_model_and_transforms("demo_hps", pretrained=str(tmp_path / "hps.pt"))
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = model.eval().encode_image(image), DemoClip()._model[0].encode_image(image)
    assert torch.allclose(theirs, ours, atol=1e-6)


# --- text


@pytest.mark.parametrize(("prompt", "rows"), [("", 1), ("a red circle", 1), ("red " * 18, 1), ("red " * 19, 2)])
def test_text_shapes(encoder: demo.DemoTextEncoder, prompt: str, rows: int) -> None:
    sequence, pooled = demo.encode_text(encoder, prompt)
    assert sequence.shape == (1, 20 * rows, 128)
    assert pooled.shape == (1, 128)


def test_words_matter_and_case_and_commas_do_not(encoder: demo.DemoTextEncoder) -> None:
    red, same, blue = (
        demo.encode_text(encoder, text)[1] for text in ("a red circle", "A, Red circle!", "a blue circle")
    )
    assert torch.equal(red, same)
    assert (red - blue).abs().mean() > 0.01


def test_unknown_words_are_token_zero(encoder: demo.DemoTextEncoder) -> None:
    assert encoder.tokenizer.words("a zebra") == [encoder.tokenizer.vocabulary["a"], 0]


def test_dropping_empty_channels_changes_nothing(files: demo.DemoFiles) -> None:
    from diffusers import AutoencoderTiny
    from safetensors.torch import load_file

    stored = load_file(files.vae)
    full = AutoencoderTiny(latent_channels=16, scaling_factor=1.0, shift_factor=0.0)
    full.load_state_dict({key: stored[demo._comfy_vae_key(key)].float() for key in full.state_dict()})
    fast = demo.load_vae(files.vae)
    latents = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    image = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        assert torch.allclose(fast.decode(latents).sample, full.decode(latents).sample, atol=1e-4)
        assert torch.allclose(fast.encode(image).latents, full.encode(image).latents, atol=1e-4)
    sizes = [sum(p.numel() for p in vae.parameters()) for vae in (fast, full)]
    assert sizes[0] < sizes[1] / 4
