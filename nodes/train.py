"""E-GRPO Train LoRA: the whole loop inside one node."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io, ui
from server import PromptServer

from ..egrpo.evaluation import Evaluation
from ..egrpo.lora import TARGET_CHOICES
from ..egrpo.objective import RATIOS
from ..egrpo.run import (
    Run,
    checked_name,
    comparison_grid,
    describe_cost,
    duration,
    execute,
    lora_metadata,
    report,
    save_lora,
)
from ..egrpo.schedule import Plan
from ..egrpo.trainer import Progress, Rollouts, Started, Step, Trainer, TrainSettings, Warned
from . import inputs, types

logger = logging.getLogger(__name__)

PREVIEW_PIXELS = 512
PREVIEW_SECONDS = 1.0
TEXT_SECONDS = 1.0
PROGRESS_PARTS = 1000


class EGRPOTrainLora(io.ComfyNode):
    """Trains a LoRA on a MODEL by E-GRPO and saves it where LoraLoader finds it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EGRPOTrainLora",
            display_name="E-GRPO Train LoRA",
            category="E-GRPO/train",
            description=(
                "Aligns a rectified-flow model (FLUX) to a reward by E-GRPO: samples groups of images from high-entropy "
                "merged steps, scores them, and trains a LoRA towards the better ones. The MODEL itself is not changed."
            ),
            search_aliases=["grpo", "rlhf", "reinforcement learning", "align", "preference", "reward training"],
            is_output_node=True,
            not_idempotent=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "A rectified-flow model such as FLUX, in any precision. LoRAs already on it stay "
                        "active and stay frozen."
                    ),
                ),
                io.Clip.Input("clip", tooltip="Text encoder that encodes the prompts."),
                io.Vae.Input("vae", tooltip="Decodes the images that the reward scores."),
                types.Prompts.Input("prompts", tooltip="Training and held-out prompts, from E-GRPO Prompts."),
                types.Reward.Input("reward", tooltip="What to maximise, from E-GRPO Reward or a reward loader."),
                types.Plan.Input("plan", tooltip="Schedule, active steps and merges, from E-GRPO Plan."),
                io.Int.Input(
                    "iterations",
                    default=100,
                    min=1,
                    max=1_000_000,
                    tooltip="How many rounds of rollout and update. The paper trains 300.",
                ),
                io.Int.Input(
                    "prompts_per_iteration",
                    default=1,
                    min=1,
                    max=1024,
                    tooltip="Prompts per round. Each costs the evaluations that E-GRPO Plan shows.",
                ),
                io.Int.Input(
                    "group_size",
                    default=8,
                    min=2,
                    max=256,
                    tooltip=(
                        "Images per active step and prompt that are compared with each other. The "
                        "released configuration uses 12."
                    ),
                ),
                inputs.size(
                    "width",
                    (
                        "Image width in pixels. Train at the size you will sample at: other sizes can "
                        "show grid artefacts."
                    ),
                ),
                inputs.size("height", "Image height in pixels, see width."),
                io.Float.Input(
                    "learning_rate",
                    default=1e-4,
                    min=1e-8,
                    max=1.0,
                    step=1e-6,
                    round=False,
                    tooltip="AdamW learning rate. 1e-4 to 3e-4 for a LoRA; the paper's 2e-6 is for full fine-tuning.",
                ),
                io.Int.Input(
                    "rank", default=16, min=1, max=1024, tooltip="LoRA rank. 4 to 64; more is stronger and larger."
                ),
                io.Float.Input(
                    "alpha",
                    default=16.0,
                    min=0.01,
                    max=1024.0,
                    step=0.5,
                    tooltip="LoRA alpha: the adapter is scaled by alpha / rank. Equal to the rank is usual.",
                ),
                io.String.Input(
                    "targets",
                    default="attention+mlp",
                    tooltip=(
                        f"Layers that get an adapter: {', '.join(TARGET_CHOICES)} (adds modulation), or a "
                        "regular expression searched in layer names, for example single_blocks.*linear1."
                    ),
                ),
                inputs.seed("Fixes prompts' order, noise and the LoRA's start: the same seed repeats the run."),
                io.String.Input(
                    "name",
                    default="egrpo",
                    tooltip="Name of the run and of the LoRA file; a number is appended, nothing is overwritten.",
                ),
                io.Int.Input(
                    "eval_every",
                    default=10,
                    min=0,
                    max=100000,
                    tooltip="Score the held-out prompts every so many iterations (0 = only before and after).",
                ),
                io.Int.Input(
                    "checkpoint_every",
                    default=25,
                    min=0,
                    max=100000,
                    tooltip=(
                        "Save the run's state and the LoRA every so many iterations (0 = only at the "
                        "end). Cancel saves too."
                    ),
                ),
                inputs.guidance("FLUX guidance written into the conditioning. The paper uses 3.5."),
                io.Combo.Input(
                    "optimizer",
                    options=["adamw"],
                    default="adamw",
                    advanced=True,
                    tooltip="AdamW with betas 0.9 and 0.999, as in the paper.",
                ),
                io.Float.Input(
                    "weight_decay",
                    default=1e-4,
                    min=0.0,
                    max=1.0,
                    step=1e-5,
                    round=False,
                    advanced=True,
                    tooltip="AdamW weight decay. The paper uses 1e-4.",
                ),
                io.Float.Input(
                    "max_grad_norm",
                    default=1.0,
                    min=1e-6,
                    max=1000.0,
                    step=0.1,
                    round=False,
                    advanced=True,
                    tooltip="Gradients longer than this are scaled down to it.",
                ),
                io.Float.Input(
                    "clip_range",
                    default=1e-4,
                    min=1e-8,
                    max=1.0,
                    step=1e-5,
                    round=False,
                    advanced=True,
                    tooltip=(
                        "The importance ratio is clipped to 1 +- this. 1e-4 fits log-probabilities "
                        "averaged over the latent; it acts from the second inner update on."
                    ),
                ),
                io.Float.Input(
                    "kl_beta",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.001,
                    round=False,
                    advanced=True,
                    tooltip=(
                        "Weight of the KL to the model without the LoRA; holds the result near it. 0 is "
                        "off and saves a model call per active step."
                    ),
                ),
                io.Combo.Input(
                    "ratio",
                    options=list(RATIOS),
                    default=RATIOS[0],
                    advanced=True,
                    tooltip=(
                        "plain: the importance ratio. guard: GRPO-Guard's normalised ratio, which meets "
                        "the clip range alike at every noise level."
                    ),
                ),
                io.Float.Input(
                    "ema_decay",
                    default=0.0,
                    min=0.0,
                    max=0.9999,
                    step=0.001,
                    round=False,
                    advanced=True,
                    tooltip=(
                        "Average the LoRA over time; evaluations and the saved LoRA use the average. 0 is"
                        " off; 0.9 to 0.99 smooths."
                    ),
                ),
                io.Int.Input(
                    "update_every",
                    default=0,
                    min=0,
                    max=1024,
                    advanced=True,
                    tooltip=(
                        "Optimizer step after every active step (0, as the released code), or once per "
                        "this many prompts."
                    ),
                ),
                io.Int.Input(
                    "inner_updates",
                    default=1,
                    min=1,
                    max=16,
                    advanced=True,
                    tooltip=(
                        "Passes over the same rollouts. More than 1 reuses images, with the clip range guarding it."
                    ),
                ),
                io.Int.Input(
                    "eval_samples",
                    default=1,
                    min=1,
                    max=64,
                    advanced=True,
                    tooltip="Images per held-out prompt; more makes the reward curve steadier.",
                ),
                inputs.micro_batch(),
                io.Boolean.Input(
                    "gradient_checkpointing",
                    default=True,
                    advanced=True,
                    tooltip=(
                        "Recompute blocks in the backward pass: little memory, updates 1.5 times as long "
                        "(they are a small part of the whole)."
                    ),
                ),
                io.Combo.Input(
                    "start_from",
                    options=["none", *folder_paths.get_filename_list("loras")],
                    default="none",
                    advanced=True,
                    tooltip=(
                        "A LoRA to continue training from. Its rank may not exceed the chosen one (three "
                        "to four times it for split attention layers with unequal factors)."
                    ),
                ),
            ],
            outputs=[
                io.LoraModel.Output("lora", tooltip="The trained LoRA for ComfyUI's LoraModelLoader and SaveLoRA."),
                io.LossMap.Output(
                    "loss_map",
                    tooltip=(
                        "Minus the mean reward of each iteration, for ComfyUI's LossGraphNode: it falls as training works."
                    ),
                ),
                io.Image.Output(
                    "before_after", tooltip="Held-out prompts before and after training, from the same noise."
                ),
                io.Image.Output("curves", tooltip="Reward and diagnostics over the iterations."),
                io.String.Output("report", tooltip="What was trained, how the reward moved, and where the LoRA lies."),
            ],
        )

    @classmethod
    def execute(
        cls, model, clip, vae, prompts, reward, plan: Plan, name: str, start_from: str, **values
    ) -> io.NodeOutput:
        from ..egrpo.plots import plot_training, to_tensor
        from .comfy_policy import ComfyPolicy

        settings = TrainSettings(**{key: values[key] for key in TrainSettings.__dataclass_fields__ if key in values})
        settings.check()
        checked_name(name)
        lora_options = {key: values[key] for key in ("width", "height", "guidance", "rank", "alpha", "targets", "seed")}
        policy = ComfyPolicy(
            model,
            clip,
            vae,
            **lora_options,
            start_from=_load_lora(start_from),
            checkpoint_blocks=values["gradient_checkpointing"],
        )
        progress = NodeProgress(settings.iterations, cls.hidden.unique_id if cls.hidden else None)
        trainer = Trainer(policy, reward, prompts, plan, settings, on_progress=progress.on_progress)
        config = {"settings": _plain(values), "name": name, "plan": plan.to_dict(), "rewards": reward.settings()}
        config["prompts"] = {"train": list(prompts.train), "held_out": list(prompts.held_out)}
        run = Run.create(Path(folder_paths.get_output_directory()) / "egrpo", name, config)
        metadata = lora_metadata(trainer, {"lora": lora_options})
        lora_path = Path(folder_paths.get_folder_paths("loras")[0]) / f"{run.name}.safetensors"
        logger.info("E-GRPO plan:\n%s", plan.table(settings.group_size))

        with policy:
            try:
                outcome = execute(trainer, run, metadata, progress.on_event)
            finally:
                if trainer.iteration or progress.trained:
                    save_lora(lora_path, trainer, metadata)
                    logger.info("E-GRPO LoRA saved as %s", lora_path.name)
            with trainer.averaged_weights():
                lora_model = policy.lora_model()

        curves = plot_training(run.history)
        before_after = comparison_grid(outcome.before, outcome.after)
        run.save_image("curves.png", curves)
        run.save_image("before_after.png", before_after)
        text = f"{report(outcome, run)}\nLoRA: {lora_path.name} (in the loras folder; refresh LoraLoader with R)\nrun folder: {run.folder}"
        (run.folder / "report.txt").write_text(text, encoding="utf-8")
        logger.info("E-GRPO %s", text)
        picture = to_tensor(before_after)
        return io.NodeOutput(
            lora_model,
            {"loss": outcome.losses()},
            picture,
            to_tensor(curves),
            text,
            ui={**ui.PreviewImage(picture, cls=cls).as_dict(), "text": [text], "egrpo_run": [run.name]},
        )


class NodeProgress:
    """ComfyUI's progress bar, live previews and a line of text on the node, fed by the trainer's events."""

    def __init__(self, iterations: int, node_id: str | None) -> None:
        self.trained = False
        self._iterations = iterations
        self._node_id = node_id
        self._bar = comfy.utils.ProgressBar(iterations * PROGRESS_PARTS)
        self._value = 0
        self._last_preview = self._last_text = 0.0
        self._held_out = self._outlook = ""
        self._seconds: list[float] = []

    def on_progress(self, progress: Progress) -> None:
        if progress.phase == "rollout":
            self._move(progress.iteration + progress.done / max(progress.total, 1))
        # ComfyUI drops bar updates below half a percent, which an iteration of a long run never reaches: say it too.
        now = time.monotonic()
        if now - self._last_text >= TEXT_SECONDS:
            self._last_text = now
            self._say(
                f"{self._where(progress.iteration)}{progress.phase} {progress.done}/{progress.total}{self._outlook}"
            )

    def on_event(self, event: object) -> None:
        match event:
            case Started():
                self._move(event.first_iteration)
                self._say(describe_cost(event))
            case Rollouts():
                self.trained = True
                self._show(event.prompts[0].images)
            case Evaluation():
                self._held_out = f", held out {event.reward:.4f}"
                self._show(event.images, always=True)
            case Step():
                self._move(event.iteration)
                self._seconds.append(event.metrics["seconds"])
                left = (self._iterations - event.iteration) * sum(self._seconds) / len(self._seconds)
                self._outlook = f": reward {event.metrics['reward']:.4f}{self._held_out}, {duration(left)} left"
                self._say(f"{self._where(event.iteration - 1)}done{self._outlook}")
            case Warned():
                self._say(event.message)

    def _where(self, iteration: int) -> str:
        return f"iteration {min(iteration + 1, self._iterations)}/{self._iterations}, "

    def _move(self, iterations: float, preview: tuple | None = None) -> None:
        self._value = max(self._value, round(iterations * PROGRESS_PARTS))
        self._bar.update_absolute(self._value, self._iterations * PROGRESS_PARTS, preview)

    def _say(self, text: str) -> None:
        server = getattr(PromptServer, "instance", None)
        if server is not None and self._node_id is not None:
            server.send_progress_text(text, self._node_id)

    def _show(self, images: torch.Tensor, always: bool = False) -> None:
        """A plain contact sheet as the node's preview; at most one a second, since it is made on the training thread."""
        now = time.monotonic()
        if always or now - self._last_preview >= PREVIEW_SECONDS:
            self._last_preview = now
            self._move(0, ("JPEG", contact_sheet(images), PREVIEW_PIXELS))


def contact_sheet(images: torch.Tensor):
    """PIL image of up to 64 images [B, H, W, 3] in a near-square grid."""
    from PIL import Image

    images = images[:64]
    columns = int(len(images) ** 0.5 + 0.999)
    rows = -(-len(images) // columns)
    height, width = images.shape[1:3]
    sheet = torch.zeros(rows * height, columns * width, 3)
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = image
    picture = Image.fromarray((sheet * 255).round().byte().numpy())
    if max(picture.size) < PREVIEW_PIXELS:
        factor = PREVIEW_PIXELS // max(picture.size)
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    return picture


def _load_lora(name: str) -> dict[str, torch.Tensor] | None:
    if name == "none":
        return None
    path = folder_paths.get_full_path_or_raise("loras", name)
    return comfy.utils.load_torch_file(path, safe_load=True)


def _plain(values: dict) -> dict:
    return {key: value for key, value in values.items() if isinstance(value, (int, float, str, bool))}
