"""A run on disk: settings, metrics, checkpoints, pictures and the LoRA; and the loop that feeds it.

``config.json`` what was asked · ``metrics.jsonl`` one row per iteration and evaluation · ``checkpoints/`` exact states
(safetensors and JSON) · ``images/`` held-out grids and the last rollouts · ``lora.safetensors`` the latest LoRA.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .evaluation import Evaluation, evaluation_rows
from .schedule import Plan
from .trainer import (
    Checkpoint,
    Event,
    Finished,
    Rollouts,
    Started,
    Step,
    Trainer,
    TrainState,
    Warned,
)

logger = logging.getLogger(__name__)

KEEP_CHECKPOINTS = 3
GALLERY_EVERY = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")


class RunError(ValueError):
    """A run folder or name that cannot be used; the message says why."""


def checked_name(name: str) -> str:
    """The name stripped, or :class:`RunError`: letters, digits, space, dot, dash, underscore; never a path."""
    stripped = name.strip()
    if not _NAME.fullmatch(stripped) or ".." in stripped:
        raise RunError(
            f"{name!r} cannot name a run or LoRA: use up to 100 letters, digits, spaces, dots, dashes or underscores, "
            "beginning with a letter or digit"
        )
    return stripped


class Run:
    """One training run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history: list[dict] = self._read_history()

    @classmethod
    def create(cls, root: Path, name: str, config: dict) -> "Run":
        """Make ``root/<name>_00001`` (the first free number) and write ``config.json``.

        Raises:
            RunError: a bad name, or a folder that cannot be written.
        """
        name = checked_name(name)
        try:
            root.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                folder = root / f"{name}_{number:05d}"
                try:
                    folder.mkdir()
                    break
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise RunError(f"cannot make a run folder in {root}: {error.strerror}") from error
        write_text(folder / "config.json", json.dumps(config, indent=2))
        return cls(folder)

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """An existing run.

        Raises:
            RunError: not a run folder.
        """
        if not (folder / "config.json").is_file():
            raise RunError(f"{folder} is not a run: it has no config.json")
        return cls(folder)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def config(self) -> dict:
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))

    # metrics

    def log(self, row: dict) -> None:
        """Append one row to ``metrics.jsonl`` and to :attr:`history`."""
        self.history.append(row)
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _read_history(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                logger.warning("%s: skipped a broken line (the run was probably killed while writing it)", path.name)
        return rows

    def rewind(self, iteration: int) -> None:
        """Forget rows after ``iteration``: a resumed run writes them again."""
        self.history = [row for row in self.history if row["iteration"] <= iteration]
        write_text(self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in self.history))

    # state

    def save_checkpoint(self, state: TrainState) -> Path:
        """Write ``checkpoints/<iteration>`` atomically and keep the newest :data:`KEEP_CHECKPOINTS`."""
        root = self.folder / "checkpoints"
        root.mkdir(exist_ok=True)
        final, partial = root / f"{state.iteration:06d}", root / f".{state.iteration:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, partial / "state.safetensors")
        write_text(partial / "state.json", json.dumps({"iteration": state.iteration, "values": state.values}))
        with open(partial / "state.safetensors", "rb+") as file:
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in self.checkpoints()[:-KEEP_CHECKPOINTS]:
            shutil.rmtree(old)
        return final

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        root = self.folder / "checkpoints"
        return sorted(p for p in root.iterdir() if p.name.isdigit()) if root.is_dir() else []

    def load_checkpoint(self) -> TrainState:
        """The newest readable checkpoint; a broken one is named in the log and the one before is taken.

        Raises:
            RunError: none can be read.
        """
        for folder in reversed(self.checkpoints()):
            try:
                meta = json.loads((folder / "state.json").read_text(encoding="utf-8"))
                return TrainState(meta["iteration"], load_file(folder / "state.safetensors"), meta["values"])
            except (OSError, KeyError, ValueError, SafetensorError) as error:
                logger.warning(
                    "checkpoint %s of %s cannot be read (%s); trying the one before", folder.name, self.name, error
                )
        raise RunError(f"run {self.name} has no readable checkpoint to continue from")

    # pictures

    def save_image(self, name: str, image) -> Path:
        """Write a PIL image to ``images/<name>``."""
        path = self.folder / "images" / name
        path.parent.mkdir(exist_ok=True)
        image.save(path)
        return path


@dataclass
class Outcome:
    """What a run left behind, complete or not."""

    iteration: int
    history: list[dict] = field(default_factory=list)
    before: Evaluation | None = None
    after: Evaluation | None = None
    started: Started | None = None

    def losses(self) -> list[float]:
        """Minus the mean reward of each iteration, for ComfyUI's LOSS_MAP.

        The surrogate's own value is zero by construction (advantages sum to zero while the ratio is 1); drawn, it would
        be rounding noise, and ComfyUI's LossGraphNode divides by its range.
        """
        return [-row["reward"] for row in self.history if "reward" in row]


def execute(
    trainer: Trainer, run: Run, metadata: dict[str, str], on_event: Callable[[Event], None] | None = None
) -> Outcome:
    """Drive a trainer to its end, writing everything to ``run``; whatever ends it early, its state is saved first.

    The LoRA and a checkpoint are written at every :class:`Checkpoint`, at the end, and when the loop is left by an
    exception of any kind, which then continues on its way.
    """
    outcome = Outcome(trainer.iteration, run.history)
    try:
        for event in trainer.events():
            outcome.iteration = trainer.iteration
            _write_event(event, trainer, run, metadata, outcome)
            if on_event:
                on_event(event)
    except BaseException:
        if outcome.started:  # before that nothing was trained
            run.save_checkpoint(trainer.state())
            save_lora(run.folder / "lora.safetensors", trainer, metadata)
            logger.info(
                "E-GRPO run %s stopped at iteration %d; its state and LoRA are saved", run.name, trainer.iteration
            )
        raise
    return outcome


def _write_event(event: Event, trainer: Trainer, run: Run, metadata: dict[str, str], outcome: Outcome) -> None:
    match event:
        case Started():
            outcome.started = event
            logger.info("E-GRPO run %s: %s", run.name, describe_cost(event))
        case Rollouts() if event.iteration % GALLERY_EVERY == 0:
            run.save_image(f"rollouts_{event.iteration:06d}.png", rollout_grid(event, trainer.plan))
        case Step():
            run.log({"iteration": event.iteration, **event.metrics})
        case Evaluation():
            outcome.before = outcome.before or event
            outcome.after = event
            means = {f"eval/{name}": scores.mean().item() for name, scores in event.scores.items()}
            run.log({"iteration": event.iteration, "eval_reward": event.reward, **means})
            run.save_image(f"held_out_{event.iteration:06d}.png", evaluation_grid(event))
        case Checkpoint() | Finished():
            if isinstance(event, Checkpoint):
                run.save_checkpoint(trainer.state())
            save_lora(run.folder / "lora.safetensors", trainer, metadata)
        case Warned():
            logger.warning("E-GRPO run %s, iteration %d: %s", run.name, event.iteration, event.message)


def save_lora(path: Path, trainer: Trainer, metadata: dict[str, str]) -> None:
    """Write the LoRA (its EMA where there is one) in diffusers-PEFT naming, atomically, with metadata."""
    with trainer.averaged_weights():
        tensors = trainer.policy.export_lora()
    save_tensors(path, tensors, {**metadata, "iterations": str(trainer.iteration)})


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file through a temporary file, so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt", **metadata})
    os.replace(partial, path)


def lora_metadata(trainer: Trainer, extra: dict | None = None) -> dict[str, str]:
    """What a LoRA file tells about its making: settings, plan, rewards, prompts' hash; no paths."""
    plan = trainer.plan.to_dict()
    return {
        "egrpo.settings": json.dumps(asdict(trainer.settings)),
        "egrpo.plan": json.dumps({**plan, "steps": [[s.index, s.merge] for s in trainer.plan.steps]}),
        "egrpo.rewards": json.dumps(trainer.rewards.settings()),
        "egrpo.prompts_sha256": trainer.prompts.digest,
        **{f"egrpo.{name}": json.dumps(value) for name, value in (extra or {}).items()},
    }


def write_text(path: Path, text: str) -> None:
    """Write a text file through a temporary file, flushed to the disk before it takes its name."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


# --- words and pictures ----------------------------------------------------------------------------------------------


def describe_cost(started: Started) -> str:
    """One sentence: evaluations, images, memory and estimated time."""
    left = started.iterations - started.first_iteration
    text = (
        f"{left} iterations, {started.forward_evaluations} model evaluations, {started.backward_evaluations} with "
        f"gradient, {started.images} images to decode and score, micro-batch {started.micro_batch}, "
        f"estimated time {duration(started.seconds)}"
    )
    if started.memory:
        text += "; memory: " + ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in started.memory.items())
    return text


def duration(seconds: float) -> str:
    """Seconds as "45 s", "12 min" or "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def rollout_grid(event: Rollouts, plan: Plan):
    """PIL image of the iteration's first prompt: the anchor, then one row per active step with scores."""
    from .plots import image_grid

    return image_grid(
        *_rollout_rows(event.prompts[0], plan), title=f"iteration {event.iteration}: {event.prompts[0].prompt}"
    )


def _rollout_rows(rollout, plan: Plan) -> tuple[list, list[str], list[list[str]]]:
    name, rewards = next(iter(rollout.rewards.items()))
    groups, strides, size = rewards.shape
    images = rollout.images[1:].unflatten(0, (groups, strides, size))[:, 0]
    rows: list[list[Tensor]] = [[rollout.images[0]]]
    labels, cells = ["anchor (ODE)"], [[f"{rollout.anchor_rewards[name]:.3f}"]]
    for k, step in enumerate(plan.steps):
        rows.append(list(images[k]))
        labels.append(f"step {step.index} + {step.merge}")
        cells.append(
            [
                f"{score:.3f} ({advantage:+.1f})"
                for score, advantage in zip(rewards[k, 0].tolist(), rollout.advantages[k].tolist())
            ]
        )
    return rows, labels, cells


def evaluation_grid(event: Evaluation):
    """PIL image of the held-out prompts, one row each."""
    from .plots import image_grid

    title = f"held-out prompts after {event.iteration} iterations: mean reward {event.reward:.4f}"
    return image_grid(*evaluation_rows([("", event)]), title=title)


def comparison_grid(before: Evaluation, after: Evaluation):
    """PIL image: each held-out prompt before and after training from the same noise, with scores."""
    from .plots import image_grid

    title = f"mean reward {before.reward:.4f} before, {after.reward:.4f} after {after.iteration} iterations"
    return image_grid(*evaluation_rows([("before", before), ("after", after)]), title=title)


def report(outcome: Outcome, run: Run) -> str:
    """Plain text for the end of a run."""
    lines = [f"run {run.name}: {outcome.iteration} iterations"]
    if outcome.before and outcome.after:
        lines.append(f"held-out reward {outcome.before.reward:.4f} before, {outcome.after.reward:.4f} after")
        for name in outcome.after.scores:
            first, last = outcome.before.scores[name], outcome.after.scores[name]
            spread = f" (starting std {first.std().item():.4f})" if len(first) > 1 else ""
            lines.append(f"  {name}: {first.mean().item():.4f} -> {last.mean().item():.4f}{spread}")
    steps = [row for row in outcome.history if "seconds" in row]
    if steps:
        total = sum(row["seconds"] for row in steps)
        evaluations = sum(row["evaluations"] for row in steps)
        lines.append(
            f"{evaluations:.0f} model evaluations in {duration(total)} ({evaluations / max(total, 1e-9):.1f} a second), "
            f"{steps[-1]['optimizer_steps']:.0f} optimizer steps"
        )
        worst = max(row["ratio_error"] for row in steps)
        skipped = sum(row["skipped_groups"] for row in steps)
        lines.append(f"largest |ratio - 1| at an update {worst:.2e}; groups skipped for lack of spread {skipped:.0f}")
    return "\n".join(lines)
