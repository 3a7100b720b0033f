"""The demo family is one family: ComfyUI's FLUX, CLIP and VAE give what diffusers and transformers give."""

from __future__ import annotations

import pytest
import torch

from egrpo.backends import demo
from egrpo.backends.diffusers_flux import DiffusersFluxPolicy

PROMPTS = (
    "a large red circle and a small blue square on a green background",
    "",
    "Zebra, star!",
    "red circle and blue square and green star and yellow ring and white triangle and black circle on a gray background",
)


@pytest.fixture(scope="module")
def loaded(pack_module):
    """(MODEL, CLIP, VAE) as the node gives them, loaded in inference mode."""
    with torch.inference_mode():
        return pack_module("nodes.demo").EGRPODemoModels.execute(demo.CLEAN).result


@pytest.fixture(scope="module")
def headless() -> DiffusersFluxPolicy:
    return DiffusersFluxPolicy.from_demo(checkpoint=demo.CLEAN, device="cpu")


@pytest.fixture(scope="module")
def comfy_policy(loaded, pack_module):
    model, clip, vae = loaded
    with pack_module("nodes.comfy_policy").ComfyPolicy(model, clip, vae, width=64, height=64, rank=4) as policy:
        yield policy


def noise(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 16, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_clip_text_encode_equals_transformers(loaded, headless, prompt: str) -> None:
    import nodes

    with torch.inference_mode():
        ((sequence, values),) = nodes.CLIPTextEncode().encode(loaded[1], prompt)[0]
    (condition,) = headless.encode([prompt])
    assert sequence.shape == condition.sequence.shape
    assert torch.allclose(sequence, condition.sequence, atol=1e-4)
    assert torch.allclose(values["pooled_output"], condition.pooled, atol=1e-4)


def test_clip_text_encode_flux_and_weights_work(loaded) -> None:
    from comfy_extras.nodes_flux import CLIPTextEncodeFlux

    with torch.inference_mode():
        ((plain, _),) = CLIPTextEncodeFlux.execute(loaded[1], "a red circle", "a red circle", 3.5).result[0]
        ((weighted, values),) = CLIPTextEncodeFlux.execute(
            loaded[1].clone(), "a star", "a (red:1.4) circle", 2.0
        ).result[0]
    assert plain.shape == weighted.shape and not torch.allclose(plain, weighted)
    assert values["guidance"] == 2.0


@pytest.mark.parametrize("sigma", [1.0, 0.8, 0.2])
def test_velocity_equals_diffusers(comfy_policy, headless, sigma: float) -> None:
    def at_sigma(velocity):
        return velocity(noise(), sigma)

    with torch.inference_mode():
        ours = comfy_policy.rollout(comfy_policy.encode(PROMPTS[:1])[0], at_sigma)
    theirs = headless.rollout(headless.encode(PROMPTS[:1])[0], at_sigma)
    assert theirs.std() > 0.4
    assert (ours - theirs).abs().max() < 1e-5


def test_decoded_images_equal_diffusers(comfy_policy, headless) -> None:
    with torch.inference_mode():
        ours = comfy_policy.decode(noise())
    theirs = headless.decode(noise())
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1 / 255


def test_vae_encode_gives_model_space_latents(loaded) -> None:
    """The scale and shift in the file undo FLUX's latent format."""
    import comfy.latent_formats

    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        latent = comfy.latent_formats.Flux().process_in(loaded[2].encode(image).float())
    theirs = demo.load_vae(demo.demo_paths().vae).encode(image.movedim(-1, 1) * 2 - 1).latents
    assert torch.allclose(latent, theirs, atol=1e-5)


def test_the_exported_lora_of_the_headless_policy_loads_in_comfyui(loaded, pack_module) -> None:
    """Every key finds its module, and the patched MODEL has the trained policy's velocity."""
    import comfy.sd

    trained = DiffusersFluxPolicy.from_demo(checkpoint=demo.CLEAN, alpha=8, targets="all", device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    with torch.inference_mode():
        model, _ = comfy.sd.load_lora_for_models(loaded[0], None, trained.export_lora(), 1.0, 0.0)
        with pack_module("nodes.comfy_policy").ComfyPolicy(
            model, loaded[1], None, width=64, height=64, rank=1
        ) as policy:
            condition = policy.encode(PROMPTS[:1])[0]
            ours = policy.rollout(condition, lambda velocity: velocity(noise(1), 0.8))
    (condition,) = trained.encode(PROMPTS[:1])
    theirs = trained.rollout(condition, lambda velocity: velocity(noise(1), 0.8))
    base = trained.rollout(condition, lambda velocity: velocity(noise(1), 0.8), base=True)
    assert (theirs - base).abs().max() > 0.05
    assert (ours - theirs).abs().max() < 2e-5


def test_standard_loaders_list_the_files(pack_module, monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    import folder_paths

    monkeypatch.setattr(folder_paths, "folder_names_and_paths", copy.deepcopy(folder_paths.folder_names_and_paths))
    pack_module("nodes.demo").register_demo_folder()
    listed = {kind: folder_paths.get_filename_list(kind) for kind in ("diffusion_models", "vae")}
    assert set(demo.CHECKPOINTS.values()) <= set(listed["diffusion_models"])
    assert "egrpo_demo_vae.safetensors" in listed["vae"]
    assert "egrpo_demo_vae.safetensors" not in listed["diffusion_models"]


def test_the_same_picture_from_comfyui_and_diffusers(comfy_policy, headless) -> None:
    """Same file, prompt and noise, 16 Euler steps: the decoded pictures agree to one 8-bit step."""
    from egrpo.rollout import sample_anchor
    from egrpo.schedule import flow_sigmas, plan_steps

    plan = plan_steps(flow_sigmas(16))
    prompt, start = demo.HELD_OUT_PROMPTS[0], noise(1)

    def picture(policy):
        (condition,) = policy.encode([prompt])
        return policy.decode(policy.rollout(condition, lambda velocity: sample_anchor(velocity, plan, start)[0]))

    with torch.inference_mode():
        ours = picture(comfy_policy)
    assert (ours - picture(headless)).abs().max() < 1 / 255
