"""E-GRPO Merged-Step Sampler: one exploring step of training inside ordinary sampling."""

from __future__ import annotations

import comfy.samplers
import torch
from comfy.k_diffusion.sampling import to_d
from comfy_api.latest import io
from torch import Tensor
from tqdm.auto import tqdm

from ..egrpo.schedule import checked_sigmas, merge_length, step_entropy
from ..egrpo.sde import FLOW_SDE, KERNELS, euler, kernel_of, transition
from .flow import require_rectified_flow

MAX_STEPS = 1000


class EGRPOMergedStepSampler(io.ComfyNode):
    """SAMPLER whose step ``index`` is the merged SDE step that training explores; all others are Euler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EGRPOMergedStepSampler",
            display_name="E-GRPO Merged-Step Sampler",
            category="E-GRPO/sampling",
            description=(
                "Samples like euler, with one step made random and merged over several intervals, as E-GRPO does in "
                "training. Change the seed to see what that step alone can vary. For SamplerCustom and "
                "SamplerCustomAdvanced with a rectified-flow model such as FLUX."
            ),
            search_aliases=["sde sampler", "grpo sampler", "entropy", "merged step", "stochastic step"],
            inputs=[
                io.Int.Input(
                    "index",
                    default=0,
                    min=-1,
                    max=MAX_STEPS,
                    tooltip=(
                        "Which step of the sigmas is random, from 0. -1 makes none: the result is then that of euler, "
                        "bit for bit."
                    ),
                ),
                io.Int.Input(
                    "merge",
                    default=0,
                    min=0,
                    max=MAX_STEPS,
                    tooltip=(
                        "How many intervals the random step jumps at once. 0 finds the shortest jump that reaches tau."
                    ),
                ),
                io.Float.Input(
                    "eta",
                    default=0.7,
                    min=0.0,
                    max=10.0,
                    step=0.05,
                    round=False,
                    tooltip=(
                        "Noise scale of the random step; 0 is a plain long Euler step. The cps kernel takes at most 1. "
                        "The paper uses 0.7."
                    ),
                ),
                io.Float.Input(
                    "tau",
                    default=2.2,
                    min=0.0,
                    max=20.0,
                    step=0.05,
                    round=False,
                    tooltip="Entropy e^(h/d) that the random step must reach when merge is 0. The paper uses 2.2.",
                ),
                io.Combo.Input(
                    "kernel",
                    options=list(KERNELS),
                    default=FLOW_SDE,
                    tooltip=(
                        "How noise is added. flow_sde is the paper's. cps keeps the noise level exact however long the "
                        "merge is."
                    ),
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip=(
                        "Seed of the random step's noise alone; the starting noise stays the sampler node's. Each "
                        "image of a batch gets its own noise."
                    ),
                ),
                io.Boolean.Input(
                    "allow_flip",
                    default=False,
                    advanced=True,
                    tooltip="Accept a merge so long that the latent changes sign. The image is ruined; only to see it.",
                ),
            ],
            outputs=[io.Sampler.Output("sampler", tooltip="For SamplerCustom or SamplerCustomAdvanced.")],
        )

    @classmethod
    def execute(
        cls, index: int, merge: int, eta: float, tau: float, kernel: str, seed: int, allow_flip: bool
    ) -> io.NodeOutput:
        options = {"index": index, "merge": merge, "eta": eta, "tau": tau, "kernel": kernel, "seed": seed}
        return io.NodeOutput(
            comfy.samplers.KSAMPLER(sample_merged_step, extra_options={**options, "allow_flip": allow_flip})
        )


@torch.no_grad()
def sample_merged_step(
    model,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict | None = None,
    callback=None,
    disable: bool | None = None,
    *,
    index: int = -1,
    merge: int = 0,
    eta: float = 0.7,
    tau: float = 2.2,
    kernel: str = FLOW_SDE,
    seed: int = 0,
    allow_flip: bool = False,
) -> Tensor:
    """Euler with one stochastic step from ``sigmas[index]`` over ``merge`` intervals (E-GRPO, arXiv 2601.00423).

    A k-diffusion sampler: ``model(x, sigma)`` gives x_0, so v = (x - x_0) / sigma. Sampling goes on at
    ``sigmas[index + merge]``, and the intervals jumped over cost no evaluation.

    Args:
        x: [B, ...] at ``sigmas[0]``.
        sigmas: [T + 1], decreasing; it need not start at 1 or end at 0.

    Raises:
        ValueError: the model is not a rectified flow, or the step does not fit the sigmas or flips the latent.
    """
    require_rectified_flow(model.inner_model.model_patcher)
    extra_args = {} if extra_args is None else extra_args
    schedule = sigmas.tolist()
    last = len(schedule) - 1
    if index >= 0:
        merge = chosen_merge(schedule, index, merge, eta, tau, kernel, allow_flip)
    s_in = x.new_ones([x.shape[0]])
    i = 0
    with tqdm(total=last, disable=disable) as bar:
        while i < last:
            reached = i + merge if i == index else i + 1
            denoised = model(x, sigmas[i] * s_in, **extra_args)
            v = to_d(x, sigmas[i], denoised)
            if callback is not None:
                # Progress counts intervals, so that a merged step advances it by all that it jumps.
                callback({"x": x, "i": reached - 1, "sigma": sigmas[i], "sigma_hat": sigmas[i], "denoised": denoised})
            if i == index:
                mean, std = transition(x, v, schedule, i, merge, eta, kernel)
                x = (mean + std * seeded_noise(x, seed)).to(x.dtype)
            else:
                x = euler(x, v, schedule[i], schedule[reached])
            bar.update(reached - i)
            i = reached
    return x


def chosen_merge(
    schedule: list[float], index: int, merge: int, eta: float, tau: float, kernel: str, allow_flip: bool
) -> int:
    """Length of the step at ``index``: ``merge`` itself, or for 0 the shortest that reaches ``tau``.

    Raises:
        ValueError: the step leaves the schedule, none is long enough, or it flips the latent.
    """
    # A schedule may be part of one (SplitSigmas, denoise below 1): checked as if it went on to 0.
    checked_sigmas(schedule if schedule[-1] == 0.0 else [*schedule, 0.0])
    last = len(schedule) - 1
    if index >= last:
        raise ValueError(f"index is {index}, but the sigmas have {last} steps: use 0 to {last - 1}, or -1 for none")
    if merge == 0:

        def entropy(i: int, length: int) -> float:
            return step_entropy(schedule, i, length, eta, kernel=kernel)

        found = merge_length(entropy, index, last, tau)
        if found is None:
            raise ValueError(
                f"step {index} merged over all {last - index} remaining intervals has entropy "
                f"{entropy(index, last - index):.3f}, below tau {tau:g}: lower tau, raise eta, choose an earlier "
                "index, or set merge"
            )
        merge = found
    elif index + merge > last:
        raise ValueError(
            f"step {index} merged over {merge} passes the end of {last} steps: use a merge of 1 to {last - index} there"
        )
    contraction = kernel_of(schedule, index, merge, eta, kernel).x_coefficient
    if kernel == FLOW_SDE and contraction <= 0 and not allow_flip:
        raise ValueError(
            f"step {index} merged over {merge} flips the latent: its contraction 1 - s^2 D / (2 sigma) is "
            f"{contraction:.3f}, and must stay above 0. Use a shorter merge, lower eta or tau, choose the cps kernel, "
            "or turn on allow_flip"
        )
    return merge


def seeded_noise(x: Tensor, seed: int) -> Tensor:
    """Standard normal noise like x [B, ...], drawn on the CPU image by image: the same on every device, and for the
    first images of a batch whatever its size."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.stack([torch.randn(x.shape[1:], generator=generator) for _ in range(x.shape[0])])
    return noise.to(x.device)
