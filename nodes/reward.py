"""E-GRPO Reward: rewards that need no model, so that training works before any reward model is installed."""

from __future__ import annotations

from comfy_api.latest import io

from ..egrpo.rewards.base import RewardSet, RewardTerm
from ..egrpo.rewards.builtin import BUILTIN_REWARDS, builtin_reward, parse_colour
from . import types


class EGRPOReward(io.ComfyNode):
    """One built-in reward as a reward set of one term."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EGRPOReward",
            display_name="E-GRPO Reward",
            category="E-GRPO/reward",
            description=(
                "A reward computed from the pixels alone; nothing is downloaded. Good for learning how training "
                "behaves "
                "and for checking a setup: target_colour shows success at a glance."
            ),
            search_aliases=["score", "aesthetic", "jpeg", "colour", "color", "brightness", "contrast", "sharpness"],
            inputs=[
                io.Combo.Input(
                    "kind",
                    options=list(BUILTIN_REWARDS),
                    default="target_colour",
                    tooltip="What is rewarded; higher is better.\n"
                    + "\n".join(f"{kind}: {meaning}" for kind, meaning in BUILTIN_REWARDS.items()),
                ),
                io.String.Input(
                    "colour", default="#ff0000", tooltip="For target_colour: #RRGGBB, for example #ff0000 for red."
                ),
                io.Float.Input(
                    "target",
                    default=0.5,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="For target_brightness (0 black to 1 white) and target_contrast (0 flat to 0.5 strongest).",
                ),
                io.Float.Input(
                    "weight",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.1,
                    round=False,
                    tooltip=(
                        "Weight among several rewards. Negative rewards the opposite. Alone, only its sign matters."
                    ),
                ),
            ],
            outputs=[types.Reward.Output("reward", tooltip="For E-GRPO Train LoRA, Rollout Preview and Evaluate.")],
        )

    @classmethod
    def validate_inputs(cls, colour: str | None = None) -> bool | str:
        try:
            if colour is not None:
                parse_colour(colour)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, kind: str, colour: str, target: float, weight: float) -> io.NodeOutput:
        if weight == 0:
            raise ValueError("the reward's weight is 0, so nothing would be trained: use 1, or a negative weight")
        return io.NodeOutput(RewardSet((RewardTerm(builtin_reward(kind, colour=colour, target=target), weight),)))
