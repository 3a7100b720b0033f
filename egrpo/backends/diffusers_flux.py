"""The headless policy: diffusers' FLUX transformer with a peft LoRA."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..lora import DEFAULT_TARGETS, TARGET_CHOICES, LoraError, check_rank, checked_pattern, initial_down
from ..policy import Policy, T, Velocity, check_size
from . import demo

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel

ADAPTER = "default"
BLOCK = re.compile(r"^(single_)?transformer_blocks\.\d+\.")
TARGET_PATTERNS = {
    # The same function spaces as in ComfyUI, where a single block fuses its MLP with its attention.
    "attention": r"\.attn\.|^single_transformer_blocks\.\d+\.proj_(mlp|out)$",
    "attention+mlp": r"\.attn\.|\.ff(_context)?\.|^single_transformer_blocks\.\d+\.proj_(mlp|out)$",
    "all": r".",
}
PIXELS_PER_LATENT = 8
LATENT_CHANNELS = 16
DECODE_BATCH = 8


@dataclass(frozen=True)
class FluxCondition:
    """One encoded prompt on the CPU."""

    sequence: Tensor
    """[1, L, joint_attention_dim]."""
    pooled: Tensor
    """[1, pooled_projection_dim]."""


def pack_latents(x: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h/2 * w/2, 4 C]: one token for every 2x2 of latent pixels, channel-major as FLUX has it."""
    batch, channels, height, width = x.shape
    x = x.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, height // 2 * (width // 2), channels * 4)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """Inverse of :func:`pack_latents` for latents of ``height`` x ``width``."""
    batch, _, features = tokens.shape
    x = tokens.view(batch, height // 2, width // 2, features // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(batch, features // 4, height, width)


def image_ids(height: int, width: int, device: torch.device) -> Tensor:
    """Rotary positions (0, row, column) [h/2 * w/2, 3] of the tokens of latents of ``height`` x ``width``."""
    ids = torch.zeros(height // 2, width // 2, 3, device=device)
    ids[..., 1] = torch.arange(height // 2, device=device)[:, None]
    ids[..., 2] = torch.arange(width // 2, device=device)
    return ids.view(-1, 3)


def target_modules(transformer: nn.Module, targets: str) -> list[str]:
    """Names of the block Linears that ``targets`` names.

    Args:
        targets: a choice of :data:`egrpo.lora.TARGET_CHOICES`, or a regular expression searched in diffusers' names.

    Raises:
        LoraError: a broken pattern, or one that matches nothing; lists some names that exist.
    """
    pattern = re.compile(TARGET_PATTERNS[targets]) if targets in TARGET_PATTERNS else checked_pattern(targets)
    linears = [
        name for name, module in transformer.named_modules() if isinstance(module, nn.Linear) and BLOCK.match(name)
    ]
    chosen = [name for name in linears if pattern.search(name)]
    if not chosen:
        raise LoraError(
            f"target pattern {targets!r} matches no Linear in the model's blocks. Choose {', '.join(TARGET_CHOICES)}, "
            f"or a regular expression for names such as {', '.join(linears[:4]) or 'none'}"
        )
    return chosen


def check_targets(config: dict, targets: str) -> None:
    """Raise LoraError for targets that match nothing in a transformer of this diffusers config; reads no weights."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        target_modules(FluxTransformer2DModel.from_config(config), targets)


def transformer_config(folder: Path) -> dict:
    """The transformer's config of a FLUX.1 model in diffusers' folder layout.

    Raises:
        ValueError: no such folder.
    """
    from diffusers import FluxTransformer2DModel

    for needed in ("model_index.json", "transformer/config.json"):
        if not (folder / needed).is_file():
            raise ValueError(f"{folder} is not a FLUX model in diffusers' folder layout: it has no {needed}")
    return FluxTransformer2DModel.load_config(folder / "transformer", local_files_only=True)


class DiffusersFluxPolicy(Policy):
    """A FLUX transformer of diffusers with a trainable peft LoRA.

    Args:
        transformer: frozen; its dtype is the dtype that it computes in. The LoRA is float32 in any case.
        encode: prompt -> :class:`FluxCondition`.
        decode: latents [B, 16, h, w] float32 on ``device`` -> images [B, 3, H, W] in -1..1.
        width, height: pixels, divisible by 16.
        rank, alpha, targets, seed: the LoRA, see :func:`egrpo.lora.initial_down`; B starts at zero.
        guidance: of guidance-distilled models; ignored by others.
        checkpoint_blocks: recompute blocks in the backward pass (half the speed of the update, little memory).
        offload: keep the transformer off the device while prompts are encoded, images decoded and rewards computed.

    Raises:
        LoraError, ValueError: bad settings.
    """

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        encode: Callable[[str], FluxCondition],
        decode: Callable[[Tensor], Tensor],
        *,
        width: int,
        height: int,
        rank: int = 16,
        alpha: float | None = None,
        targets: str = DEFAULT_TARGETS,
        guidance: float = 3.5,
        seed: int = 0,
        device: torch.device | str | None = None,
        checkpoint_blocks: bool = False,
        offload: bool = False,
    ) -> None:
        from peft import LoraConfig, get_peft_model

        alpha = float(rank if alpha is None else alpha)
        check_rank(rank, alpha)
        check_size(width, height)
        modules = target_modules(transformer, targets)
        self.latent_shape = (LATENT_CHANNELS, height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT)
        self.device = _device(device)
        self.guidance = guidance
        self._encode, self._decode = encode, decode
        self._offload = offload
        self._guided = bool(transformer.config.guidance_embeds)
        self._scale = alpha / rank
        if checkpoint_blocks:
            transformer.enable_gradient_checkpointing()
        transformer.eval().requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, init_lora_weights="gaussian")
        self.model = get_peft_model(transformer, config, adapter_name=ADAPTER)
        self._lora = {name: p for name, p in sorted(self.model.named_parameters()) if p.requires_grad}
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self._lora.items():
            parameter.data = parameter.data.float()
            if ".lora_A." in name:  # drawn again, because peft draws from the global generator
                parameter.data.copy_(initial_down(parameter.shape, generator))
        self.model.to("cpu" if offload else self.device)

    @classmethod
    def from_demo(
        cls,
        size: int | tuple[int, int] = 64,
        rank: int = 4,
        alpha: float = 4,
        targets: str = DEFAULT_TARGETS,
        guidance: float = 3.5,
        seed: int = 0,
        *,
        checkpoint: str = demo.RL_BASE,
        folder: Path | None = None,
        device: torch.device | str | None = None,
        checkpoint_blocks: bool = False,
    ) -> DiffusersFluxPolicy:
        """The demo family (:mod:`egrpo.backends.demo`) at ``size`` pixels (square, or width and height).

        Raises as the class and :func:`egrpo.backends.demo.demo_files` do, before weights are read.
        """
        width, height = (size, size) if isinstance(size, int) else size
        check_rank(rank, alpha)
        check_size(width, height)
        files = demo.demo_files(folder, checkpoint)
        check_targets(demo.read_description(files.flux)["config"], targets)
        device = _device(device)
        vae = demo.load_vae(files.vae).to(device)
        encoder = demo.load_text_encoder(files.text_encoder)
        return cls(
            demo.load_transformer(files.flux),
            lambda prompt: FluxCondition(*demo.encode_text(encoder, prompt)),
            lambda latents: vae.decode(latents).sample,
            width=width,
            height=height,
            rank=rank,
            alpha=alpha,
            targets=targets,
            guidance=guidance,
            seed=seed,
            device=device,
            checkpoint_blocks=checkpoint_blocks,
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        width: int = 512,
        height: int = 512,
        rank: int = 16,
        alpha: float | None = None,
        targets: str = DEFAULT_TARGETS,
        guidance: float = 3.5,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        checkpoint_blocks: bool = True,
        offload: bool = True,
    ) -> DiffusersFluxPolicy:
        """A FLUX.1 model in diffusers' folder layout (model_index.json and its subfolders); nothing is downloaded.

        Args:
            dtype: of the frozen models.

        Raises:
            LoraError, ValueError: bad settings, or no such folder; before weights are read.
        """
        from diffusers import FluxPipeline

        check_rank(rank, float(rank if alpha is None else alpha))
        check_size(width, height)
        folder = Path(folder)
        check_targets(transformer_config(folder), targets)
        device = _device(device)
        pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
        encoders = [pipeline.text_encoder.requires_grad_(False), pipeline.text_encoder_2.requires_grad_(False)]
        vae = pipeline.vae.requires_grad_(False)

        @torch.no_grad()
        def encode(prompt: str) -> FluxCondition:
            with _placed(encoders, device, offload):
                sequence, pooled, _ = pipeline.encode_prompt(prompt, None, device=device)
            return FluxCondition(sequence.cpu(), pooled.cpu())

        def decode(latents: Tensor) -> Tensor:
            latents = latents / vae.config.scaling_factor + vae.config.shift_factor
            with _placed([vae], device, offload):
                return vae.decode(latents.to(dtype)).sample

        return cls(
            pipeline.transformer,
            encode,
            decode,
            width=width,
            height=height,
            rank=rank,
            alpha=alpha,
            targets=targets,
            guidance=guidance,
            seed=seed,
            device=device,
            checkpoint_blocks=checkpoint_blocks,
            offload=offload,
        )

    # phases

    def encode(self, prompts: Sequence[str]) -> list[FluxCondition]:
        with self.scoring():
            return [self._encode(prompt) for prompt in prompts]

    def rollout(self, condition: FluxCondition, work: Callable[[Velocity], T], *, base: bool = False) -> T:
        self.model.to(self.device)
        with torch.no_grad(), self.model.disable_adapter() if base else nullcontext():
            return work(self._velocity(condition))

    def update(self, condition: FluxCondition, work: Callable[[Velocity, Velocity], T]) -> T:
        self.model.to(self.device)
        velocity = self._velocity(condition)

        def base_velocity(x: Tensor, sigma: float) -> Tensor:
            with torch.no_grad(), self.model.disable_adapter():
                return velocity(x, sigma)

        with torch.enable_grad():
            return work(velocity, base_velocity)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        pieces = [self._decode(piece.to(self.device).float()) for piece in latents.split(DECODE_BATCH)]
        return (torch.cat(pieces).float() / 2 + 0.5).clamp(0.0, 1.0).movedim(1, -1).cpu()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        if self._offload:
            self.model.to("cpu")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        yield

    def _velocity(self, condition: FluxCondition) -> Velocity:
        dtype = self.model.get_base_model().dtype
        sequence = condition.sequence.to(self.device, dtype)
        pooled = condition.pooled.to(self.device, dtype)
        text_ids = torch.zeros(sequence.shape[1], 3, device=self.device)

        def velocity(x: Tensor, sigma: float) -> Tensor:
            self.check_interrupted()
            batch, _, height, width = x.shape
            tokens = self.model(
                hidden_states=pack_latents(x).to(dtype),
                encoder_hidden_states=sequence.expand(batch, -1, -1),
                pooled_projections=pooled.expand(batch, -1),
                timestep=torch.full((batch,), sigma, device=self.device),
                guidance=torch.full((batch,), self.guidance, device=self.device) if self._guided else None,
                img_ids=image_ids(height, width, self.device),
                txt_ids=text_ids,
                return_dict=False,
            )[0]
            return unpack_latents(tokens, height, width).float()

        return velocity

    # parameters

    def parameters(self) -> list[nn.Parameter]:
        return list(self._lora.values())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu().clone() for name, parameter in self._lora.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ValueError: it belongs to another rank, other targets or another model.
        """
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        if shapes != {name: tuple(parameter.shape) for name, parameter in self._lora.items()}:
            raise ValueError(
                "the saved LoRA does not fit: it was trained with another rank, other targets or another model"
            )
        for name, parameter in self._lora.items():
            parameter.copy_(state[name])

    def export_lora(self) -> dict[str, Tensor]:
        state = {}
        for name, value in self.state_dict().items():
            key = name.removeprefix("base_model.model.").replace(f".{ADAPTER}.", ".")
            state[f"transformer.{key}"] = value * self._scale if ".lora_B." in key else value
        return state

    @torch.no_grad()
    def load_lora(self, state: Mapping[str, Tensor]) -> None:
        """Take over a LoRA in the format of :meth:`export_lora`; see :func:`lora_options` for what fits it.

        Raises:
            ValueError: it has other modules or another rank.
        """
        restored = {}
        for name in self._lora:
            key = "transformer." + name.removeprefix("base_model.model.").replace(f".{ADAPTER}.", ".")
            if key in state:
                restored[name] = state[key].float() / (self._scale if ".lora_B." in key else 1.0)
        if len(restored) != len(state):
            raise ValueError("the LoRA does not fit: it was made for other modules or another model")
        self.load_state_dict(restored)


def lora_options(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Options (rank, alpha, targets) of a policy that can :meth:`~DiffusersFluxPolicy.load_lora` this state.

    Raises:
        ValueError: not a LoRA in diffusers-PEFT naming, or modules of different ranks.
    """
    downs = {key: value for key, value in state.items() if key.endswith(".lora_A.weight")}
    ranks = {value.shape[0] for value in downs.values()}
    if not downs or len(state) != 2 * len(downs) or not all(key.startswith("transformer.") for key in state):
        raise ValueError("not a LoRA in diffusers-PEFT naming (transformer.….lora_A.weight and lora_B.weight)")
    if len(ranks) != 1:
        raise ValueError(f"the LoRA has modules of ranks {sorted(ranks)}; only one rank for all is supported here")
    modules = (key.removeprefix("transformer.").removesuffix(".lora_A.weight") for key in downs)
    rank = ranks.pop()
    return {"rank": rank, "alpha": float(rank), "targets": "^(" + "|".join(map(re.escape, sorted(modules))) + ")$"}


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@contextmanager
def _placed(modules: Sequence[nn.Module], device: torch.device, offload: bool) -> Iterator[None]:
    """Models on ``device`` meanwhile; afterwards back on the CPU when ``offload``."""
    for module in modules:
        module.to(device)
    yield
    if offload:
        for module in modules:
            module.to("cpu")
