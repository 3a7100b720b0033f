"""The headless policy: one velocity for rollout and update, gradients into the LoRA only, an exact export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from egrpo.backends import demo
from egrpo.backends.diffusers_flux import (
    DiffusersFluxPolicy,
    FluxCondition,
    image_ids,
    lora_options,
    pack_latents,
    unpack_latents,
)
from egrpo.lora import LoraError

SIGMA = 0.9


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo.demo_folder()


def make_policy(folder: Path, **options) -> DiffusersFluxPolicy:
    """A policy whose LoRA does something, so that both of its matrices get gradients."""
    policy = DiffusersFluxPolicy.from_demo(folder=folder, device="cpu", **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy._lora.items():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def latents(batch: int = 2) -> Tensor:
    return torch.randn(batch, 16, 8, 8, generator=torch.Generator().manual_seed(1))


def rolled_out(policy: DiffusersFluxPolicy, x: Tensor, base: bool = False) -> Tensor:
    (condition,) = policy.encode(["a red circle"])
    return policy.rollout(condition, lambda velocity: velocity(x, SIGMA), base=base)


def updated(policy: DiffusersFluxPolicy, x: Tensor) -> Tensor:
    """The velocity in the update phase; its gradients are left in the parameters."""
    (condition,) = policy.encode(["a red circle"])

    def work(velocity, base_velocity):
        v = velocity(x, SIGMA)
        base = base_velocity(x, SIGMA)
        assert v.requires_grad and not base.requires_grad
        (v - base).square().mean().backward()
        return v.detach()

    return policy.update(condition, work)


@pytest.mark.parametrize("checkpoint_blocks", [False, True])
def test_rollout_and_update_agree_bit_for_bit(folder: Path, checkpoint_blocks: bool) -> None:
    policy = make_policy(folder, checkpoint_blocks=checkpoint_blocks)
    assert torch.equal(rolled_out(policy, latents()), updated(policy, latents()))


def test_checkpointing_changes_no_gradient(folder: Path) -> None:
    plain, checkpointed = make_policy(folder), make_policy(folder, checkpoint_blocks=True)
    for policy in (plain, checkpointed):
        updated(policy, latents())
    for a, b in zip(plain.parameters(), checkpointed.parameters()):
        assert torch.equal(a.grad, b.grad)


def test_every_lora_matrix_gets_a_gradient_and_nothing_else_does(folder: Path) -> None:
    policy = make_policy(folder)
    updated(policy, latents())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in policy.parameters())
    trained = {id(p) for p in policy.parameters()}
    assert all(p.grad is None for p in policy.model.parameters() if id(p) not in trained)


def test_gradients_match_finite_differences(folder: Path) -> None:
    policy = make_policy(folder, targets=r"^transformer_blocks\.0\.attn\.to_q$")
    updated(policy, latents())
    parameter = policy.parameters()[1]
    direction = parameter.grad / parameter.grad.norm()
    base = rolled_out(policy, latents(), base=True)

    def loss(step: float) -> float:
        with torch.no_grad():
            parameter.add_(step * direction)
            value = (rolled_out(policy, latents()).double() - base.double()).square().mean().item()
            parameter.sub_(step * direction)
        return value

    slope = (loss(0.02) - loss(-0.02)) / 0.04
    assert slope == pytest.approx(parameter.grad.norm().item(), rel=0.01)


def test_a_fresh_lora_changes_nothing_and_base_ignores_a_trained_one(folder: Path) -> None:
    fresh = DiffusersFluxPolicy.from_demo(folder=folder, device="cpu")
    trained = make_policy(folder)
    base = rolled_out(fresh, latents(), base=True)
    assert torch.equal(rolled_out(fresh, latents()), base)
    assert torch.equal(rolled_out(trained, latents(), base=True), base)
    assert (rolled_out(trained, latents()) - base).abs().max() > 0.01
    assert all(p.requires_grad for p in trained.parameters())


def test_a_condition_serves_any_batch(folder: Path) -> None:
    policy = make_policy(folder)
    together = rolled_out(policy, latents(3))
    assert torch.allclose(together[1:2], rolled_out(policy, latents(3)[1:2]), atol=1e-5)


def test_the_seed_decides_the_lora(folder: Path) -> None:
    torch.manual_seed(5)
    a = DiffusersFluxPolicy.from_demo(folder=folder, seed=1, device="cpu").state_dict()
    torch.manual_seed(6)
    b = DiffusersFluxPolicy.from_demo(folder=folder, seed=1, device="cpu").state_dict()
    c = DiffusersFluxPolicy.from_demo(folder=folder, seed=2, device="cpu").state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_state_restores_exactly_and_refuses_another_rank(folder: Path) -> None:
    policy, other = make_policy(folder), DiffusersFluxPolicy.from_demo(folder=folder, seed=9, device="cpu")
    other.load_state_dict(policy.state_dict())
    assert torch.equal(rolled_out(other, latents()), rolled_out(policy, latents()))
    with pytest.raises(ValueError, match="another rank"):
        DiffusersFluxPolicy.from_demo(rank=2, folder=folder, device="cpu").load_state_dict(policy.state_dict())


def test_the_export_gives_the_same_velocity_in_diffusers(folder: Path) -> None:
    """Loaded by diffusers' own loader, which knows no alpha: alpha / rank must be folded in."""
    policy = make_policy(folder, rank=4, alpha=10)
    exported = policy.export_lora()
    assert all(key.startswith("transformer.") and key.endswith((".lora_A.weight", ".lora_B.weight")) for key in exported)
    transformer = demo.load_transformer(demo.demo_paths(folder).flux)
    transformer.load_lora_adapter(exported, prefix="transformer")
    (condition,) = policy.encode(["a red circle"])
    with torch.no_grad():
        tokens = transformer(
            hidden_states=pack_latents(latents(1)),
            encoder_hidden_states=condition.sequence,
            pooled_projections=condition.pooled,
            timestep=torch.tensor([SIGMA]),
            guidance=torch.tensor([3.5]),
            img_ids=image_ids(8, 8, torch.device("cpu")),
            txt_ids=torch.zeros(20, 3),
            return_dict=False,
        )[0]
    assert torch.allclose(unpack_latents(tokens, 8, 8), rolled_out(policy, latents(1)), atol=1e-5)


def test_packing_is_the_pipelines(folder: Path) -> None:
    from diffusers import FluxPipeline

    x = torch.randn(2, 16, 8, 12)
    assert torch.equal(pack_latents(x), FluxPipeline._pack_latents(x, 2, 16, 8, 12))
    assert torch.equal(unpack_latents(pack_latents(x), 8, 12), x)
    ids = FluxPipeline._prepare_latent_image_ids(1, 4, 6, torch.device("cpu"), torch.float32)
    assert torch.equal(image_ids(8, 12, torch.device("cpu")), ids)


def test_targets_nest(folder: Path) -> None:
    attention, both, everything = (
        set(DiffusersFluxPolicy.from_demo(folder=folder, targets=choice, device="cpu").export_lora())
        for choice in ("attention", "attention+mlp", "all")
    )
    assert attention < both < everything
    assert not any(".ff" in key for key in attention)
    assert any(key.endswith("norm1.linear.lora_A.weight") for key in everything)
    assert not any(key.startswith(("transformer.proj_out", "transformer.x_embedder")) for key in everything)


def test_decoding_gives_images_on_the_cpu(folder: Path) -> None:
    images = make_policy(folder).decode(latents(9))
    assert images.shape == (9, 64, 64, 3) and images.dtype == torch.float32
    assert 0 <= images.min() and images.max() <= 1 and images.std() > 0.05


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rank": 0}, LoraError, "rank is 0"),
        ({"alpha": 0}, LoraError, "alpha is 0"),
        ({"size": 72}, ValueError, "width is 72.*multiple of 16"),
        ({"size": 0}, ValueError, "width is 0"),
        ({"targets": "nothing_like_it"}, LoraError, "matches no Linear.*transformer_blocks.0"),
        ({"targets": "("}, LoraError, "not a regular expression"),
        ({"targets": " "}, LoraError, "empty"),
    ],
)
def test_bad_settings_are_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict, error: type, text: str
) -> None:
    monkeypatch.setattr(demo, "load_transformer", lambda path: pytest.fail("weights were read"))
    with pytest.raises(error, match=text):
        DiffusersFluxPolicy.from_demo(folder=folder, **options)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model_index.json"):
        DiffusersFluxPolicy.from_pretrained(tmp_path)


def test_a_bfloat16_model_trains_a_float32_lora(folder: Path) -> None:
    transformer = demo.load_transformer(demo.demo_paths(folder).flux).to(torch.bfloat16)
    condition = FluxCondition(torch.randn(1, 20, 128), torch.randn(1, 128))
    policy = DiffusersFluxPolicy(transformer, lambda _: condition, None, width=64, height=64, rank=2, device="cpu")
    assert all(p.dtype == torch.float32 for p in policy.parameters())
    x = latents(1)
    v = policy.rollout(condition, lambda velocity: velocity(x, SIGMA))
    again = policy.update(condition, lambda velocity, _: velocity(x, SIGMA))
    assert v.dtype == torch.float32 and torch.equal(v, again.detach())
    again.mean().backward()
    assert any(p.grad.abs().max() > 0 for p in policy.parameters())


@pytest.fixture(scope="module")
def flux_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX.1 model folder as diffusers lays it out, with tiny random parts."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "a": 2, "red": 3, "circle": 4, "blue": 5}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", model_max_length=16)
    torch.manual_seed(0)
    config = demo.FLUX_CONFIG | {"joint_attention_dim": 32, "pooled_projection_dim": 32, "num_single_layers": 1}
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=16,
            norm_num_groups=4,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
            )
        ),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(T5Config(vocab_size=8, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)),
        tokenizer_2=tokenizer,
        transformer=FluxTransformer2DModel(**config),
    )
    target = tmp_path_factory.mktemp("flux")
    pipeline.save_pretrained(target)
    return target


def test_a_flux_folder_samples_as_its_pipeline_does(flux_folder: Path) -> None:
    """Euler over the policy's velocity and its decode give the pipeline's own image."""
    from diffusers import FluxPipeline

    sigmas = [1.0, 0.75, 0.4, 0.0]
    policy = DiffusersFluxPolicy.from_pretrained(
        flux_folder, width=64, height=32, guidance=2.0, dtype=torch.float32, device="cpu"
    )
    noise = torch.randn(1, 16, 4, 8, generator=torch.Generator().manual_seed(0))

    def ode(velocity):
        x = noise
        for now, after in zip(sigmas, sigmas[1:]):
            x = x + (after - now) * velocity(x, now)
        return x

    (condition,) = policy.encode(["a red circle"])
    image = policy.decode(policy.rollout(condition, ode))
    pipeline = FluxPipeline.from_pretrained(flux_folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        "a red circle",
        width=64,
        height=32,
        guidance_scale=2.0,
        num_inference_steps=3,
        sigmas=sigmas[:-1],
        latents=pack_latents(noise),
        output_type="pt",
    ).images.movedim(1, -1)
    assert image.shape == (1, 32, 64, 3) and image.std() > 0.005
    assert torch.allclose(image, expected, atol=1e-4)


def test_a_flux_folder_refuses_bad_targets_before_weights_are_read(
    flux_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import FluxPipeline

    monkeypatch.setattr(FluxPipeline, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(LoraError, match="matches no Linear"):
        DiffusersFluxPolicy.from_pretrained(flux_folder, targets="no_such_layer")


def test_an_exported_lora_loads_back(folder: Path) -> None:
    trained = make_policy(folder, rank=2, alpha=6, targets="attention")
    exported = trained.export_lora()
    options = lora_options(exported)
    assert options["rank"] == 2
    again = DiffusersFluxPolicy.from_demo(folder=folder, device="cpu", **options)
    again.load_lora(exported)
    assert torch.allclose(rolled_out(again, latents()), rolled_out(trained, latents()), atol=1e-5)
    with pytest.raises(ValueError, match="other modules"):
        DiffusersFluxPolicy.from_demo(folder=folder, rank=2, targets=r"to_q$", device="cpu").load_lora(exported)


@pytest.mark.parametrize("state", [{}, {"lora_unet_x.lora_down.weight": torch.zeros(1, 1)}])
def test_other_lora_formats_are_refused(state: dict) -> None:
    with pytest.raises(ValueError, match="diffusers-PEFT naming"):
        lora_options(state)
