"""Velocities and LoRA gradients through ComfyUI's FLUX equal diffusers' and the plain wrap's, in every weight format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.comfy.tiny import conditioning

SIGMA = 0.9
SIZE = 64


def load(path, **options):
    import comfy.sd

    with torch.inference_mode():  # as a loader node does
        return comfy.sd.load_diffusion_model(str(path), model_options=options)


def make_policy(pack_module, model, **options):
    policy = pack_module("nodes.comfy_policy").ComfyPolicy(
        model, None, None, width=SIZE, height=SIZE, rank=4, targets="all", **options
    )
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode(False), torch.no_grad():
        for parameter in policy.parameters():  # a LoRA that does something, so that both matrices get gradients
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy


def latent(batch: int = 1) -> Tensor:
    return torch.randn(batch, 16, SIZE // 8, SIZE // 8, generator=torch.Generator().manual_seed(1))


def loss_of(v: Tensor) -> Tensor:
    weight = torch.randn(v.shape, generator=torch.Generator().manual_seed(2))
    return (v * weight).mean()


def comfy_gradients(policy) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    def work(velocity, base_velocity):
        v = velocity(latent(), SIGMA)
        loss_of(v).backward()
        return v.detach()

    with torch.inference_mode(), policy:  # as a node's execute runs
        v = policy.update(conditioning(), work)
    return v, {name: (a.down.grad.clone(), a.up.grad.clone()) for name, a in policy.lora.named()}


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def diffusers_truth(tiny, pack_module):
    """Velocity and weight gradients of the merged weights W + up @ down in diffusers, fp32."""
    from egrpo.lora import _diffusers_parts

    policy = make_policy(pack_module, load(tiny.diffusers, dtype=torch.float32))
    model = tiny.diffusers_model()
    modules = dict(model.named_modules())
    for name, (down, up) in policy.lora.matrices().items():
        for part, rows in _diffusers_parts(name, up.shape[0], down.shape[1]):
            modules[part].weight.requires_grad_(False).add_(up[rows] @ down)
            modules[part].weight.requires_grad_(True)
    v = diffusers_velocity(model, latent())
    loss_of(v).backward()
    gradients = {}
    for name, adapter in policy.lora.named():
        parts = _diffusers_parts(name, adapter.up.shape[0], adapter.down.shape[1])
        weight_grad = torch.cat([modules[part].weight.grad for part, _ in parts])
        gradients[name] = (adapter.up.detach().T @ weight_grad, weight_grad @ adapter.down.detach().T)
    return v.detach(), gradients


def diffusers_velocity(model, x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    packed = x.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(2)
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    image_ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1).float()
    context, values = conditioning()[0]
    v = model(
        hidden_states=packed,
        encoder_hidden_states=context,
        pooled_projections=values["pooled_output"],
        timestep=torch.full((batch,), SIGMA),
        guidance=torch.full((batch,), values["guidance"]),
        img_ids=image_ids,
        txt_ids=torch.zeros(context.shape[1], 3),
    ).sample
    v = v.view(batch, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return v.reshape(batch, channels, height, width)


@pytest.mark.parametrize("checkpoint_blocks", [False, True])
def test_gradients_equal_diffusers_in_fp32(tiny, pack_module, diffusers_truth, checkpoint_blocks):
    policy = make_policy(pack_module, load(tiny.diffusers, dtype=torch.float32), checkpoint_blocks=checkpoint_blocks)
    v, gradients = comfy_gradients(policy)
    true_v, true_gradients = diffusers_truth
    assert relative_error(v, true_v) < 1e-5
    for name, truth in true_gradients.items():
        for ours, theirs in zip(gradients[name], truth):
            assert relative_error(ours, theirs) < 1e-5, name


FORMATS = {
    "bf16": ("diffusers", {"dtype": torch.bfloat16}),
    "fp8 weight_dtype": ("diffusers", {"dtype": torch.float8_e4m3fn}),
    "fp8 file": ("fp8", {}),
    "scaled fp8": ("scaled_fp8", {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_of_reduced_weights_equal_the_plain_wrap(tiny, pack_module, name, monkeypatch):
    """Dequantised weights in a plain autograd graph are the reference for weights fetched again in backward."""
    attribute, options = FORMATS[name]
    path = getattr(tiny, attribute)
    v, gradients = comfy_gradients(make_policy(pack_module, load(path, **options)))

    def plain_apply(x, module, base_forward, args, kwargs):
        import comfy.ops

        weight, bias, stream = comfy.ops.cast_bias_weight(
            module, dtype=x.dtype, bias_dtype=x.dtype, device=x.device, offloadable=True
        )
        return torch.nn.functional.linear(x, weight.clone(), None if bias is None else bias.clone())

    monkeypatch.setattr(pack_module("nodes.comfy_policy").FrozenLinear, "apply", plain_apply)
    plain_v, plain_gradients = comfy_gradients(make_policy(pack_module, load(path, **options)))
    assert relative_error(v, plain_v) < 1e-6
    for key, truth in plain_gradients.items():
        for ours, theirs in zip(gradients[key], truth):
            assert theirs.abs().max() > 0
            assert relative_error(ours, theirs) < 1e-5, key


@pytest.mark.parametrize("name", ["fp32", *FORMATS])
def test_update_velocity_equals_rollout_velocity_bit_for_bit(tiny, pack_module, name):
    attribute, options = FORMATS.get(name, ("diffusers", {"dtype": torch.float32}))
    policy = make_policy(pack_module, load(getattr(tiny, attribute), **options))
    v, _ = comfy_gradients(policy)
    with torch.inference_mode(), policy:
        rolled = policy.rollout(conditioning(), lambda velocity: velocity(latent(), SIGMA))
    assert torch.equal(v, rolled)


def test_base_velocity_is_the_model_without_lora(tiny, pack_module):
    model = load(tiny.diffusers, dtype=torch.float32)
    policy = make_policy(pack_module, model)
    with torch.inference_mode(), policy:
        with_lora = policy.rollout(conditioning(), lambda velocity: velocity(latent(), SIGMA))
        base = policy.rollout(conditioning(), lambda velocity: velocity(latent(), SIGMA), base=True)
        during_update = policy.update(conditioning(), lambda velocity, base_velocity: base_velocity(latent(), SIGMA))
    assert torch.equal(base, during_update)
    assert not torch.equal(base, with_lora)
    fresh = pack_module("nodes.comfy_policy").ComfyPolicy(model, None, None, width=SIZE, height=SIZE, rank=1)
    with torch.inference_mode(), fresh:
        untrained = fresh.rollout(conditioning(), lambda velocity: velocity(latent(), SIGMA))
    assert torch.equal(base, untrained)


def test_user_lora_on_the_model_stays_active(tiny, pack_module):
    import comfy.sd

    model = load(tiny.diffusers, dtype=torch.float32)
    donor = make_policy(pack_module, model)
    with torch.inference_mode():
        patched, _ = comfy.sd.load_lora_for_models(model, None, donor.export_lora(), 1.0, 0.0)
        policy = pack_module("nodes.comfy_policy").ComfyPolicy(patched, None, None, width=SIZE, height=SIZE, rank=2)
        with donor:
            expected = donor.rollout(conditioning(), lambda velocity: velocity(latent(), SIGMA))
        with policy:
            v = policy.rollout(conditioning(), lambda velocity: velocity(latent(), SIGMA))
    assert relative_error(v, expected) < 1e-5


@pytest.mark.parametrize("outcome", ["finished", "failed"])
def test_nothing_stays_attached(tiny, pack_module, outcome):
    import comfy.model_management

    model = load(tiny.diffusers, dtype=torch.float32)
    before = {name: parameter.clone() for name, parameter in model.model.named_parameters()}
    policy = make_policy(pack_module, model)
    in_training = comfy.model_management.in_training

    def work(velocity, base_velocity):
        loss_of(velocity(latent(), SIGMA)).backward()
        if outcome == "failed":
            raise MemoryError("on purpose")

    with torch.inference_mode():
        try:
            with policy:
                policy.update(conditioning(), work)
        except MemoryError:
            assert outcome == "failed"
    assert not [m for m in model.model.modules() if "forward" in m.__dict__ or m._forward_pre_hooks]
    assert comfy.model_management.in_training == in_training
    after = dict(model.model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_low_vram_casting_with_a_user_lora_gives_the_gradients_of_a_full_load(tiny, pack_module, monkeypatch):
    """Partly loaded: every weight is cast, and the user's LoRA added, at each use - in the backward pass as well."""
    import comfy.model_patcher
    import comfy.sd

    model = load(tiny.diffusers, dtype=torch.float32)
    user_lora = make_policy(pack_module, model).export_lora()

    def gradients():
        patched, _ = comfy.sd.load_lora_for_models(model, None, user_lora, 1.0, 0.0)
        return comfy_gradients(make_policy(pack_module, patched))

    full_v, full = gradients()
    plain_load, seen = comfy.model_patcher.ModelPatcher.load, []

    def partial_load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        plain_load(self, device_to, lowvram_model_memory=1, force_patch_weights=False, full_load=False)
        seen.append(sum(bool(getattr(m, "weight_function", None)) for m in self.model.modules()))

    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "load", partial_load)
    v, partial = gradients()
    assert seen and max(seen) > 0, "no weight was left to be patched at each use: the case was not exercised"
    assert relative_error(v, full_v) < 1e-5
    for name, truth in full.items():
        for ours, theirs in zip(partial[name], truth):
            assert relative_error(ours, theirs) < 1e-5, name


def test_epsilon_prediction_is_refused_by_name(tiny, pack_module):
    import comfy.model_sampling

    model = load(tiny.diffusers, dtype=torch.float32)

    class Epsilon(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):
        pass

    model.add_object_patch("model_sampling", Epsilon())
    with pytest.raises(ValueError, match="Flux.*rectified"):
        pack_module("nodes.comfy_policy").ComfyPolicy(model, None, None, width=SIZE, height=SIZE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"targets": "no_such_layer"}, "matches no Linear"),
        ({"targets": "("}, "regular expression"),
        ({"targets": " "}, "empty"),
        ({"width": 40}, "width is 40"),
    ],
)
def test_bad_options_are_refused_before_loading(tiny, pack_module, options, message, monkeypatch):
    import comfy.model_management

    model = load(tiny.diffusers, dtype=torch.float32)

    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", fail)
    with pytest.raises(ValueError, match=message):
        pack_module("nodes.comfy_policy").ComfyPolicy(
            model, None, None, **{"width": SIZE, "height": SIZE, "rank": 4, **options}
        )


def test_training_can_continue_from_an_exported_lora(tiny, pack_module):
    model = load(tiny.diffusers, dtype=torch.float32)
    donor = make_policy(pack_module, model)
    state = {name: tensor.clone() for name, tensor in donor.export_lora().items()}
    heir = pack_module("nodes.comfy_policy").ComfyPolicy(
        model, None, None, width=SIZE, height=SIZE, rank=6, alpha=3, targets="all", start_from=state
    )
    with torch.inference_mode():
        with donor:
            expected = donor.rollout(conditioning(), lambda velocity: velocity(latent(), SIGMA))
        with heir:
            v = heir.rollout(conditioning(), lambda velocity: velocity(latent(), SIGMA))
    assert relative_error(v, expected) < 1e-5


def test_the_update_reserves_memory_for_the_backward_pass(tiny, pack_module, monkeypatch):
    import comfy.model_management

    policy, asked = make_policy(pack_module, load(tiny.diffusers, dtype=torch.float32)), []
    load_models = comfy.model_management.load_models_gpu

    def recording(models, memory_required=0, **kwargs):
        asked.append(memory_required)
        return load_models(models, memory_required=memory_required, **kwargs)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", recording)
    with torch.inference_mode(), policy:
        policy.rollout(conditioning(), lambda velocity: velocity(latent(), SIGMA))
        policy.update(conditioning(), lambda velocity, base_velocity: velocity(latent(), SIGMA).detach())
    rollout, update = asked
    assert update > rollout
    assert update >= policy._checkpoint_bytes()
