"""The policy that runs inside ComfyUI's model management.

Every model call happens inside a custom Sampler given to CFGGuider, so that conditioning, patches, wrappers, guidance
and user LoRAs act exactly as in sampling. The trainable LoRA wraps the forward of the model's Linears, attached by a
PatcherInjection on a clone: the user's MODEL is never changed. Three things make gradients right where the plain
forward gives silently wrong ones:

- :class:`FrozenLinear` keeps weights out of the graph and fetches them again for the backward pass, because ComfyUI may
  stream, cast or evict them in between;
- inputs of normalisation layers are copied while gradients are on, because FLUX blocks add to them in place afterwards;
- a checkpointed block gets copies of its inputs, because it changes them in place.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.patcher_extension
import comfy.samplers
import torch
from comfy.ldm.modules.attention import attention_pytorch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..egrpo.lora import (
    TARGET_CHOICES,
    LoraError,
    LoraSet,
    check_rank,
    checked_pattern,
    from_state_dict,
    is_flux_names,
    to_comfy,
    to_diffusers,
)
from ..egrpo.policy import Condition, Policy, T, Velocity, check_size
from .flow import require_rectified_flow

logger = logging.getLogger(__name__)

KEY = "egrpo"
NORM_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
BYTES_PER_ELEMENT_OF_ACTIVATION = 2
TARGET_PATTERNS = {
    # FLUX keeps attention and MLP of a single block in linear1 and linear2, so both belong to "attention" too.
    "attention": r"(attn|attention)|single_blocks\.\d+\.linear[12]$",
    "attention+mlp": r"(attn|attention|mlp|\bff\b|feed_forward|ffn)|single_blocks\.\d+\.linear[12]$",
    "all": r".",
}


def is_linear(module: nn.Module) -> bool:
    """True for torch's Linear and for ComfyUI's and GGUF's stand-ins, which are not always subclasses of it."""
    return isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "weight_function"))


class FrozenLinear(torch.autograd.Function):
    """A Linear whose weight is not kept for the backward pass but fetched again through ComfyUI's casting."""

    @staticmethod
    def forward(ctx, x, module, base_forward, args, kwargs):
        ctx.module, ctx.base_forward, ctx.args, ctx.kwargs = module, base_forward, args, kwargs
        ctx.shape, ctx.dtype, ctx.device = x.shape, x.dtype, x.device
        with torch.no_grad():
            return base_forward(x, *args, **kwargs)

    @staticmethod
    def backward(ctx, grad):
        module = ctx.module
        if _casts_like_comfy(module):
            with torch.no_grad():
                weight, bias, stream = comfy.ops.cast_bias_weight(
                    module, dtype=grad.dtype, bias_dtype=grad.dtype, device=ctx.device, offloadable=True
                )
                grad_x = grad @ weight
                comfy.ops.uncast_bias_weight(module, weight, bias, stream)
        else:  # third-party layers such as GGUF: the vector-Jacobian product of a linear map is the same everywhere
            with torch.enable_grad():
                origin = torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device, requires_grad=True)
                output = ctx.base_forward(origin, *ctx.args, **ctx.kwargs)
            (grad_x,) = torch.autograd.grad(output, origin, grad)
        return grad_x.to(ctx.dtype), None, None, None, None


def _casts_like_comfy(module: nn.Module) -> bool:
    """True when comfy.ops.cast_bias_weight gives this module's effective weight."""
    method = getattr(type(module), "forward_comfy_cast_weights", None)
    return method is not None and method.__module__ == "comfy.ops"


def model_blocks(diffusion_model: nn.Module) -> dict[str, nn.Module]:
    """The transformer's blocks by name: the members of its top-level ModuleLists."""
    return {
        f"{name}.{index}": block
        for name, children in diffusion_model.named_children()
        if isinstance(children, nn.ModuleList)
        for index, block in enumerate(children)
    }


def target_shapes(diffusion_model: nn.Module, targets: str) -> dict[str, tuple[int, int]]:
    """{module name: (in, out)} of the block Linears that ``targets`` names.

    Args:
        targets: a choice of :data:`egrpo.lora.TARGET_CHOICES`, or a regular expression searched in module names.

    Raises:
        LoraError: a broken pattern, or one that matches nothing; lists some names that exist.
    """
    pattern = re.compile(TARGET_PATTERNS[targets]) if targets in TARGET_PATTERNS else checked_pattern(targets)
    shapes = {
        f"{block_name}.{name}": (module.in_features, module.out_features)
        for block_name, block in model_blocks(diffusion_model).items()
        for name, module in block.named_modules()
        if is_linear(module)
    }
    chosen = {name: shape for name, shape in shapes.items() if pattern.search(name)}
    if not chosen:
        examples = ", ".join(list(shapes)[:4]) or "none"
        raise LoraError(
            f"target pattern {targets!r} matches no Linear in the model's blocks. Choose {', '.join(TARGET_CHOICES)}, "
            f"or a regular expression for names such as {examples}"
        )
    return chosen


class Attachment:
    """Wraps a diffusion model's forwards for the LoRA and for gradients; undone exactly by :meth:`eject`.

    Used as a PatcherInjection: ComfyUI injects it when the clone is loaded and ejects it when another one is.
    """

    def __init__(self, diffusion_model: nn.Module, lora: LoraSet, checkpoint_blocks: bool = True) -> None:
        self._model = diffusion_model
        self._lora = lora
        self._checkpoint_blocks = checkpoint_blocks
        self._wrapped: list[nn.Module] = []
        self._hooks: list[Any] = []

    def inject(self, patcher: Any = None) -> None:
        if self._wrapped:
            return
        adapters = dict(self._lora.named())
        for name, module in self._model.named_modules():
            if is_linear(module):
                self._wrap(module, self._linear_forward(module, adapters.get(name)))
            elif isinstance(module, NORM_LAYERS):
                self._hooks.append(module.register_forward_pre_hook(_copy_input))
        if self._checkpoint_blocks:
            for block in model_blocks(self._model).values():
                self._wrap(block, _checkpointed(block.forward))

    def eject(self, patcher: Any = None) -> None:
        for module in self._wrapped:
            module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()
        self._wrapped, self._hooks = [], []

    def _wrap(self, module: nn.Module, forward: Callable) -> None:
        module.forward = forward
        self._wrapped.append(module)

    def _linear_forward(self, module: nn.Module, adapter: nn.Module | None) -> Callable:
        base, lora = module.forward, self._lora

        def forward(x, *args, **kwargs):
            if not torch.is_grad_enabled():
                y = base(x, *args, **kwargs)
            elif torch.is_tensor(x) and x.requires_grad:
                y = FrozenLinear.apply(x, module, base, args, kwargs)
            else:  # before 0.31 ComfyUI left the weights themselves open to gradients
                with torch.no_grad():
                    y = base(x, *args, **kwargs).clone()  # blocks add in place, which a view made here would forbid
            return adapter(x, y) if adapter is not None and lora.enabled else y

        return forward


def _copy_input(module: nn.Module, args: tuple) -> tuple | None:
    """Pre-hook: give a normalisation layer its own input, since its block will add to the original in place."""
    if not torch.is_grad_enabled() or not args or not torch.is_tensor(args[0]):
        return None
    return (args[0].clone(), *args[1:])


def _checkpointed(forward: Callable) -> Callable:
    """Recompute a block in the backward pass, from copies of its inputs and of the options it was called with."""

    def copied(value: Any) -> Any:
        return value.clone() if torch.is_tensor(value) else value

    def checkpointed_forward(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if isinstance(kwargs.get("transformer_options"), dict):
            # The model goes on to write the next block's index into this dict.
            kwargs["transformer_options"] = kwargs["transformer_options"].copy()

        def run(*args, **kwargs):
            return forward(*map(copied, args), **{name: copied(value) for name, value in kwargs.items()})

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return checkpointed_forward


class _WorkSampler(comfy.samplers.Sampler):
    """Hands the prepared model to a callable instead of sampling; CFGGuider does the rest."""

    def __init__(self, work: Callable[[Any, dict], Any]) -> None:
        self._work = work
        self.result: Any = None

    def sample(
        self, model_wrap, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None, disable_pbar=False
    ):
        self.result = self._work(model_wrap, extra_args)
        return torch.zeros_like(noise)


class ComfyPolicy(Policy):
    """A ComfyUI MODEL, CLIP and VAE as a policy; use it as a context manager, which leaves nothing attached.

    Args:
        model: a rectified-flow MODEL (FLUX, SD3, …); patches, wrappers and LoRAs already on it stay active.
        clip: encodes prompts; None when conditions are given to the phases directly.
        vae: decodes latents; None when only latents are needed.
        width, height: pixels, divisible by 16.
        guidance: FLUX guidance written into the conditioning.
        rank, alpha, targets, seed: the LoRA, see :class:`egrpo.lora.LoraSet` and :func:`target_shapes`.
        start_from: a LoRA state dict to continue from.
        checkpoint_blocks: recompute blocks in the backward pass (half the speed of the update, little memory).

    Raises:
        LoraError, ValueError: bad settings or a MODEL that is not rectified flow; before anything is loaded.
    """

    def __init__(
        self,
        model: comfy.model_patcher.ModelPatcher,
        clip: Any,
        vae: Any,
        *,
        width: int,
        height: int,
        guidance: float = 3.5,
        rank: int = 16,
        alpha: float | None = None,
        targets: str = "attention+mlp",
        seed: int = 0,
        start_from: dict[str, Tensor] | None = None,
        checkpoint_blocks: bool = True,
    ) -> None:
        alpha = float(rank if alpha is None else alpha)
        check_rank(rank, alpha)
        check_size(width, height)
        require_rectified_flow(model)
        latent_format = model.get_model_object("latent_format")
        if getattr(latent_format, "latent_dimensions", 2) != 2:
            raise ValueError(
                f"{type(model.model).__name__} makes video or 3-D latents; E-GRPO trains image models such as FLUX or SD3"
            )
        diffusion_model = model.get_model_object("diffusion_model")
        shapes = target_shapes(diffusion_model, targets)
        ratio = getattr(latent_format, "spacial_downscale_ratio", 8)
        self.latent_shape = (latent_format.latent_channels, height // ratio, width // ratio)
        self.device = model.load_device
        self.guidance = guidance
        self._clip, self._vae = clip, vae
        self._diffusion_model = diffusion_model
        with self.normal_mode():
            self.lora = LoraSet(shapes, rank, alpha, seed)
            if start_from is not None:
                self.lora.load_matrices(from_state_dict(start_from, shapes))
            self.lora.to(self.device)
        self._attachment = Attachment(diffusion_model, self.lora, checkpoint_blocks)
        self._clone = model.clone()
        options = self._clone.model_options["transformer_options"]
        # Sage and flash attention have no backward, and rollout and update must compute alike.
        options["optimized_attention_override"] = lambda _, *args, **kwargs: attention_pytorch(*args, **kwargs)
        self._clone.add_wrapper_with_key(
            comfy.patcher_extension.WrappersMP.PREPARE_SAMPLING, KEY, self._reserve_backward_memory
        )
        self._updating = False
        self._was_in_training: bool | None = None

    # life time

    def __enter__(self) -> "ComfyPolicy":
        self._clone.set_injections(
            KEY, [comfy.patcher_extension.PatcherInjection(self._attachment.inject, self._attachment.eject)]
        )
        self._was_in_training = comfy.model_management.in_training
        comfy.model_management.in_training = True  # plain rotary embedding and dequantised matmuls, in both phases
        return self

    def __exit__(self, *exc: object) -> None:
        comfy.model_management.in_training = self._was_in_training
        self._clone.eject_model()
        self._clone.remove_injections(KEY)
        self._attachment.eject()  # also when ComfyUI dropped the clone without ejecting
        comfy.model_management.unload_model_and_clones(self._clone)

    # phases

    def encode(self, prompts: Sequence[str]) -> list[Condition]:
        conditions = []
        for prompt in prompts:
            self.check_interrupted()
            encoded = self._clip.encode_from_tokens_scheduled(self._clip.tokenize(prompt))
            conditions.append([[c, {**values, "guidance": self.guidance}] for c, values in encoded])
        return conditions

    def rollout(self, condition: Condition, work: Callable[[Velocity], T], *, base: bool = False) -> T:
        def run(velocity: Velocity) -> T:
            with torch.no_grad(), self._lora_enabled(not base):
                return work(velocity)

        return self._inside_guider(condition, run)

    def update(self, condition: Condition, work: Callable[[Velocity, Velocity], T]) -> T:
        def run(velocity: Velocity) -> T:
            def base_velocity(x: Tensor, sigma: float) -> Tensor:
                with torch.no_grad(), self._lora_enabled(False):
                    return velocity(x, sigma)

            with torch.enable_grad():
                return work(velocity, base_velocity)

        self._updating = True
        try:
            return self._inside_guider(condition, run)
        finally:
            self._updating = False

    def decode(self, latents: Tensor) -> Tensor:
        latents = self._clone.model.process_latent_out(latents.to(torch.float32))
        images = self._vae.decode(latents)
        return images.reshape(-1, *images.shape[-3:])[..., :3].float().clamp(0.0, 1.0).cpu()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        comfy.model_management.unload_all_models()
        yield
        comfy.model_management.unload_all_models()

    def normal_mode(self) -> torch.inference_mode:
        return torch.inference_mode(False)

    def check_interrupted(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    # parameters

    def parameters(self) -> list[nn.Parameter]:
        return list(self.lora.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.lora.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.lora.load_state_dict(state)

    def export_lora(self) -> dict[str, Tensor]:
        matrices = self.lora.matrices()
        return to_diffusers(matrices) if is_flux_names(matrices) else to_comfy(matrices)

    def lora_model(self) -> dict[str, Tensor]:
        """The LoRA as ComfyUI's LORA_MODEL (for SaveLoRA and LoraModelLoader)."""
        return to_comfy(self.lora.matrices())

    # memory

    def micro_batch(self, requested: int) -> int:
        if requested:
            return requested
        if comfy.model_management.is_device_cpu(self.device):
            return 8
        free = comfy.model_management.get_total_memory(self.device) * 0.9 - self._clone.model_size()
        one = self._clone.model.memory_required([1, *self.latent_shape])
        return int(min(max(free // max(one, 1), 1), 16))

    def memory_estimate(self, micro_batch: int) -> dict[str, int]:
        lora = sum(p.numel() for p in self.parameters())
        return {
            "model": self._clone.model_size(),
            "rollout": int(self._clone.model.memory_required([micro_batch, *self.latent_shape])),
            "update": int(self._clone.model.memory_required([1, *self.latent_shape])) + self._checkpoint_bytes(),
            "lora and optimizer": lora * 4 * 4,
        }

    def _checkpoint_bytes(self) -> int:
        """Inputs kept for every block plus one block's own activations (about 25 times its input)."""
        _, height, width = self.latent_shape
        tokens = height * width // 4 + 512
        hidden = getattr(self._diffusion_model, "hidden_size", 3072)
        blocks = len(model_blocks(self._diffusion_model))
        return tokens * hidden * BYTES_PER_ELEMENT_OF_ACTIVATION * (blocks + 25)

    def _reserve_backward_memory(self, executor, model, noise_shape, conds, *args, **kwargs):
        """PREPARE_SAMPLING wrapper: ComfyUI reserves memory for inference only; ask for the backward pass too."""
        if self._updating:
            one = max(int(self._clone.model.memory_required([1, *self.latent_shape])), 1)
            times = 1 + -(-self._checkpoint_bytes() // one)
            noise_shape = [noise_shape[0] * times, *noise_shape[1:]]
        return executor(model, noise_shape, conds, *args, **kwargs)

    # inside

    def _inside_guider(self, condition: Condition, run: Callable[[Velocity], T]) -> T:
        """Load the model as sampling does, then leave inference mode for ``run`` alone.

        Rollouts leave it too: quantised layers compute a last digit differently inside it, and the importance ratio
        needs rollout and update to agree to the last digit. Loading stays inside, as ComfyUI's own nodes expect.
        """

        def work(model_wrap: Any, extra_args: dict) -> T:
            with self.normal_mode(), self._normal_small_parameters():
                _normal_conditions(model_wrap)
                return run(_velocity(model_wrap, extra_args))

        guider = comfy.samplers.CFGGuider(self._clone)
        guider.set_conds(condition, condition)
        guider.set_cfg(1.0)
        sampler = _WorkSampler(work)
        blank = torch.zeros((1, *self.latent_shape))
        guider.sample(blank, blank, sampler, torch.tensor([1.0, 0.0]), disable_pbar=True)
        return sampler.result

    @contextmanager
    def _lora_enabled(self, enabled: bool) -> Iterator[None]:
        before, self.lora.enabled = self.lora.enabled, enabled
        try:
            yield
        finally:
            self.lora.enabled = before

    @contextmanager
    def _normal_small_parameters(self) -> Iterator[None]:
        """Norm scales and the like enter the graph: lend frozen copies of those that cannot, being inference tensors, or
        would gather gradients, as before ComfyUI 0.31."""
        lent = []
        try:
            for module in self._diffusion_model.modules():
                if is_linear(module):
                    continue
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None and (parameter.is_inference() or parameter.requires_grad):
                        lent.append((module, name, parameter))
                        module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            yield
        finally:
            for module, name, parameter in lent:
                module._parameters[name] = parameter


def _velocity(model_wrap: Any, extra_args: dict) -> Velocity:
    """v = (x - x0_hat) / sigma from ComfyUI's denoised prediction; exact to rounding (never called at sigma 0)."""

    def velocity(x: Tensor, sigma: float) -> Tensor:
        sigmas = torch.full((x.shape[0],), float(sigma), dtype=torch.float32, device=x.device)
        return (x - model_wrap(x, sigmas, **extra_args)) / sigmas.view(-1, *[1] * (x.ndim - 1))

    return velocity


def _normal_conditions(model_wrap: Any) -> None:
    """Replace inference tensors among the guider's processed conditions by copies that autograd may save."""
    for conditions in model_wrap.conds.values():
        for condition in conditions:
            for value in condition.get("model_conds", {}).values():
                tensor = getattr(value, "cond", None)
                if torch.is_tensor(tensor) and tensor.is_inference():
                    value.cond = tensor.clone()
