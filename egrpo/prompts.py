"""Prompt sets: reading, splitting, and a deterministic order."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Sequence

PROMPT_SUFFIXES = (".txt", ".jsonl", ".json", ".csv")
PROMPT_FIELDS = ("prompt", "caption", "text")


class PromptError(ValueError):
    """Prompts that cannot be used; the message says which and why."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts to train on and prompts held out for evaluation; what an EGRPO_PROMPTS socket carries."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    source: str = "text"

    @property
    def digest(self) -> str:
        """SHA-256 of all prompts in order; written into the LoRA's metadata."""
        text = json.dumps([self.train, self.held_out], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def batch(self, iteration: int, size: int, seed: int) -> list[str]:
        """The ``size`` prompts of one iteration: an endless pass over reshuffled epochs, a function of its arguments.

        No cursor has to be saved: the prompts of iteration k are the same in a resumed run.
        """
        chosen = []
        for position in range(iteration * size, (iteration + 1) * size):
            epoch, offset = divmod(position, len(self.train))
            order = list(range(len(self.train)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            chosen.append(self.train[order[offset]])
        return chosen


def make_prompt_set(
    prompts: Iterable[str],
    *,
    shuffle: bool = False,
    limit: int = 0,
    held_out: int = 4,
    seed: int = 0,
    source: str = "text",
) -> PromptSet:
    """Clean, shuffle, limit and split prompts. Duplicates are dropped, so that a held-out prompt is never trained on.

    Args:
        limit: keep at most this many (0 = all).
        held_out: how many to keep for evaluation, taken from the end. When there are too few prompts to hold any out
            (fewer than held_out + 1), evaluation uses the training prompts.

    Raises:
        PromptError: no prompt left.
    """
    unique = list(dict.fromkeys(text.strip() for text in prompts if text.strip()))
    if not unique:
        raise PromptError(f"no prompts in {source}: give at least one line of text")
    if shuffle:
        random.Random(seed).shuffle(unique)
    if limit > 0:
        unique = unique[:limit]
    if 0 < held_out < len(unique):
        return PromptSet(tuple(unique[:-held_out]), tuple(unique[-held_out:]), source)
    return PromptSet(tuple(unique), tuple(unique[: max(held_out, 1)]), source)


def read_prompt_file(path: Path) -> list[str]:
    """Prompts of a .txt (one a line), .jsonl, .json (a list) or .csv file.

    Objects and CSV rows are read by the first field of ``prompt``, ``caption`` or ``text`` that they have.

    Raises:
        PromptError: missing file, unknown suffix, broken content, or a row without a prompt; names the line.
    """
    if path.suffix.lower() not in PROMPT_SUFFIXES:
        raise PromptError(f"{path.name}: prompt files end in {', '.join(PROMPT_SUFFIXES)}")
    if not path.is_file():
        raise PromptError(f"prompt file {path.name} does not exist (in ComfyUI prompt files lie in the input folder)")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path.name} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return text.splitlines()
    if suffix == ".csv":
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return [_prompt_of(row, f"{path.name} line {rows.line_num}") for row in rows]
    if suffix == ".json":
        items = _parsed(text, path.name)
        if not isinstance(items, list):
            raise PromptError(f"{path.name} must hold a JSON list of prompts, found {type(items).__name__}")
        return [_prompt_of(item, f"{path.name} item {n}") for n, item in enumerate(items)]
    # Not splitlines(), which would also split at the line separators that JSON allows inside strings.
    lines = [(f"{path.name} line {n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [_prompt_of(_parsed(line, where), where) for where, line in lines]


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where} is not valid JSON: {error}") from None


def _prompt_of(item: object, where: str) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        for name in PROMPT_FIELDS:
            if isinstance(item.get(name), str):
                return item[name]
        raise PromptError(
            f"{where} has no {' / '.join(PROMPT_FIELDS)} field, only {', '.join(map(str, item)) or 'nothing'}"
        )
    raise PromptError(f"{where} is {type(item).__name__}, not a prompt")


def checked_prompts(prompts: Sequence[str], what: str) -> None:
    """Raise :class:`PromptError` when a prompt list is empty or holds an empty prompt."""
    if not prompts:
        raise PromptError(f"no {what} prompts")
    for n, prompt in enumerate(prompts):
        if not prompt.strip():
            raise PromptError(f"{what} prompt {n} is empty")
