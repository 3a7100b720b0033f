"""E-GRPO Rollout Preview: one prompt's rollout as training would sample it, to look at before training."""

from __future__ import annotations

import logging
from typing import Any

import comfy.utils
import torch
from comfy_api.latest import io, ui

from ..egrpo.evaluation import score_labels
from ..egrpo.rollout import Rollout, sample_rollout
from ..egrpo.sampling import derived_generator, initial_noise, watched
from ..egrpo.schedule import Plan
from ..egrpo.statistics import grouped, rollout_statistics, statistics_table
from . import inputs, types

logger = logging.getLogger(__name__)


class EGRPORolloutPreview(io.ComfyNode):
    """Samples anchor, branches and tails of one prompt with the MODEL as it is, and measures how they spread."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EGRPORolloutPreview",
            display_name="E-GRPO Rollout Preview",
            category="E-GRPO/preview",
            description=(
                "Shows what training would sample for one prompt: the anchor image and one group per active step, with "
                "scores and how far each step spreads images and rewards. High-entropy steps should spread most. Same "
                "seed, prompt and settings: the first rollout of E-GRPO Train LoRA when it draws this prompt first."
            ),
            search_aliases=["rollout", "group", "exploration", "sde", "entropy", "grpo preview"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="A rectified-flow model such as FLUX. It is not changed."),
                io.Vae.Input("vae", tooltip="Decodes the images."),
                types.Plan.Input("plan", tooltip="Schedule, active steps and merges, from E-GRPO Plan."),
                io.Conditioning.Input(
                    "conditioning",
                    optional=True,
                    tooltip="An encoded prompt, used as it is. Connect either this or clip.",
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="Text encoder for the prompt below. Connect either this or conditioning.",
                ),
                io.String.Input(
                    "prompt",
                    default="",
                    multiline=True,
                    tooltip="What to sample, when clip is connected. With conditioning it is only what the reward compares images with.",
                ),
                io.Int.Input(
                    "group_size",
                    default=8,
                    min=2,
                    max=256,
                    tooltip="Images per active step that are compared with each other.",
                ),
                inputs.size("width"),
                inputs.size("height"),
                inputs.seed("Fixes the starting noise and the noise of every branch."),
                inputs.guidance(
                    "FLUX guidance. A conditioning that carries its own guidance (from FluxGuidance) keeps it."
                ),
                inputs.micro_batch(),
                types.Reward.Input(
                    "reward",
                    optional=True,
                    tooltip="Scores every image, so that the spread of rewards per step can be seen.",
                ),
            ],
            outputs=[
                io.Image.Output("grid", tooltip="The anchor, then one row per active step, with scores."),
                io.Latent.Output("latents", tooltip="All final latents for VAE Decode: the anchor, then the groups."),
                io.Image.Output("images", tooltip="All images in the order of the latents."),
                io.String.Output(
                    "statistics",
                    tooltip="Per active step: image difference within the group and to the anchor, reward mean and spread; and the model evaluations spent.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        model,
        vae,
        plan: Plan,
        prompt: str,
        group_size: int,
        width: int,
        height: int,
        seed: int,
        guidance: float,
        micro_batch: int,
        conditioning=None,
        clip=None,
        reward=None,
    ) -> io.NodeOutput:
        from ..egrpo.plots import image_grid, to_tensor
        from .comfy_policy import ComfyPolicy

        check_source(conditioning, clip, prompt)
        if group_size < 2:
            raise ValueError(f"group_size is {group_size}: a group needs at least 2 images to differ")
        policy = ComfyPolicy(
            model,
            clip,
            vae,
            width=width,
            height=height,
            guidance=guidance,
            rank=1,
            targets="all",
            checkpoint_blocks=False,
        )
        planned, _ = plan.evaluations(group_size)
        progress = comfy.utils.ProgressBar(planned)
        counted = 0

        def on_step(latents: int) -> None:
            nonlocal counted
            counted += latents
            progress.update_absolute(counted, planned)

        # The stream of the trainer's first iteration and first prompt.
        generator = derived_generator(seed, "rollout", 0, 0)
        noise = initial_noise(policy, plan, generator)

        def work(velocity) -> Rollout:
            start = noise.to(policy.device)
            size = policy.micro_batch(micro_batch)
            return sample_rollout(watched(policy, velocity), plan, start, group_size, generator, size, on_step)

        with policy:
            condition = policy.encode([prompt])[0] if clip is not None else with_guidance(conditioning, guidance)
            latents = policy.rollout(condition, work, base=True).latents()
            with policy.scoring():
                images = policy.decode(latents)
                scores = reward.score(images, [prompt] * len(images)) if reward is not None else {}

        statistics = rollout_statistics(plan, group_size, images, scores)
        text = statistics_table(plan, statistics)
        text += f"\nmodel evaluations: {counted} counted, {planned} planned"
        if reward is not None and not prompt.strip():
            text += (
                "\nnote: the reward was given an empty prompt; write it into the prompt field if the reward reads it"
            )
        logger.info("E-GRPO rollout preview:\n%s", text)
        grid = to_tensor(image_grid(*rollout_rows(plan, group_size, images, scores), title=prompt.strip()))
        samples = model.model.process_latent_out(latents.float())
        return io.NodeOutput(
            grid,
            {"samples": samples},
            images,
            text,
            ui={**ui.PreviewImage(grid, cls=cls).as_dict(), "text": [text]},
        )


def check_source(conditioning: Any, clip: Any, prompt: str) -> None:
    """Raise ValueError unless the prompt comes from exactly one of conditioning and clip."""
    if conditioning is not None and clip is not None:
        raise ValueError(
            "both conditioning and clip are connected: keep one, so that it is clear which prompt is sampled"
        )
    if conditioning is None and clip is None:
        raise ValueError("nothing to sample: connect conditioning, or connect clip and write a prompt")
    if clip is not None and not prompt.strip():
        raise ValueError("the prompt is empty: write what to sample, or connect conditioning instead of clip")
    if conditioning is not None and not len(conditioning):
        raise ValueError("the conditioning holds no prompt: connect the output of a CLIP Text Encode node")


def with_guidance(conditioning: list, guidance: float) -> list:
    """The CONDITIONING with ``guidance`` where it carries none; the given one is not changed."""
    return [[c, {"guidance": guidance, **values}] for c, values in conditioning]


def rollout_rows(
    plan: Plan, group_size: int, images: torch.Tensor, scores: dict[str, torch.Tensor]
) -> tuple[list, list[str], list[list[str]]]:
    """Rows, row labels and cell labels for the grid: the anchor, then one row per active step (and tail stride)."""

    def captions(chosen: dict[str, torch.Tensor], count: int) -> list[str]:
        return score_labels(chosen) if chosen else [""] * count

    groups = grouped(images, plan, group_size)
    rewards = {name: grouped(values, plan, group_size) for name, values in scores.items()}
    rows, labels = [[images[0]]], ["anchor (ODE)"]
    cells = [captions({name: values[:1] for name, values in scores.items()}, 1)]
    for k, step in enumerate(plan.steps):
        for stride, granularity in enumerate(plan.granularity):
            rows.append(list(groups[k, stride]))
            label = f"step {step.index} + {step.merge}\nσ {step.sigma:.3f} → {step.sigma_next:.3f}"
            labels.append(label + (f"\ntail stride {granularity}" if len(plan.granularity) > 1 else ""))
            cells.append(captions({name: values[k, stride] for name, values in rewards.items()}, group_size))
    return rows, labels, cells
