"""Rectified-flow models other than FLUX: a tiny SD3 trains with right gradients and exports what ComfyUI loads."""

from __future__ import annotations

import pytest
import torch

from tests.comfy.test_gradients import relative_error

SIGMA = 0.8


@pytest.fixture(scope="module")
def sd3(comfy_path):
    """A random two-block SD3 MODEL, loaded as a checkpoint is."""
    import comfy.ops
    import comfy.sd
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    network = OpenAISignatureMMDITWrapper(
        input_size=None,
        patch_size=2,
        in_channels=16,
        depth=2,
        num_patches=256,
        pos_embed_max_size=16,
        adm_in_channels=32,
        context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 128}},
        pos_embed_scaling_factor=None,
        qk_norm="rms",
        x_block_self_attn_layers=[],
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(value.shape, generator=generator) / (value.shape[-1] ** 0.5 if value.ndim > 1 else 3)
        for name, value in network.state_dict().items()
    }
    with torch.inference_mode():
        return comfy.sd.load_diffusion_model_state_dict(state, model_options={"dtype": torch.float32})


def test_sd3_gradient_equals_the_finite_difference(sd3, pack_module):
    import comfy.sd

    generator = torch.Generator().manual_seed(1)
    policy = pack_module("nodes.comfy_policy").ComfyPolicy(sd3, None, None, width=64, height=64, rank=2)
    parameters = policy.parameters()
    with torch.inference_mode(False), torch.no_grad():
        for parameter in parameters:
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    condition = [
        [torch.randn(1, 12, 64, generator=generator), {"pooled_output": torch.randn(1, 32, generator=generator)}]
    ]
    x, weight = (torch.randn(1, *policy.latent_shape, generator=generator) for _ in range(2))
    direction = [torch.randn(parameter.shape, generator=generator) for parameter in parameters]

    def move(step: float) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for parameter, towards in zip(parameters, direction):
                parameter.add_(step * towards)

    def loss_after(step: float) -> float:
        move(step)
        v = policy.rollout(condition, lambda velocity: velocity(x, SIGMA))
        move(-step)
        return (v.double() * weight).mean().item()

    def work(velocity, base_velocity):
        v = velocity(x, SIGMA)
        (v * weight).mean().backward()
        return v.detach()

    with torch.inference_mode(), policy:
        updated = policy.update(condition, work)
        rolled = policy.rollout(condition, lambda velocity: velocity(x, SIGMA))
        step = 3e-3
        numeric = (loss_after(step) - loss_after(-step)) / (2 * step)
    analytic = sum((p.grad * towards).sum().item() for p, towards in zip(parameters, direction))
    assert torch.equal(updated, rolled)
    assert analytic == pytest.approx(numeric, rel=2e-3)

    with torch.inference_mode():
        state = {name: tensor.clone() for name, tensor in policy.export_lora().items()}
        patched, _ = comfy.sd.load_lora_for_models(sd3, None, state, 1.0, 0.0)
        plain = pack_module("nodes.comfy_policy").ComfyPolicy(patched, None, None, width=64, height=64, rank=1)
        with plain:
            reloaded = plain.rollout(condition, lambda velocity: velocity(x, SIGMA))
    assert relative_error(reloaded, rolled) < 1e-5
