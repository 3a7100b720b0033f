"""Which MODELs the nodes accept."""

from __future__ import annotations

import comfy.model_sampling


def require_rectified_flow(model) -> None:
    """Raise ValueError unless the MODEL's sampling is rectified flow (comfy.model_sampling.CONST).

    Args:
        model: a ModelPatcher; its object patches (ModelSamplingFlux and the like) count.
    """
    sampling = model.get_model_object("model_sampling")
    if not isinstance(sampling, comfy.model_sampling.CONST):
        kinds = ", ".join(base.__name__ for base in type(sampling).__bases__)
        raise ValueError(
            f"{type(model.model).__name__} is not a rectified-flow model (its sampling is {kinds}). E-GRPO works on "
            "rectified-flow models such as FLUX or SD3, not on epsilon- or v-prediction models such as SD1.5 or SDXL"
        )
