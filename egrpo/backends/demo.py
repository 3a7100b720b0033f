"""The demo model family: a FLUX, its text encoder, its VAE and a CLIP reward, trained on drawn shapes.

Everything is small enough to train by E-GRPO on a CPU in minutes, and lies in the real file formats: ComfyUI's standard
loaders read the transformers and the VAE (a TAESD); the text encoder needs the node of ``nodes/demo.py``. Each file
describes itself in its metadata, and its checksum is compared when it is used. ``tools/train_demo.py`` made the files;
``assets/demo/MODEL_CARD.md`` says how.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .shapes import caption, sample_scenes

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny, FluxTransformer2DModel
    from transformers import CLIPTextModel

FOLDER_VARIABLE = "EGRPO_DEMO_DIR"
METADATA_KEY = "egrpo_demo"
MANIFEST = "manifest.json"

FLUX_CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 1,
    "joint_attention_dim": 128,
    "pooled_projection_dim": 128,
    "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}
TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
    "hidden_act": "quick_gelu",
    "bos_token_id": 1,
    "eos_token_id": 3,  # transformers pools differently when this is 2
    "pad_token_id": 3,
}
WORDS = (
    "a an and on background small large tiny big the of with left right above below next to two red green blue yellow "
    "purple orange white black gray pink circle square triangle star ring shape image picture one side by in at top bottom"
).split()

RL_BASE, CLEAN = "rl_base", "clean"
CHECKPOINTS = {RL_BASE: "egrpo_demo_flux_base.safetensors", CLEAN: "egrpo_demo_flux.safetensors"}
"""The transformer to train (draws whole shapes, confuses half the words) and the one it can catch up with."""
PIXELS = 64

TRAIN_PROMPTS = tuple(caption(scene) for scene in sample_scenes(192, seed=1))
HELD_OUT_PROMPTS = tuple(caption(scene) for scene in sample_scenes(16, seed=2, held_out=True))
"""Combinations of colour, shape and background that neither the transformer nor a run on TRAIN_PROMPTS ever sees."""
DEMO_PROMPTS = (*TRAIN_PROMPTS, *HELD_OUT_PROMPTS)

# What ComfyUI's FLUX latent format undoes, so that its model space is this VAE's own latent space.
VAE_SCALE, VAE_SHIFT = 0.3611, 0.1159
LATENT_CHANNELS = 16

class DemoError(RuntimeError):
    """A file of the family is missing or damaged; the message says which and what to do."""


@dataclass(frozen=True)
class DemoFiles:
    """Paths of the family's safetensors files."""

    flux: Path
    vae: Path
    text_encoder: Path
    clip: Path


def demo_folder(folder: Path | None = None) -> Path:
    """``folder``, else ``EGRPO_DEMO_DIR``, else ``assets/demo`` beside the package."""
    if folder is not None:
        return Path(folder)
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "assets" / "demo"


def demo_paths(folder: Path | None = None, checkpoint: str = RL_BASE) -> DemoFiles:
    """Where the files are; one folder per kind, so that each of ComfyUI's loaders lists only its own.

    Raises:
        ValueError: unknown checkpoint.
    """
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"unknown demo checkpoint {checkpoint!r}: choose one of {', '.join(CHECKPOINTS)}")
    root = demo_folder(folder)
    return DemoFiles(
        flux=root / "diffusion_models" / CHECKPOINTS[checkpoint],
        vae=root / "vae" / "egrpo_demo_vae.safetensors",
        text_encoder=root / "text_encoders" / "egrpo_demo_text_encoder.safetensors",
        clip=root / "reward" / "egrpo_demo_clip.safetensors",
    )


def demo_files(folder: Path | None = None, checkpoint: str = RL_BASE) -> DemoFiles:
    """The family's files, each compared with its checksum in ``manifest.json``.

    Raises:
        ValueError: unknown checkpoint.
        DemoError: a file is missing or differs; names it.
    """
    files = demo_paths(folder, checkpoint)
    root = demo_folder(folder)
    manifest_path = root / MANIFEST
    if not manifest_path.is_file():
        raise DemoError(
            f"the demo models are not in {root.name} ({MANIFEST} is missing): install the package again, or set "
            f"{FOLDER_VARIABLE} to the folder that holds them"
        )
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    for path in (files.flux, files.vae, files.text_encoder, files.clip):
        _compare(path, manifest.get(path.relative_to(root).as_posix()))
    return files


def _compare(path: Path, expected: str | None) -> None:
    if not path.is_file():
        raise DemoError(f"{path.name} of the demo models is missing: install the package again")
    if _sha256(path, path.stat().st_mtime_ns) != expected:
        raise DemoError(
            f"{path.name} of the demo models is damaged (its checksum differs from {MANIFEST}): install the package again"
        )


@lru_cache(maxsize=32)
def _sha256(path: Path, modified: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(folder: Path) -> None:
    """Record the checksum of every safetensors file below ``folder``."""
    digests = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }
    (folder / MANIFEST).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def read_description(path: Path) -> dict:
    """What a demo file says of itself: ``config``, and ``words`` for a text encoder.

    Raises:
        ValueError: a file of another kind.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(METADATA_KEY)
    if text is None:
        raise ValueError(f"{Path(path).name} is not a file of the demo family: its metadata has no {METADATA_KEY}")
    return json.loads(text)


# --- transformer -----------------------------------------------------------------------------------------------------


def load_transformer(path: Path) -> FluxTransformer2DModel:
    """diffusers' FLUX with a demo file's weights, float32, frozen, in eval mode."""
    from diffusers import FluxTransformer2DModel
    from safetensors.torch import load_file

    model = FluxTransformer2DModel(**read_description(path)["config"])
    model.load_state_dict(load_file(path))
    return model.eval().requires_grad_(False)


# --- VAE -------------------------------------------------------------------------------------------------------------


def _comfy_vae_key(key: str) -> str:
    """diffusers ``decoder.layers.N.…`` -> ComfyUI ``taesd_decoder.(N+1).…``, whose layer 0 is the clamp."""
    part, _, index, rest = key.split(".", 3)
    return f"taesd_{part}.{int(index) + (part == 'decoder')}.{rest}"


def load_vae(path: Path) -> AutoencoderTiny:
    """diffusers' AutoencoderTiny with a demo file's weights; its latents are the model space, images are in -1..1."""
    from diffusers import AutoencoderTiny
    from safetensors.torch import load_file

    vae = AutoencoderTiny(**read_description(path)["config"], scaling_factor=1.0, shift_factor=0.0)
    stored = load_file(path)
    vae.load_state_dict({key: stored[_comfy_vae_key(key)].to(torch.float32) for key in vae.state_dict()})
    drop_empty_channels(vae.encoder.layers)
    drop_empty_channels(vae.decoder.layers)
    return vae.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def drop_empty_channels(layers: nn.Sequential) -> None:
    """Take away what the file only holds because TAESD is wider than the demo VAE: channels and blocks of zeros.

    Works on diffusers' and ComfyUI's layers alike. A block of zeros is the ReLU that it computes; most of the time
    would otherwise go into zeros.
    """
    for index, layer in enumerate(layers):
        if hasattr(layer, "fuse") and isinstance(layer.skip, nn.Identity) and not any(p.any() for p in layer.parameters()):
            layers[index] = nn.ReLU()
    convolutions = [module for module in layers.modules() if isinstance(module, nn.Conv2d)]
    wide = max(conv.out_channels for conv in convolutions)
    inner = [conv for conv in convolutions if conv.out_channels == wide]
    used = [conv.weight.flatten(1).any(1) | (False if conv.bias is None else conv.bias != 0) for conv in inner]
    width = 1 + int(torch.stack(used).any(0).nonzero().max())
    for conv in convolutions:
        rows = width if conv.out_channels == wide else conv.out_channels
        columns = width if conv.in_channels == wide else conv.in_channels
        conv.weight = nn.Parameter(conv.weight.detach()[:rows, :columns].clone(), requires_grad=False)
        if conv.bias is not None:
            conv.bias = nn.Parameter(conv.bias.detach()[:rows].clone(), requires_grad=False)
        conv.out_channels, conv.in_channels = rows, columns


# --- text encoder ----------------------------------------------------------------------------------------------------


class WordTokenizer:
    """One token per known word; the others are token 0. Words are runs of letters and digits, in lower case."""

    def __init__(self, description: dict) -> None:
        config = description["config"]
        self.begin, self.end = config["bos_token_id"], config["eos_token_id"]
        self.length = config["max_position_embeddings"]
        self.vocabulary = {"<unknown>": 0, "<start>": self.begin, "<end>": self.end}
        self.vocabulary |= {word: index for index, word in enumerate(description["words"], 4)}

    def words(self, text: str) -> list[int]:
        """Token ids of the words of ``text``, without start and end."""
        return [self.vocabulary.get(word, 0) for word in re.findall(r"[a-z0-9]+", text.lower())]

    def chunks(self, text: str) -> list[list[int]]:
        """Token ids in rows of the encoder's length, padded with the end token; as many rows as the words need."""
        words, room = self.words(text), self.length - 2
        pieces = [words[start : start + room] for start in range(0, len(words), room)] or [[]]
        return [[self.begin, *piece, *[self.end] * (self.length - 1 - len(piece))] for piece in pieces]


@dataclass(frozen=True)
class DemoTextEncoder:
    """The text encoder with its vocabulary, on transformers' CLIPTextModel."""

    model: CLIPTextModel
    tokenizer: WordTokenizer


def load_text_encoder(path: Path) -> DemoTextEncoder:
    """transformers' CLIPTextModel with a demo file's weights, float32, frozen, in eval mode."""
    from safetensors.torch import load_file
    from transformers import CLIPTextConfig, CLIPTextModel

    description = read_description(path)
    model = CLIPTextModel(CLIPTextConfig(**description["config"], projection_dim=description["config"]["hidden_size"]))
    stored = load_file(path)
    # transformers 5 dropped the prefix that ComfyUI and transformers 4 keep; position ids are a buffer in some versions.
    wanted = [key for key in model.state_dict() if not key.endswith("position_ids")]
    state = {key: stored[key if key.startswith("text_model.") else f"text_model.{key}"].float() for key in wanted}
    model.load_state_dict(state, strict=False)
    return DemoTextEncoder(model.eval().requires_grad_(False), WordTokenizer(description))


@torch.no_grad()
def encode_text(encoder: DemoTextEncoder, prompt: str) -> tuple[Tensor, Tensor]:
    """(sequence [1, 20 n, 128], pooled [1, 128]) float32 of a prompt; n rows of 20 tokens for 18 words each.

    Equals ComfyUI's CLIPTextEncode on the demo CLIP, but for its weight syntax: ``(red:1.3)`` is plain text here.
    """
    output = encoder.model(input_ids=torch.tensor(encoder.tokenizer.chunks(prompt)))
    return output.last_hidden_state.flatten(0, 1)[None], output.pooler_output[:1]
