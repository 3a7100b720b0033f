"""E-GRPO Demo Models: the tiny family on the ordinary MODEL, CLIP and VAE sockets."""

from __future__ import annotations

from typing import Any

import comfy.clip_model
import comfy.sd
import comfy.supported_models_base
import comfy.utils
import folder_paths
import torch
from comfy import sd1_clip
from comfy_api.latest import io

from ..egrpo.backends.demo import (
    CHECKPOINTS,
    RL_BASE,
    WordTokenizer,
    demo_files,
    demo_paths,
    drop_empty_channels,
    read_description,
)
from . import types


def register_demo_folder() -> None:
    """Let the standard loaders list the demo transformers and VAE."""
    paths = demo_paths()
    folder_paths.add_model_folder_path("diffusion_models", str(paths.flux.parent))
    folder_paths.add_model_folder_path("vae", str(paths.vae.parent))


def load_clip(path: str) -> comfy.sd.CLIP:
    """The demo text encoder as a CLIP that every standard text node accepts; float32, so that it equals transformers."""
    description = read_description(path)
    config = description["config"]
    special = {"start": config["bos_token_id"], "end": config["eos_token_id"], "pad": config["pad_token_id"]}

    class Tokenizer:
        def __init__(self, embedding_directory: Any = None, tokenizer_data: dict | None = None) -> None:
            self.words = sd1_clip.SDTokenizer(
                tokenizer_path=description,
                max_length=config["max_position_embeddings"],
                embedding_directory=embedding_directory,
                embedding_size=config["hidden_size"],
                embedding_key="egrpo_demo",
                tokenizer_class=_ComfyWordTokenizer,
                tokenizer_data=tokenizer_data or {},
            )

        def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **kwargs: Any) -> dict[str, list]:
            tokens = self.words.tokenize_with_weights(text, return_word_ids, **kwargs)
            return {"l": tokens, "t5xxl": tokens}  # the keys that CLIPTextEncodeFlux works on

        def untokenize(self, tokens: list) -> list:
            return self.words.untokenize(tokens)

        def state_dict(self) -> dict:
            return {}

    class Encoder(torch.nn.Module):
        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: dict | None = None) -> None:
            super().__init__()
            self.text = sd1_clip.SDClipModel(
                device=device,
                dtype=dtype,
                max_length=config["max_position_embeddings"],
                textmodel_json_config=dict(config),
                model_class=_TextModel,
                special_tokens=special,
                return_projected_pooled=False,
                model_options={**(model_options or {}), "model_name": "egrpo_demo"},
            )
            self.dtypes = {dtype}

        def set_clip_options(self, options: dict) -> None:
            self.text.set_clip_options(options)

        def reset_clip_options(self) -> None:
            self.text.reset_clip_options()

        def encode_token_weights(self, tokens: dict[str, list]) -> tuple:
            sequence, pooled = self.text.encode_token_weights(tokens["t5xxl"])[:2]
            if tokens["l"] is not tokens["t5xxl"]:
                pooled = self.text.encode_token_weights(tokens["l"])[1]
            return sequence, pooled

        def load_sd(self, state: dict) -> Any:
            return self.text.load_sd(state)

    state = comfy.utils.load_torch_file(path, safe_load=True)
    return comfy.sd.CLIP(
        comfy.supported_models_base.ClipTarget(Tokenizer, Encoder),
        parameters=sum(value.numel() for value in state.values()),
        state_dict=[state],
        model_options={"dtype": torch.float32},
    )


class _ComfyWordTokenizer(WordTokenizer):
    """What sd1_clip.SDTokenizer asks of a tokenizer."""

    @classmethod
    def from_pretrained(cls, description: dict, **_: Any) -> _ComfyWordTokenizer:
        return cls(description)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.begin, *self.words(text), self.end]}

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def decode(self, ids: list[int], **_: Any) -> str:
        words = {index: word for word, index in self.vocabulary.items()}
        return " ".join(words[index] for index in ids)


class _TextModel(comfy.clip_model.CLIPTextModel):
    """ComfyUI's CLIP text model has OpenAI's vocabulary size built in; this one has the file's."""

    def __init__(self, config: dict, dtype: Any, device: Any, operations: Any) -> None:
        super().__init__(config, dtype, device, operations)
        self.set_input_embeddings(
            operations.Embedding(config["vocab_size"], config["hidden_size"], dtype=dtype, device=device)
        )


class EGRPODemoModels(io.ComfyNode):
    """Loads the demo family."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EGRPODemoModels",
            display_name="E-GRPO Demo Models",
            category="E-GRPO/demo",
            description=(
                "A complete FLUX in miniature (about 3 million parameters, 64 pixels) to try E-GRPO training in "
                "minutes on a CPU. Its MODEL is an ordinary FLUX: samplers, LoRA loaders and FluxGuidance work on it. "
                "It draws coloured shapes from captions and comes with the package; nothing is downloaded."
            ),
            search_aliases=["tiny flux", "egrpo demo", "test models"],
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=list(CHECKPOINTS),
                    default=RL_BASE,
                    tooltip="rl_base: the model to train; it draws whole shapes but confuses about half of what the "
                    "words mean. clean: the same model before that, which follows its prompts; what training can reach.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="Tiny FLUX transformer in float32. Sample it at 64 pixels, shift 3, cfg 1."),
                io.Clip.Output(
                    tooltip="Text encoder that knows colours, simple shapes, sizes and places, such as 'a large red circle "
                    "and a small blue square on a green background'. Use CLIP Text Encode."
                ),
                io.Vae.Output(tooltip="The demo family's VAE: 16 latent channels, 8 pixels per latent, as FLUX's."),
            ],
        )

    @classmethod
    def execute(cls, checkpoint: str = RL_BASE) -> io.NodeOutput:
        files = demo_files(checkpoint=checkpoint)
        model = comfy.sd.load_diffusion_model(str(files.flux), model_options={"dtype": torch.float32})
        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(files.vae), safe_load=True))
        vae.throw_exception_if_invalid()
        drop_empty_channels(vae.first_stage_model.taesd_encoder)
        drop_empty_channels(vae.first_stage_model.taesd_decoder)
        return io.NodeOutput(model, load_clip(str(files.text_encoder)), vae)


class EGRPODemoReward(io.ComfyNode):
    """The demo family's learned reward, with its exact judge beside it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EGRPODemoReward",
            display_name="E-GRPO Demo Reward",
            category="E-GRPO/demo",
            description=(
                "Scores the demo models' pictures by a tiny CLIP, as a preference model scores FLUX's. The exact judge "
                "reads the pictures back; watched beside the CLIP, it tells whether a rising reward means better pictures."
            ),
            search_aliases=["tiny clip", "egrpo demo", "oracle"],
            inputs=[
                io.Combo.Input(
                    "reward",
                    options=["clip", "oracle"],
                    default="clip",
                    tooltip="clip: learned, cosine of picture and prompt. oracle: exact, share of the prompt's facts that "
                    "the picture shows; prompts must be full captions such as 'a large red circle on a green background'.",
                ),
                io.Boolean.Input(
                    "watch_other",
                    default=True,
                    tooltip="Score the other one too, without training on it, to see whether both rise.",
                ),
            ],
            outputs=[types.Reward.Output("reward", tooltip="For E-GRPO Train LoRA, Rollout Preview and Evaluate.")],
        )

    @classmethod
    def execute(cls, reward: str, watch_other: bool) -> io.NodeOutput:
        from ..egrpo.rewards import RewardSet, RewardTerm
        from ..egrpo.rewards.demo import DemoClip, DemoOracle

        clip, judge = DemoClip(), DemoOracle()
        trained, other = (clip, judge) if reward == "clip" else (judge, clip)
        watched = (RewardTerm(other, watch=True),) if watch_other else ()
        return io.NodeOutput(RewardSet((RewardTerm(trained), *watched)))
