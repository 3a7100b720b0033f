"""The demo model family: a FLUX, its text encoder and its VAE, small enough to train on a CPU in minutes.

The files are made here, from a fixed seed, when they are absent: the transformer and the text encoder are random, and
the VAE is set by hand so that latents of unit variance decode to smooth fields of colour. Each file describes itself
in its metadata, so a trained family of other sizes can take its place. ComfyUI's standard loaders read the
transformer and the VAE; its text encoder needs the node of ``nodes/demo.py``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny, FluxTransformer2DModel
    from transformers import CLIPTextModel

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "EGRPO_DEMO_DIR"
METADATA_KEY = "egrpo_demo"
SEED = 20260104

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

_PLACES = ("on a white background", "on a black background", "on a gray background", "on a green background")
DEMO_PROMPTS = tuple(
    f"a {size} {colour} {shape} {_PLACES[(i + j) % len(_PLACES)]}"
    for i, (size, shape) in enumerate(
        [("large", "circle"), ("small", "square"), ("large", "star"), ("small", "triangle"), ("large", "ring")]
    )
    for j, colour in enumerate(("red", "yellow", "blue", "orange", "purple", "pink"))
)
"""Thirty prompts in the family's vocabulary; those held out from the end show a shape that training does not."""

# What ComfyUI's FLUX latent format undoes, so that its model space is this VAE's own latent space.
VAE_SCALE, VAE_SHIFT = 0.3611, 0.1159
LATENT_CHANNELS = 16
COLOUR_PER_LATENT = 0.22
"""RGB (0..1) per unit of latent: two standard deviations stay short of black and white."""
DETAIL_PER_LATENT = 0.12


@dataclass(frozen=True)
class DemoFiles:
    """Paths of the family's safetensors files."""

    flux: Path
    vae: Path
    text_encoder: Path

    def all(self) -> tuple[Path, Path, Path]:
        return self.flux, self.vae, self.text_encoder


def demo_folder(folder: Path | None = None) -> Path:
    """``folder``, else ``EGRPO_DEMO_DIR``, else ``assets/demo`` beside the package."""
    if folder is not None:
        return Path(folder)
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "assets" / "demo"


def demo_paths(folder: Path | None = None) -> DemoFiles:
    """Where the files are or will be; one folder per kind, so that each of ComfyUI's loaders lists only its own."""
    root = demo_folder(folder)
    return DemoFiles(
        flux=root / "diffusion_models" / "egrpo_demo_flux.safetensors",
        vae=root / "vae" / "egrpo_demo_vae.safetensors",
        text_encoder=root / "text_encoders" / "egrpo_demo_text_encoder.safetensors",
    )


def demo_files(folder: Path | None = None) -> DemoFiles:
    """The family's files; those that are absent are made first, the same bytes every time.

    Raises:
        OSError: the folder cannot be written; names the variable that chooses another.
    """
    files = demo_paths(folder)
    makers = ((files.flux, _make_flux), (files.vae, _make_vae), (files.text_encoder, _make_text_encoder))
    for path, make in makers:
        if not path.is_file():
            logger.info("making %s", path.name)
            tensors, description = make()
            _save(path, tensors, description)
    return files


def _save(path: Path, tensors: dict[str, Tensor], description: dict) -> None:
    """Write whole or not at all: two processes may make the same file at once."""
    from safetensors.torch import save_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        os.close(handle)
        temporary = Path(name)
        try:
            # One key only: safetensors keeps metadata in an unordered map, which would vary the bytes.
            metadata = {METADATA_KEY: json.dumps(description, sort_keys=True)}
            save_file({key: tensors[key].contiguous() for key in sorted(tensors)}, temporary, metadata)
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot write the demo model {path}: {error}. Set {FOLDER_VARIABLE} to a folder that can be written"
        ) from error


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


def _make_flux() -> tuple[dict[str, Tensor], dict]:
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        shapes = {key: value.shape for key, value in FluxTransformer2DModel(**FLUX_CONFIG).state_dict().items()}
    generator = torch.Generator().manual_seed(SEED)
    # Sorted, so that the weights depend neither on the library's order of layers nor on its initialisation.
    tensors = {key: _random_weight(key, shapes[key], generator) for key in sorted(shapes)}
    # The output reads back part of what the embedder wrote. E^T E is positive, so this part of v pulls every
    # trajectory towards zero and keeps random weights from running away.
    tensors["proj_out.weight"] = 0.35 * tensors["proj_out.weight"] + 0.3 * tensors["x_embedder.weight"].T
    return tensors, {"config": FLUX_CONFIG}


def _random_weight(key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    if len(shape) == 1:
        # Norms (weights of one dimension) stay near one.
        return 1.0 + 0.1 * noise if key.endswith(".weight") else 0.02 * noise
    gain = 1.0
    if key.startswith("time_text_embed.text_embedder"):
        gain = 1.3
    elif ".norm1" in key or ".norm.linear" in key:
        gain = 0.7
    return noise * (gain / shape[1] ** 0.5)


def load_transformer(path: Path) -> FluxTransformer2DModel:
    """diffusers' FLUX with a demo file's weights, float32, frozen, in eval mode."""
    from diffusers import FluxTransformer2DModel
    from safetensors.torch import load_file

    model = FluxTransformer2DModel(**read_description(path)["config"])
    model.load_state_dict(load_file(path))
    return model.eval().requires_grad_(False)


# --- VAE -------------------------------------------------------------------------------------------------------------


def _make_vae() -> tuple[dict[str, Tensor], dict]:
    """A TAESD set by hand.

    Every block ends in a ReLU, so signed values travel as pairs (positive part, negative part), on which a block with
    zero convolutions is the identity. Latents 0..2 are red, green and blue; latents 3..5 add fine brightness: their
    horizontal and vertical derivatives and their Laplacian, which leave the mean colour alone. The rest is not used.
    """
    from diffusers import AutoencoderTiny

    with torch.device("meta"):
        shapes = {
            key: value.shape for key, value in AutoencoderTiny(latent_channels=LATENT_CHANNELS).state_dict().items()
        }
    tensors = {key: torch.zeros(shape) for key, shape in shapes.items()}

    pairs = 6
    smooth = torch.outer(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 1.0])) / 16
    across = torch.outer(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([-1.0, 0.0, 1.0])) / 4
    bump = torch.tensor([[0.0, -1.0, 0.0], [-1.0, 4.0, -1.0], [0.0, -1.0, 0.0]]) / 2

    read = tensors["decoder.layers.0.weight"]
    for channel in range(pairs):
        read[2 * channel, channel, 1, 1] = 1.0
        read[2 * channel + 1, channel, 1, 1] = -1.0
    first, second, third = (tensors[f"decoder.layers.{index}.weight"] for index in (6, 11, 16))
    for channel in range(pairs):
        kernel = {3: across, 4: across.T, 5: bump}.get(channel, smooth)
        _set_pair(first, channel, kernel)
        _set_pair(second, channel, smooth)
        _set_pair(third, channel, smooth)
    write = tensors["decoder.layers.18.weight"]
    tensors["decoder.layers.18.bias"] += 0.5
    for colour in range(3):
        for channel, amount in [(colour, COLOUR_PER_LATENT)] + [(detail, DETAIL_PER_LATENT) for detail in (3, 4, 5)]:
            write[colour, 2 * channel, 1, 1] = amount
            write[colour, 2 * channel + 1, 1, 1] = -amount

    # Encoder: the mean of every 8x8 block in three halvings, then colour to latent.
    for colour in range(3):
        tensors["encoder.layers.0.weight"][colour, colour, 1, 1] = 1.0
        for index in (2, 6, 10):
            tensors[f"encoder.layers.{index}.weight"][colour, colour, 1:, 1:] = 0.25
        tensors["encoder.layers.14.weight"][colour, colour, 1, 1] = 1.0 / COLOUR_PER_LATENT
        tensors["encoder.layers.14.bias"][colour] = -0.5 / COLOUR_PER_LATENT

    renamed = {_comfy_vae_key(key): value for key, value in tensors.items()}
    renamed["vae_scale"] = torch.tensor(VAE_SCALE)
    renamed["vae_shift"] = torch.tensor(VAE_SHIFT)
    return renamed, {"config": {"latent_channels": LATENT_CHANNELS}}


def _set_pair(weight: Tensor, channel: int, kernel: Tensor) -> None:
    """Let a convolution apply ``kernel`` to the signed value that channels 2c (positive) and 2c + 1 (negative) carry."""
    plus, minus = 2 * channel, 2 * channel + 1
    weight[plus, plus] = weight[minus, minus] = kernel
    weight[plus, minus] = weight[minus, plus] = -kernel


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
    skip_empty_blocks(vae.encoder.layers)
    skip_empty_blocks(vae.decoder.layers)
    return vae.eval().requires_grad_(False)


def skip_empty_blocks(layers: nn.Sequential) -> None:
    """Put a ReLU in place of every TAESD block whose convolutions are zero, which is what such a block computes.

    Works on diffusers' and ComfyUI's layers alike; most of the demo VAE's time would otherwise go into zeros.
    """
    for index, layer in enumerate(layers):
        if hasattr(layer, "fuse") and isinstance(layer.skip, nn.Identity) and not any(p.any() for p in layer.parameters()):
            layers[index] = nn.ReLU()


# --- text encoder ----------------------------------------------------------------------------------------------------


def _make_text_encoder() -> tuple[dict[str, Tensor], dict]:
    """CLIP's text model in ComfyUI's (and OpenAI's) key names."""
    width, wide = TEXT_CONFIG["hidden_size"], TEXT_CONFIG["intermediate_size"]
    shapes = {
        "text_model.embeddings.token_embedding.weight": (TEXT_CONFIG["vocab_size"], width),
        "text_model.embeddings.position_embedding.weight": (TEXT_CONFIG["max_position_embeddings"], width),
        "text_model.final_layer_norm.weight": (width,),
        "text_model.final_layer_norm.bias": (width,),
    }
    linears = [(f"self_attn.{name}", width, width) for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    linears += [("mlp.fc1", wide, width), ("mlp.fc2", width, wide)]
    for layer in range(TEXT_CONFIG["num_hidden_layers"]):
        prefix = f"text_model.encoder.layers.{layer}."
        for name, rows, columns in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            shapes[f"{prefix}{name}.bias"] = (rows,)
        for name in ("layer_norm1", "layer_norm2"):
            shapes[f"{prefix}{name}.weight"] = shapes[f"{prefix}{name}.bias"] = (width,)
    generator = torch.Generator().manual_seed(SEED + 1)
    tensors = {key: _random_weight(key, torch.Size(shapes[key]), generator) for key in sorted(shapes)}
    tensors["text_model.embeddings.token_embedding.weight"] *= width**0.5
    # Weak positions and strong value paths: what is said should count for more than where.
    tensors["text_model.embeddings.position_embedding.weight"] *= 0.3 * width**0.5
    for layer in range(TEXT_CONFIG["num_hidden_layers"]):
        tensors[f"text_model.encoder.layers.{layer}.self_attn.v_proj.weight"] *= 2.0
        tensors[f"text_model.encoder.layers.{layer}.self_attn.out_proj.weight"] *= 2.0
    tensors["text_projection.weight"] = torch.eye(width)
    return tensors, {"config": TEXT_CONFIG, "words": WORDS}


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
