"""The pack's node classes, as one extension. Each module holds one node; the algorithm is in ``egrpo``."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io


class EGRPOExtension(ComfyExtension):
    """What :func:`comfy_entrypoint` hands to ComfyUI."""

    async def on_load(self) -> None:
        from .demo import register_demo_folder

        register_demo_folder()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        from .demo import EGRPODemoModels, EGRPODemoReward
        from .evaluate import EGRPOEvaluate
        from .plan import EGRPOPlan
        from .preview import EGRPORolloutPreview
        from .prompts import EGRPOPrompts
        from .reward import EGRPOReward
        from .sampler import EGRPOMergedStepSampler
        from .train import EGRPOTrainLora

        return [
            EGRPOPlan,
            EGRPOPrompts,
            EGRPOReward,
            EGRPOTrainLora,
            EGRPORolloutPreview,
            EGRPOEvaluate,
            EGRPOMergedStepSampler,
            EGRPODemoModels,
            EGRPODemoReward,
        ]


async def comfy_entrypoint() -> EGRPOExtension:
    return EGRPOExtension()
