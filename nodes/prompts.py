"""E-GRPO Prompts: lines of text or a file of ComfyUI's input folder, split for training and evaluation."""

from __future__ import annotations

import hashlib
from pathlib import Path

import folder_paths
from comfy_api.latest import io

from ..egrpo.prompts import PROMPT_SUFFIXES, PromptError, make_prompt_set, read_prompt_file
from . import types

NO_FILE = "none"
SHOWN_PROMPTS = 8


class EGRPOPrompts(io.ComfyNode):
    """Reads prompts. An output node, so that missing or empty prompts are reported before a model is loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EGRPOPrompts",
            display_name="E-GRPO Prompts",
            category="E-GRPO/prompts",
            description=(
                "Prompts to train on, and prompts held out to measure progress. Write one a line, or put a .txt, "
                ".jsonl, "
                ".json or .csv file into ComfyUI's input folder. Duplicates and blank lines are dropped."
            ),
            search_aliases=["prompt list", "prompt file", "dataset", "captions"],
            is_output_node=True,
            inputs=[
                io.String.Input(
                    "text",
                    default="",
                    multiline=True,
                    placeholder="one prompt per line",
                    tooltip="Prompts, one per line. With a file chosen, these come before the file's.",
                ),
                io.Combo.Input(
                    "file",
                    options=[NO_FILE, *prompt_files()],
                    default=NO_FILE,
                    tooltip=(
                        "A prompt file in ComfyUI's input folder. .txt: one per line; .jsonl, .json, .csv: the field "
                        "prompt, caption or text. Press R to see new files."
                    ),
                ),
                io.Boolean.Input(
                    "shuffle",
                    default=False,
                    tooltip=(
                        "Shuffle by the seed before limit and held_out, which otherwise take the first and the last "
                        "prompts. Training draws in random order anyway."
                    ),
                ),
                io.Int.Input(
                    "limit", default=0, min=0, max=1_000_000, tooltip="Keep at most this many prompts; 0 keeps all."
                ),
                io.Int.Input(
                    "held_out",
                    default=4,
                    min=0,
                    max=10_000,
                    tooltip=(
                        "How many prompts, from the end, to keep for evaluation and never train on. With too few "
                        "prompts evaluation uses the training prompts."
                    ),
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=False,
                    tooltip="Order of the shuffle.",
                ),
            ],
            outputs=[
                types.Prompts.Output("prompts", tooltip="For E-GRPO Train LoRA and Evaluate."),
                io.String.Output("summary", tooltip="Counts and the first prompts of both parts."),
                io.Int.Output("count", tooltip="Number of training prompts."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str = NO_FILE, **_) -> str:
        """Changes with the file's content, so that an edited file is read again under its old name."""
        if file == NO_FILE:
            return ""
        return hashlib.sha256(input_file(file).read_bytes()).hexdigest()

    @classmethod
    def execute(cls, text: str, file: str, shuffle: bool, limit: int, held_out: int, seed: int) -> io.NodeOutput:
        lines = text.splitlines()
        source = "text"
        if file != NO_FILE:
            lines += read_prompt_file(input_file(file))
            source = file if not text.strip() else f"text and {file}"
        prompts = make_prompt_set(lines, shuffle=shuffle, limit=limit, held_out=held_out, seed=seed, source=source)
        shared = "" if set(prompts.held_out).isdisjoint(prompts.train) else " (also trained on)"
        summary = "\n".join(
            [
                f"{len(prompts.train)} training prompts from {source}:",
                *_shown(prompts.train),
                f"{len(prompts.held_out)} prompts for evaluation{shared}:",
                *_shown(prompts.held_out),
            ]
        )
        return io.NodeOutput(prompts, summary, len(prompts.train), ui={"text": [summary]})


def prompt_files() -> list[str]:
    """Names of the files directly in ComfyUI's input folder that can hold prompts."""
    folder = Path(folder_paths.get_input_directory())
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PROMPT_SUFFIXES and p.is_file())


def input_file(name: str) -> Path:
    """Path of ``name`` in ComfyUI's input folder.

    Raises:
        PromptError: the path leads out of that folder, also by a link.
    """
    folder = Path(folder_paths.get_input_directory()).resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder):
        raise PromptError(f"prompt file {name!r} is outside ComfyUI's input folder: put the file into it")
    return path


def _shown(prompts: tuple[str, ...]) -> list[str]:
    more = len(prompts) - SHOWN_PROMPTS
    return [f"  {prompt}" for prompt in prompts[:SHOWN_PROMPTS]] + ([f"  and {more} more"] if more > 0 else [])
