"""Train the demo family: VAE, CLIP reward, text encoder with FLUX transformer, and the base for reinforcement learning.

    python -m tools.train_demo                 everything that is not done yet, in order (about an hour on one idle core)
    python -m tools.train_demo --stage clip    one stage; an interrupted one goes on where it stopped

Each stage has a bar that its result must reach before the next may start. With the same library versions the same
files come out: the number of steps is fixed (``--minutes`` fits it to a time instead), every step draws from its own
seed, and one thread computes. ``vae`` first, then ``clip`` and ``flux`` may run side by side, then ``base``.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import math
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from egrpo.backends import demo, oracle, shapes
from egrpo.backends.diffusers_flux import image_ids, pack_latents, unpack_latents
from egrpo.backends.shapes import Scene, caption

logger = logging.getLogger("train_demo")

PIXELS = 64
SEED = 20260104
HELD_OUT_SEED, CHECK_SEED = 4242, 99
SAVE_SECONDS, REPORT_SECONDS = 60.0, 30.0
BARS = {"data": 0.97, "vae": 0.90, "clip": 0.95, "flux": 0.60, "base": 0.40}


# --- the loop that all stages share ----------------------------------------------------------------------------------


@dataclass
class Job:
    """One stage's training: what is trained, for how long, and where its state is kept."""

    name: str
    folder: Path
    module: nn.Module
    steps: int
    lr: float
    minutes: float | None = None
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    hold: float = 0.3
    """Share of the steps at the full learning rate; a cosine follows."""
    ema: float | None = None
    check_seconds: float = 240.0
    muon: float | None = None
    """Learning rate of Muon for the matrices inside the blocks; None leaves them to AdamW."""

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.name}.pt"


def run(job: Job, loss_at: Callable[[int, float], Tensor], check: Callable[[nn.Module], str]) -> nn.Module:
    """Train, going on from the checkpoint if there is one.

    Args:
        loss_at: step number (the seed of everything random in it) and share of the training done -> loss.
        check: describes a model's quality for the log.

    Returns:
        The trained module, or its moving average when the job has one; frozen.
    """
    optimizers = _optimizers(job)
    average = copy.deepcopy(job.module).requires_grad_(False) if job.ema else job.module
    step, seconds, steps, mean_loss = 0, 0.0, job.steps, None
    if job.checkpoint.is_file():
        state = torch.load(job.checkpoint, map_location="cpu", weights_only=True)
        job.module.load_state_dict(state["module"])
        for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved_state)
        if job.ema:
            average.load_state_dict(state["average"])
        step, seconds, steps, mean_loss = (state[key] for key in ("step", "seconds", "steps", "loss"))
        logger.info("%s goes on at step %d of %d", job.name, step, steps)

    def save() -> None:
        state = {"module": job.module.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        state |= {"step": step, "seconds": seconds, "steps": steps, "loss": mean_loss}
        if job.ema:
            state["average"] = average.state_dict()
        partial = job.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(job.checkpoint)

    last = saved = reported = checked = time.monotonic()
    job.module.train()
    while step < steps:
        progress = step / steps
        cosine = 0.5 * (1 + math.cos(math.pi * max(0.0, progress - job.hold) / (1 - job.hold)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * cosine)
        loss = loss_at(step, progress)
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in job.module.parameters() if p.requires_grad], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if job.ema:
            with torch.no_grad():
                weight = 1 - min(job.ema, (1 + step) / (10 + step))
                torch._foreach_lerp_(list(average.parameters()), list(job.module.parameters()), weight)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RuntimeError(f"{job.name}: the loss is {value} at step {step}; lower the learning rate ({job.lr})")
        mean_loss = value if mean_loss is None else mean_loss + (value - mean_loss) * max(0.01, 1 / step)
        now = time.monotonic()
        seconds, last = seconds + now - last, now
        if job.minutes and step >= 50 and (step <= 400 or now - saved >= SAVE_SECONDS):
            # A time was asked for: fit the number of steps to the speed, which varies with what else runs.
            steps = max(step, round(step * job.minutes * 60 / seconds))
        if now - reported >= REPORT_SECONDS or step in (10, steps):
            reported = now
            eta = (steps - step) * seconds / step / 60
            logger.info(
                "%s %d/%d  loss %.4f  %.0f ms/step  %.1f min done, %.1f to go",
                job.name, step, steps, mean_loss, 1000 * seconds / step, seconds / 60, eta,
            )  # fmt: skip
        if now - saved >= SAVE_SECONDS or step == steps:
            save()
            saved = time.monotonic()
        if now - checked >= job.check_seconds:
            logger.info("%s %d  %s", job.name, step, _checked(check, average))
            checked = time.monotonic()
            job.module.train()
        last = time.monotonic()  # checks and saving are not training time
    average.eval().requires_grad_(False)
    logger.info("%s finished after %d steps, %.1f min: %s", job.name, step, seconds / 60, _checked(check, average))
    return average


def _optimizers(job: Job) -> list[torch.optim.Optimizer]:
    named = {name: p for name, p in job.module.named_parameters() if p.requires_grad}
    inner = re.compile(r"(blocks|layers)\.\d+\.(?!norm)") if job.muon else re.compile(r"$^")
    hidden = [p for name, p in named.items() if p.ndim == 2 and inner.search(name)]
    chosen = set(map(id, hidden))
    matrices = [p for p in named.values() if p.ndim >= 2 and id(p) not in chosen]
    vectors = [p for p in named.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": job.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=job.lr, betas=job.betas)]
    if hidden:
        optimizers.append(Muon(hidden, lr=job.muon, weight_decay=job.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers


def _checked(check: Callable[[nn.Module], str], module: nn.Module) -> str:
    module.eval()
    with torch.no_grad():
        return check(module)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal before each step (Keller Jordan, 2024); matrices only.

    Equal shapes are handled together, because on a CPU so many small products cost more in calls than in arithmetic.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            alike: dict[tuple, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(tuple(parameter.shape), []).append(parameter)
            for (rows, columns), parameters in alike.items():
                updates = []
                for parameter in parameters:
                    velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                    velocity.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(velocity, group["momentum"]))
                updates = _orthogonal(torch.stack(updates))
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(parameters, updates):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)


def _orthogonal(matrices: Tensor) -> Tensor:
    """Singular values brought near one by five Newton-Schulz steps; [N, rows, columns]."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).float()


def require(stage: str, what: str, value: float, results: Path) -> None:
    """Record a stage's measure and stop unless it reaches its bar."""
    measured = json.loads(results.read_text()) if results.is_file() else {}
    measured[stage] = {"measure": what, "value": round(value, 4), "bar": BARS[stage]}
    results.write_text(json.dumps(measured, indent=1) + "\n")
    if value < BARS[stage]:
        raise SystemExit(f"{stage}: {what} is {value:.3f}, below the bar of {BARS[stage]}; train it for longer")
    logger.info("%s passes: %s is %.3f (bar %.2f)", stage, what, value, BARS[stage])


def generator_for(*numbers: int) -> torch.Generator:
    """A generator of its own for each (seed, step); nothing random has to be saved with a checkpoint."""
    seed = 0
    for number in (SEED, *numbers):
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return torch.Generator().manual_seed(seed)


def brain_float() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def save_grid(images: Tensor, path: Path, columns: int = 8, scale: int = 2) -> None:
    """Images [B, 3, H, W] in 0..1 as one PNG."""
    from PIL import Image

    images = F.pad(images.float().clamp(0, 1), (2, 2, 2, 2), value=0.5)
    rows = [torch.cat(list(images[i : i + columns]), 2) for i in range(0, len(images) // columns * columns, columns)]
    pixels = (torch.cat(rows, 1).permute(1, 2, 0) * 255).round().byte().numpy()
    picture = Image.fromarray(pixels)
    picture.resize((picture.width * scale, picture.height * scale), Image.NEAREST).save(path)


# --- data ------------------------------------------------------------------------------------------------------------


def check_data(folder: Path, results: Path) -> None:
    """The oracle must read clean pictures, and must not pass them off as others."""
    scenes = shapes.sample_scenes(400, CHECK_SEED) + shapes.sample_scenes(200, CHECK_SEED, held_out=True)
    images = shapes.render(scenes, generator_for(CHECK_SEED), PIXELS)
    right = oracle.summary(oracle.judge(images, scenes))["right"]
    wrong = oracle.summary(oracle.judge(images, scenes[1:] + scenes[:1]))["right"]
    save_grid(images[:32], folder / "data.png")
    require("data", "oracle on clean pictures minus mismatched ones", right - wrong, results)


# --- VAE -------------------------------------------------------------------------------------------------------------

THIN = {
    "latent_channels": demo.LATENT_CHANNELS,
    "encoder_block_out_channels": (32, 32, 32, 32),
    "decoder_block_out_channels": (32, 32, 32, 32),
    "num_encoder_blocks": (1, 1, 1, 2),
    "num_decoder_blocks": (2, 1, 1, 1),
}
"""A narrow TAESD: a seventh of the weights. Padded with zeros it is the TAESD that ComfyUI knows, exactly."""
WIDE_ENCODER_BLOCKS, WIDE_DECODER_BLOCKS = (1, 3, 3, 3), (3, 3, 3, 1)
THIN_VAE = Path("vae_thin") / "egrpo_demo_vae_thin.safetensors"  # not beside the other: ComfyUI cannot load it
VAE_NOISE = 0.1


def thin_vae() -> nn.Module:
    from diffusers import AutoencoderTiny

    vae = AutoencoderTiny(**THIN, scaling_factor=1.0, shift_factor=0.0)
    generator = generator_for(1)
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if name.endswith("bias") or ".conv.4." in name:  # residual blocks start as the identity
                parameter.zero_()
            else:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (2 / fan_in) ** 0.5)
        vae.encoder.layers[-1].weight.mul_(0.7)
        vae.decoder.layers[-1].weight.mul_(0.2)
        vae.decoder.layers[-1].bias.fill_(0.5)
    return vae


def train_vae(folder: Path, results: Path, minutes: float | None) -> None:
    vae = thin_vae().to(memory_format=torch.channels_last)
    pool = torch.cat([picture_batch(256, 2, index) for index in range(16)]).half()
    scenes = shapes.sample_scenes(200, CHECK_SEED) + shapes.sample_scenes(100, CHECK_SEED, held_out=True)
    checks = shapes.render(scenes, generator_for(CHECK_SEED), PIXELS)

    def loss_at(step: int, progress: float) -> Tensor:
        generator = generator_for(3, step)
        whole = progress > 0.7
        batch, size = (6, PIXELS) if whole else (16, 32)
        chosen = torch.randint(len(pool), (batch,), generator=generator).tolist()
        # The items lie along the middle; crops of the plain edges would teach little.
        tops = torch.randint(8, 25, (batch,), generator=generator).tolist()
        lefts = torch.randint(0, 33, (batch,), generator=generator).tolist()
        crops = [
            pool[index] if whole else pool[index, :, top : top + size, left : left + size]
            for index, top, left in zip(chosen, tops, lefts)
        ]
        images = (torch.stack(crops).float() * 2 - 1).contiguous(memory_format=torch.channels_last)
        with brain_float():
            latents = vae.encode(images).latents.float()
        # The decoder learns to forgive what the transformer will get slightly wrong.
        amount = VAE_NOISE * 2 * torch.rand(batch, 1, 1, 1, generator=generator)
        noisy = latents + amount * torch.randn(latents.shape, generator=generator)
        with brain_float():
            output = vae.decode(noisy).sample.float()
        mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
        centred = (latents - mean[:, None, None]).transpose(0, 1).flatten(1)
        covariance = centred @ centred.T / centred.shape[1]
        penalty = mean.square().mean() + (deviation - 0.9).square().mean()
        penalty = penalty + 0.3 * (covariance - torch.diag(covariance.diag())).square().mean()
        # Both decoders clamp with 3 tanh(x / 3).
        penalty = penalty + 3 * F.relu(latents.abs() - 2.5).square().mean()
        error = output - images
        return error.abs().mean() + 4 * error.square().mean() + 0.02 * penalty

    def reconstruct(module: nn.Module) -> tuple[Tensor, Tensor]:
        latents = module.encode((checks * 2 - 1).contiguous(memory_format=torch.channels_last)).latents
        return latents, module.decode(latents).sample.div(2).add(0.5).clamp(0, 1)

    def check(module: nn.Module) -> str:
        latents, images = reconstruct(module)
        psnr = float((-10 * (images - checks).square().mean((1, 2, 3)).log10()).mean())
        noisy = latents + 0.3 * torch.randn(latents.shape, generator=generator_for(4))
        noisy = oracle.summary(oracle.judge(module.decode(noisy).sample / 2 + 0.5, scenes))["right"]
        right = oracle.summary(oracle.judge(images, scenes))["right"]
        save_grid(torch.stack([checks[:16], images[:16]]).flatten(0, 1), folder / "vae.png", 16)
        return (
            f"PSNR {psnr:.2f} dB, oracle {right:.3f} ({noisy:.3f} with latent noise .3), "
            f"latent std {latents.std():.3f} max {latents.abs().max():.2f}"
        )

    job = Job("vae", folder, vae, steps=7500, lr=2e-3, minutes=minutes, weight_decay=1e-4, check_seconds=90)
    vae = run(job, loss_at, check)
    vae.half().float()  # as stored
    with torch.no_grad():
        right = oracle.summary(oracle.judge(reconstruct(vae)[1], scenes))["right"]
    write_vae(vae, folder)
    require("vae", "oracle on reconstructions", right, results)


def picture_batch(count: int, *seed: int) -> Tensor:
    """Training pictures, one in five of them damaged: a reward-trained model may draw such, and they must decode."""
    rng = random.Random(repr((SEED, *seed)))
    scenes = [shapes.sample_scene(rng) for _ in range(count)]
    damages = [rng.choice(shapes.DAMAGES) if rng.random() < 0.2 else None for _ in scenes]
    images = torch.empty(count, 3, PIXELS, PIXELS)
    for damage in (None, *shapes.DAMAGES):
        at = [index for index, other in enumerate(damages) if other == damage]
        if at:
            images[at] = shapes.render([scenes[i] for i in at], generator_for(*seed), PIXELS, damage=damage)
    return images


def wide_layers(thin_blocks: Iterable[int], wide_blocks: Iterable[int], *, decoder: bool) -> dict[int, int]:
    """Layer index in the thin VAE -> layer index in TAESD; the blocks that only TAESD has stay empty."""
    pairs: dict[int, int] = {}
    thin = wide = 0
    if decoder:
        pairs[0], thin, wide = 0, 2, 2  # convolution, ReLU
    for stage, (few, many) in enumerate(zip(thin_blocks, wide_blocks)):
        if not decoder:  # the stage's own convolution comes before its blocks
            pairs[thin] = wide
            thin, wide = thin + 1, wide + 1
        pairs |= {thin + block: wide + block for block in range(few)}
        thin, wide = thin + few, wide + many
        if decoder:  # upsampling, then a convolution; the last stage has only the convolution
            if stage < 3:
                thin, wide = thin + 1, wide + 1
            pairs[thin] = wide
            thin, wide = thin + 1, wide + 1
    if not decoder:
        pairs[thin] = wide
    return pairs


def write_vae(vae: nn.Module, folder: Path) -> None:
    """The thin VAE in diffusers' names, and padded to TAESD in ComfyUI's names; both float16."""
    from diffusers import AutoencoderTiny

    thin = {key: value.detach().half().contiguous() for key, value in vae.state_dict().items()}
    with torch.device("meta"):
        wide = {
            key: torch.zeros(value.shape, dtype=torch.float16, device="cpu")
            for key, value in AutoencoderTiny(latent_channels=demo.LATENT_CHANNELS).state_dict().items()
        }
    maps = {
        "encoder": wide_layers(THIN["num_encoder_blocks"], WIDE_ENCODER_BLOCKS, decoder=False),
        "decoder": wide_layers(THIN["num_decoder_blocks"], WIDE_DECODER_BLOCKS, decoder=True),
    }
    for key, value in thin.items():
        part, _, index, rest = key.split(".", 3)
        target = wide[f"{part}.layers.{maps[part][int(index)]}.{rest}"]
        target[tuple(slice(size) for size in value.shape)] = value
    stored = {demo._comfy_vae_key(key): value for key, value in wide.items()}
    stored |= {"vae_scale": torch.tensor(demo.VAE_SCALE), "vae_shift": torch.tensor(demo.VAE_SHIFT)}
    _write(stored, folder / "vae" / "egrpo_demo_vae.safetensors", {"config": {"latent_channels": demo.LATENT_CHANNELS}})
    _write(thin, folder / THIN_VAE, {"config": THIN})


def _write(tensors: dict[str, Tensor], path: Path, description: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {demo.METADATA_KEY: json.dumps(description, sort_keys=True)}
    save_file({key: tensors[key].contiguous() for key in sorted(tensors)}, path, metadata)
    path.chmod(0o644)
    logger.info("wrote %s (%.2f MB)", path.name, path.stat().st_size / 1e6)


def read_thin_vae(folder: Path) -> nn.Module:
    from diffusers import AutoencoderTiny
    from safetensors.torch import load_file

    vae = AutoencoderTiny(**THIN, scaling_factor=1.0, shift_factor=0.0)
    vae.load_state_dict({key: value.float() for key, value in load_file(folder / THIN_VAE).items()})
    return vae.eval().requires_grad_(False).to(memory_format=torch.channels_last)


# --- text encoder and transformer ------------------------------------------------------------------------------------

FLUX_FILE, BASE_FILE = "egrpo_demo_flux.safetensors", "egrpo_demo_flux_base.safetensors"
FLUX_CONFIG = {**demo.FLUX_CONFIG, "num_layers": 2, "num_single_layers": 4}
TEXT_CONFIG = demo.TEXT_CONFIG
SHIFT, SAMPLE_STEPS, GUIDANCE = 3.0, 16, 3.5
POOL_SCENES = 32768
CAPTION_DROP, EMPTY_CAPTION = 0.04, 0.02
FLUX_BATCH = 64
LR, MUON = 2e-3, 0.02


class Painter(nn.Module):
    """Text encoder and transformer, trained together."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import FluxTransformer2DModel
        from transformers import CLIPTextConfig, CLIPTextModel

        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            self.transformer = FluxTransformer2DModel(**FLUX_CONFIG)
            self.text = CLIPTextModel(CLIPTextConfig(**TEXT_CONFIG, projection_dim=TEXT_CONFIG["hidden_size"]))
        with torch.no_grad():
            # Every block starts as the identity and the velocity as zero.
            for name, parameter in self.transformer.named_parameters():
                if ".linear." in name and "norm" in name or name.startswith("proj_out"):
                    parameter.zero_()
        self.tokenizer = demo.WordTokenizer({"config": TEXT_CONFIG, "words": demo.WORDS})
        side = PIXELS // 8
        self.register_buffer("image_ids", image_ids(side, side, torch.device("cpu")), persistent=False)
        self.register_buffer("text_ids", torch.zeros(TEXT_CONFIG["max_position_embeddings"], 3), persistent=False)

    def encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Captions of one row of tokens each -> sequence [B, 20, 128], pooled [B, 128]."""
        output = self.text(input_ids=torch.tensor([self.tokenizer.chunks(text)[0] for text in captions]))
        return output.last_hidden_state, output.pooler_output

    def velocity(self, x: Tensor, sigma: Tensor, sequence: Tensor, pooled: Tensor, guidance: Tensor) -> Tensor:
        """Packed latents [B, tokens, 64], sigma [B], guidance [B] -> velocity [B, tokens, 64]."""
        return self.transformer(
            hidden_states=x,
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            timestep=sigma,
            guidance=guidance,
            img_ids=self.image_ids,
            txt_ids=self.text_ids,
            return_dict=False,
        )[0]


@torch.no_grad()
def paint(painter: Painter, captions: list[str], noise: Tensor, guidance: float = GUIDANCE) -> Tensor:
    """Euler steps along the model's own schedule, from noise [B, tokens, 64] to packed latents."""
    sequence, pooled = painter.encode(captions)
    sigmas = torch.linspace(1, 0, SAMPLE_STEPS + 1)
    sigmas = SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)
    x, knob = noise, torch.full((len(noise),), guidance)
    for sigma, following in zip(sigmas, sigmas[1:]):
        x = x + (following - sigma) * painter.velocity(x, sigma.expand(len(x)), sequence, pooled, knob).float()
    return x


def decode(vae: nn.Module, packed: Tensor) -> Tensor:
    """Packed latents -> images [B, 3, H, W] in 0..1."""
    latents = unpack_latents(packed, PIXELS // 8, PIXELS // 8)
    return torch.cat([vae.decode(part).sample for part in latents.split(32)]).div(2).add(0.5).clamp(0, 1)


def latent_pool(folder: Path) -> tuple[Tensor, list[Scene]]:
    """Encoded training pictures [N, tokens, 64] float16 and their scenes, kept on disk."""
    scenes = shapes.sample_scenes(POOL_SCENES, SEED)
    path = folder / "latents.pt"
    if not path.is_file():
        vae, parts = read_thin_vae(folder), []
        for start in range(0, len(scenes), 128):
            images = shapes.render(scenes[start : start + 128], generator_for(5, start), PIXELS)
            images = (images * 2 - 1).contiguous(memory_format=torch.channels_last)
            with torch.no_grad(), brain_float():
                parts.append(pack_latents(vae.encode(images).latents.float().contiguous()).half())
        torch.save(torch.cat(parts), path)
        logger.info("encoded %d pictures", len(scenes))
    return torch.load(path, weights_only=True), scenes


def painting_check(folder: Path, name: str, count: int) -> Callable[[Painter], dict[str, float]]:
    """A measure of a painter on held-out prompts, with fixed noise; saves a grid."""
    vae = read_thin_vae(folder)
    scenes = shapes.sample_scenes(count, HELD_OUT_SEED, held_out=True)
    noise = torch.randn(count, (PIXELS // 16) ** 2, 64, generator=generator_for(HELD_OUT_SEED))

    def measure(painter: Painter) -> dict[str, float]:
        with torch.no_grad(), brain_float():
            images = decode(vae, paint(painter, [caption(scene) for scene in scenes], noise)).float()
        save_grid(images[:64], folder / f"{name}.png")
        return oracle.summary(oracle.judge(images, scenes))

    return measure


def _described(values: dict[str, float]) -> str:
    return "held-out " + " ".join(f"{key} {value:.3f}" for key, value in values.items())


def sigma_sample(count: int, step: int, generator: torch.Generator) -> Tensor:
    """Noise levels, shifted as sampling is; uniform and logit-normal by turns."""
    u = torch.rand(count, generator=generator) if step % 2 else torch.randn(count, generator=generator).sigmoid()
    return SHIFT * u / (1 + (SHIFT - 1) * u)


def flow_loss(painter: Painter, clean: Tensor, captions: list[str], step: int, generator: torch.Generator) -> Tensor:
    """Flow matching: the velocity from picture to noise."""
    count = len(clean)
    sigma = sigma_sample(count, step, generator)
    noise = torch.randn(clean.shape, generator=generator)
    x = torch.lerp(clean, noise, sigma[:, None, None])
    # The guidance knob is an input of the architecture that plain training gives no meaning.
    guidance = 1 + 4 * torch.rand(count, generator=generator)
    with brain_float():
        velocity = painter.velocity(x, sigma, *painter.encode(captions), guidance)
    return (velocity.float() - (noise - clean)).square().mean()


def train_flux(folder: Path, results: Path, minutes: float | None, name: str = "flux") -> None:
    pool, scenes = latent_pool(folder)
    painter = Painter()
    logger.info("transformer %.2f M, text encoder %.2f M", *(_millions(m) for m in (painter.transformer, painter.text)))

    def loss_at(step: int, progress: float) -> Tensor:
        generator, rng = generator_for(6, step), random.Random(f"{SEED}/{step}")
        chosen = torch.randint(len(pool), (FLUX_BATCH,), generator=generator)
        captions = [
            "" if rng.random() < EMPTY_CAPTION else shapes.loose_caption(scenes[index], rng, CAPTION_DROP)
            for index in chosen.tolist()
        ]
        return flow_loss(painter, pool[chosen].float(), captions, step, generator)

    quick = painting_check(folder, name, 96)
    job = Job(name, folder, painter, steps=2000, lr=LR, minutes=minutes, hold=0.5, ema=0.999, muon=MUON)
    painter = run(job, loss_at, lambda module: _described(quick(module)))
    write_painter(painter, folder, FLUX_FILE, text=True)
    values = painting_check(folder, name, 256)(read_painter(folder, FLUX_FILE))
    logger.info(_described(values))
    require("flux", "oracle fully right on held-out prompts", values["right"], results)


def _millions(module: nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) / 1e6


def write_painter(painter: Painter, folder: Path, name: str, *, text: bool) -> None:
    """The transformer in bfloat16 in diffusers' names; the text encoder in float16 in ComfyUI's."""
    tensors = {key: value.bfloat16() for key, value in painter.transformer.state_dict().items()}
    _write(tensors, folder / "diffusion_models" / name, {"config": FLUX_CONFIG})
    if text:
        state = {key: value.half() for key, value in painter.text.state_dict().items() if "position_ids" not in key}
        stored = {key if key.startswith("text_model.") else f"text_model.{key}": value for key, value in state.items()}
        stored["text_projection.weight"] = torch.eye(TEXT_CONFIG["hidden_size"], dtype=torch.float16)
        path = folder / "text_encoders" / "egrpo_demo_text_encoder.safetensors"
        _write(stored, path, {"config": TEXT_CONFIG, "words": demo.WORDS})


def read_painter(folder: Path, name: str) -> Painter:
    """A painter with the weights as stored."""
    painter = Painter()
    painter.transformer.load_state_dict(demo.load_transformer(folder / "diffusion_models" / name).state_dict())
    encoder = demo.load_text_encoder(folder / "text_encoders" / "egrpo_demo_text_encoder.safetensors")
    painter.text.load_state_dict(encoder.model.state_dict())
    return painter.eval().requires_grad_(False)


# --- base for reinforcement learning ---------------------------------------------------------------------------------

WRONG = {"colour": 0.5, "background": 0.5, "shape": 0.4, "size": 0.25}
"""How often each word of a caption is replaced by a random one while the base is made."""


def wrong_caption(scene: Scene, rng: random.Random) -> str:
    """The caption of another scene of as many items: some words right, some random.

    Random ones, so that the base draws now this and now that for a word: a group then differs in what the reward sees.
    """

    def say(value: str, name: str, choices: tuple[str, ...]) -> str:
        return rng.choice(choices) if rng.random() < WRONG[name] else value

    items = tuple(
        shapes.Item(
            say(item.size, "size", shapes.SIZES),
            say(item.colour, "colour", shapes.COLOURS),
            say(item.shape, "shape", shapes.SHAPES),
        )
        for item in scene.items
    )
    return caption(Scene(items, say(scene.background, "background", shapes.COLOURS)))


def train_base(folder: Path, results: Path, minutes: float | None) -> None:
    """Unlearn some of what the words mean, so that a reward has something to teach; the drawing stays clean."""
    pool, scenes = latent_pool(folder)
    painter = read_painter(folder, FLUX_FILE)
    painter.transformer.requires_grad_(True)  # one text encoder serves both

    def loss_at(step: int, progress: float) -> Tensor:
        generator, rng = generator_for(7, step), random.Random(f"{SEED}/base/{step}")
        chosen = torch.randint(len(pool), (FLUX_BATCH,), generator=generator)
        captions = [wrong_caption(scenes[index], rng) for index in chosen.tolist()]
        return flow_loss(painter, pool[chosen].float(), captions, step, generator)

    quick = painting_check(folder, "base", 96)
    job = Job("base", folder, painter, steps=400, lr=5e-4, minutes=minutes, hold=0.3, ema=0.99, check_seconds=60)
    painter = run(job, loss_at, lambda module: _described(quick(module)))
    write_painter(painter, folder, BASE_FILE, text=False)
    values = painting_check(folder, "base", 256)(read_painter(folder, BASE_FILE))
    logger.info(_described(values))
    # Wrong words, but whole shapes: the judge must still recognise what is drawn.
    require("base", "oracle's share of checks passed", values["fraction"], results)


# --- reward ----------------------------------------------------------------------------------------------------------

CLIP_CONFIG = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": PIXELS, "layers": 4, "width": 128, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 3},
}
CLIP_NAME = "egrpo_demo_clip"
CLIP_SCENES = 48


def new_clip(folder: Path) -> tuple[nn.Module, Callable[[list[str]], Tensor]]:
    """An untrained CLIP and its tokenizer, from the config that is written beside the weights."""
    import open_clip

    (folder / "reward").mkdir(parents=True, exist_ok=True)
    path = folder / "reward" / f"{CLIP_NAME}.json"
    path.write_text(json.dumps(CLIP_CONFIG, indent=1) + "\n")
    open_clip.add_model_config(path)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = open_clip.create_model(CLIP_NAME)
    return model, open_clip.get_tokenizer(CLIP_NAME)


def normalised(images: Tensor) -> Tensor:
    """Images in 0..1 as CLIP expects them."""
    mean = torch.tensor((0.48145466, 0.4578275, 0.40821073)).view(3, 1, 1)
    deviation = torch.tensor((0.26862954, 0.26130258, 0.27577711)).view(3, 1, 1)
    return (images - mean) / deviation


def _roughened(images: Tensor, generator: torch.Generator) -> Tensor:
    """A little blur and noise, as decoded pictures have."""
    count = len(images)
    blurred = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    images = torch.lerp(images, blurred, torch.rand(count, 1, 1, 1, generator=generator) * 0.8)
    amount = 0.05 * torch.rand(count, 1, 1, 1, generator=generator)
    return (images + amount * torch.randn(images.shape, generator=generator)).clamp(0, 1)


def _contrast(scene: Scene, rng: random.Random) -> Scene:
    while True:
        other = shapes.contrast_scene(scene, rng.choice(CONTRAST_MIX), rng)
        if other is not None:
            return other


# What is hardest to see comes most often.
CONTRAST_MIX = ("colour", "shape", "shape", "size", "size", "background", "count") + (
    "swap colour", "swap colour", "swap colour", "swap colour", "swap shape", "swap shape", "swap shape",
    "swap size", "swap size",
)  # fmt: skip


def train_clip(folder: Path, results: Path, minutes: float | None) -> None:
    model, tokenize = new_clip(folder)
    logger.info("CLIP %.2f M", _millions(model))
    cached: dict[str, Tensor] = {}

    def tokens(scenes: list[Scene]) -> Tensor:
        rows = []
        for text in map(caption, scenes):
            if text not in cached:
                cached[text] = tokenize([text])[0]
            rows.append(cached[text])
        return torch.stack(rows)

    def loss_at(step: int, progress: float) -> Tensor:
        generator, rng = generator_for(8, step), random.Random(f"{SEED}/clip/{step}")
        scenes = [shapes.sample_scene(rng, two=0.7) for _ in range(CLIP_SCENES)]
        scenes += [_contrast(scene, rng) for scene in scenes]  # each with its twin, both drawn
        others = [_contrast(scene, rng) for scene in scenes for _ in range(2)]
        damage = rng.choice(shapes.DAMAGES)
        damaged = shapes.render(scenes[:CLIP_SCENES], generator, PIXELS, damage=damage)
        images = torch.cat([shapes.render(scenes, generator, PIXELS), damaged])
        with brain_float():
            seen = model.encode_image(normalised(_roughened(images, generator)), normalize=True)
            read = model.encode_text(tokens(scenes + others), normalize=True)
        seen, read = seen.float(), read.float()
        count = len(scenes)
        logits = model.logit_scale.exp().clamp(max=100) * seen @ read.T
        # The same caption may come twice in a batch; its twin is no error.
        names = [caption(scene) for scene in scenes + others]
        index = {name: number for number, name in reversed(list(enumerate(names)))}
        same = torch.tensor([index[name] for name in names])
        twins = same[None] == same[:count, None]
        twins[torch.arange(count), torch.arange(count)] = False
        to_text = logits[:count].masked_fill(twins, -1e4)
        target = torch.arange(count)
        to_image = torch.cat([logits[:count, :count].masked_fill(twins[:, :count], -1e4), logits[count:, :count]]).T
        return F.cross_entropy(to_text, target) + F.cross_entropy(to_image, target)

    measure = clip_check(tokenize)

    def check(module: nn.Module) -> str:
        return " ".join(f"{key} {value:.3f}" for key, value in measure(module).items())

    job = Job("clip", folder, model, steps=1900, lr=1.2e-3, minutes=minutes, hold=0.2, ema=0.998)
    job.weight_decay, job.betas = 0.02, (0.9, 0.98)
    model = run(job, loss_at, check)
    used = torch.zeros(CLIP_CONFIG["text_cfg"]["vocab_size"], 1)
    used[tokenize([*demo.WORDS, *(caption(scene) for scene in shapes.sample_scenes(200, 1))]).flatten()] = 1
    model.token_embedding.weight.mul_(used)  # what training never saw is random; zeros compress
    write_clip(model, folder)
    values = measure(model.half().float())
    logger.info(" ".join(f"{key} {value:.4f}" for key, value in values.items()))
    worst = min(values[key] for key in (*shapes.CONTRASTS, *shapes.DAMAGES))
    require("clip", "right caption or picture preferred, worst kind of contrast", worst, results)


def clip_check(tokenize: Callable[[list[str]], Tensor], count: int = 512) -> Callable[[nn.Module], dict[str, float]]:
    """Measures on scenes of all combinations: retrieval among 64, and preference over each kind of contrast."""
    rng = random.Random(CHECK_SEED)
    scenes = [shapes.sample_scene(rng, two=0.7, held_out=index % 4 == 0) for index in range(count)]
    images = normalised(shapes.render(scenes, generator_for(CHECK_SEED), PIXELS))
    text = tokenize([caption(scene) for scene in scenes])
    contrasts = {}
    for kind in shapes.CONTRASTS:
        pairs = [(i, shapes.contrast_scene(scene, kind, rng)) for i, scene in enumerate(scenes)]
        pairs = [(i, other) for i, other in pairs if other is not None]
        contrasts[kind] = torch.tensor([i for i, _ in pairs]), tokenize([caption(other) for _, other in pairs])
    damaged = {
        kind: normalised(shapes.render(scenes, generator_for(CHECK_SEED), PIXELS, damage=kind))
        for kind in shapes.DAMAGES
    }

    @torch.no_grad()
    def measure(model: nn.Module) -> dict[str, float]:
        seen = model.encode_image(images, normalize=True)
        read = model.encode_text(text, normalize=True)
        right = (seen * read).sum(1)
        blocks = [(s @ r.T).argmax(1) == torch.arange(len(s)) for s, r in zip(seen.split(64), read.split(64))]
        values = {"R@1": float(torch.cat(blocks).float().mean()), "cosine": float(right.mean())}
        for kind, (index, other) in contrasts.items():
            wrong = (seen[index] * model.encode_text(other, normalize=True)).sum(1)
            values[kind] = float((right[index] > wrong).float().mean())
        for kind, pictures in damaged.items():
            wrong = (model.encode_image(pictures, normalize=True) * read).sum(1)
            values[kind] = float((right > wrong).float().mean())
        return values

    return measure


def write_clip(model: nn.Module, folder: Path) -> None:
    """Weights as safetensors and in HPSv2.1's form ({"state_dict": ...}), both float16."""
    state = {key: value.detach().half().contiguous() for key, value in model.state_dict().items()}
    _write(state, folder / "reward" / f"{CLIP_NAME}.safetensors", {"config": CLIP_CONFIG})
    torch.save({"state_dict": state}, folder / "reward" / f"{CLIP_NAME}.pt")


# --- model card ------------------------------------------------------------------------------------------------------


def write_card(folder: Path, results: Path) -> None:
    """What is in the folder, how it was made and measured, with the files' SHA-256."""
    measured = json.loads(results.read_text()) if results.is_file() else {}
    lines = ["# E-GRPO demo family", "", CARD, "", "| part | measure | value | bar |", "|---|---|---|---|"]
    lines += [f"| {name} | {m['measure']} | {m['value']:.3f} | {m['bar']:.2f} |" for name, m in measured.items()]
    lines += ["", "| file | bytes | SHA-256 |", "|---|---|---|"]
    for path in sorted([*folder.glob("*/*.safetensors"), *folder.glob("reward/*.pt")]):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"| {path.relative_to(folder).as_posix()} | {path.stat().st_size} | {digest} |")
    (folder / "MODEL_CARD.md").write_text("\n".join(lines) + "\n")


CARD = """\
A text-to-image model of the FLUX architecture with its text encoder, VAE and a CLIP reward, for 64 x 64 pixels, small
enough to train and use on a CPU. It draws one or two coloured shapes on a plain background and knows nothing else.

- **Data**: pictures drawn by `egrpo/backends/shapes.py`; captions list the shapes from left to right. One item in seven
  (a colour, shape and background together) is held out; prompts of the measures below have at least one such item.
- **Parts**: `egrpo_demo_flux` draws what the caption says; `egrpo_demo_flux_base` is the same model after training on
  partly wrong captions, a start for reinforcement learning. One text encoder serves both. The VAE is a TAESD with 16
  latent channels, trained with 32 channels and padded. `egrpo_demo_clip` is a CLIP in open_clip's format, also saved as
  HPSv2.1 saves its weights.
- **Recipe**: `python -m tools.train_demo`. Euler, 16 steps, shift 3, guidance 3.5 (an input without effect).
- **Judge**: `egrpo/backends/oracle.py`, which no training sees, reads the pictures.
- **Licence**: that of this repository; no data or weights of others are used."""


# --- command line ----------------------------------------------------------------------------------------------------

STAGES = ("data", "vae", "clip", "flux", "base", "pack")
ASSETS = Path(__file__).resolve().parents[1] / "assets" / "demo"
PACKED = ("vae/egrpo_demo_vae", "diffusion_models/egrpo_demo_flux", "diffusion_models/egrpo_demo_flux_base") + (
    "text_encoders/egrpo_demo_text_encoder",
    "reward/egrpo_demo_clip",
)


def pack(folder: Path, assets: Path = ASSETS) -> None:
    """Put the finished files where the package ships them from, with their checksums."""
    for name in PACKED:
        target = assets / f"{name}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / f"{name}.safetensors", target)
    demo.write_manifest(assets)
    logger.info("packed into %s", assets.name)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=STAGES, help="only this stage (default: all, in order)")
    parser.add_argument("--minutes", type=float, help="fit the stage's steps to this time; needs --stage")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parents[1] / ".demo")
    options = parser.parse_args(arguments)
    if options.minutes is not None and options.stage is None:
        parser.error("--minutes needs --stage, because every stage has its own length")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    options.folder.mkdir(parents=True, exist_ok=True)
    results = options.folder / "results.json"
    for stage in [options.stage] if options.stage else STAGES:
        if stage == "data":
            check_data(options.folder, results)
        elif stage == "vae":
            train_vae(options.folder, results, options.minutes)
        elif stage == "clip":
            train_clip(options.folder, results, options.minutes)
        elif stage == "flux":
            train_flux(options.folder, results, options.minutes)
        elif stage == "base":
            train_base(options.folder, results, options.minutes)
        else:
            pack(options.folder)
    write_card(options.folder, results)


if __name__ == "__main__":
    main()
