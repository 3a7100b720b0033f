"""E-GRPO Evaluate: a MODEL without and with a LoRA on held-out prompts, from the same noise."""

from __future__ import annotations

import logging

import comfy.sd
import comfy.utils
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker

from ..egrpo.evaluation import Evaluation, evaluate_policy, evaluation_rows, evaluation_table
from ..egrpo.prompts import PromptSet, checked_prompts
from ..egrpo.schedule import Plan
from . import inputs, types

logger = logging.getLogger(__name__)


class EGRPOEvaluate(io.ComfyNode):
    """Scores the held-out prompts under the MODEL and, when one is connected, under the MODEL with a LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EGRPOEvaluate",
            display_name="E-GRPO Evaluate",
            category="E-GRPO/evaluate",
            description=(
                "Compares a model without and with a LoRA on the held-out prompts: the same noise, the plan's schedule "
                "without its noise steps, every reward. With training's seed it repeats its before and after images."
            ),
            search_aliases=["benchmark", "compare lora", "win rate", "score", "held-out"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="A rectified-flow model such as FLUX, without the LoRA. It is not changed."
                ),
                io.Clip.Input("clip", tooltip="Text encoder that encodes the prompts."),
                io.Vae.Input("vae", tooltip="Decodes the images that the rewards score."),
                types.Prompts.Input("prompts", tooltip="Its held-out prompts are evaluated, from E-GRPO Prompts."),
                types.Reward.Input("reward", tooltip="The rewards to report, trained on or only watched."),
                types.Plan.Input("plan", tooltip="Its schedule is used; every step is deterministic here."),
                io.LoraModel.Input(
                    "lora",
                    optional=True,
                    tooltip="The LoRA to compare, from E-GRPO Train LoRA. Without it the model alone is scored and there is no plot.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How strongly the LoRA is applied, as in Load LoRA Model.",
                ),
                io.Int.Input(
                    "samples",
                    default=2,
                    min=1,
                    max=64,
                    tooltip="Images per prompt and model. More makes the comparison surer.",
                ),
                inputs.size("width"),
                inputs.size("height"),
                inputs.seed("Fixes the noise of every prompt and sample."),
                inputs.guidance("FLUX guidance written into the conditioning."),
                inputs.micro_batch(),
            ],
            outputs=[
                io.String.Output(
                    "table", tooltip="Per reward: means, change with its standard error, win rate, and every prompt."
                ),
                io.Image.Output("grid", tooltip="Every prompt without and with the LoRA, with scores."),
                io.Image.Output("plot", tooltip="Scores before and after, prompt by prompt. Empty without a LoRA."),
            ],
        )

    @classmethod
    def execute(
        cls,
        model,
        clip,
        vae,
        prompts: PromptSet,
        reward,
        plan: Plan,
        strength: float,
        samples: int,
        width: int,
        height: int,
        seed: int,
        guidance: float,
        micro_batch: int,
        lora=None,
    ) -> io.NodeOutput:
        from ..egrpo.plots import image_grid, plot_comparison, to_tensor
        from .comfy_policy import ComfyPolicy

        checked_prompts(prompts.held_out, "held-out")
        if samples < 1:
            raise ValueError(f"samples is {samples}: at least 1 image per prompt is needed")

        def policy_of(patched) -> ComfyPolicy:
            options = {"width": width, "height": height, "guidance": guidance}
            return ComfyPolicy(patched, clip, vae, **options, rank=1, targets="all", checkpoint_blocks=False)

        policies = [policy_of(model)]
        if lora is not None:
            policies.append(policy_of(with_lora(model, lora, strength)))
        texts = list(prompts.held_out)
        total = len(policies) * len(texts) * samples * plan.total_steps
        progress = comfy.utils.ProgressBar(total)
        done = 0

        def on_step(latents: int) -> None:
            nonlocal done
            done += latents
            progress.update_absolute(done, total)

        evaluations: list[Evaluation] = []
        conditions = None
        for policy in policies:
            with policy:
                conditions = conditions or policy.encode(texts)
                evaluations.append(
                    evaluate_policy(
                        policy,
                        reward,
                        texts,
                        conditions,
                        plan,
                        samples=samples,
                        seed=seed,
                        micro_batch=policy.micro_batch(micro_batch),
                        base=True,
                        on_step=on_step,
                    )
                )

        table = evaluation_table(*evaluations)
        logger.info("E-GRPO evaluation:\n%s", table)
        title = "mean reward " + ", ".join(
            f"{evaluation.reward:.4f} {name}" for name, evaluation in zip(("base", "with LoRA"), evaluations)
        )
        grid = to_tensor(image_grid(*evaluation_rows(list(zip(("base", "LoRA"), evaluations))), title=title))
        plot = ExecutionBlocker(None)  # nothing to compare: what is connected to it does not run
        if lora is not None:
            before, after = evaluations
            plot = to_tensor(plot_comparison(list(before.scores), before.per_prompt(), after.per_prompt()))
        return io.NodeOutput(table, grid, plot, ui={**ui.PreviewImage(grid, cls=cls).as_dict(), "text": [table]})


def with_lora(model, lora: dict, strength: float):
    """A clone of the MODEL with a LORA_MODEL on it, as ComfyUI's LoraModelLoader applies it.

    Raises:
        ValueError: the LoRA has no layer of this MODEL; it would be compared with itself.
    """
    patched, _ = comfy.sd.load_lora_for_models(model, None, lora, strength, 0)
    if sum(map(len, patched.patches.values())) == sum(map(len, model.patches.values())):
        examples = ", ".join(list(lora)[:2]) or "it is empty"
        raise ValueError(
            f"the LoRA has no layer of this MODEL (its {len(lora)} tensors: {examples}, ...): connect the MODEL that it "
            "was trained on"
        )
    return patched
