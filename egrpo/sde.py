"""One denoising step of a rectified flow: the ODE step and two stochastic kernels.

Notation (arXiv 2601.00423): ``sigma`` is the noise level, x_sigma = (1 - sigma) x_0 + sigma eps, the model
predicts v = eps - x_0, index 0 is pure noise. A *merged* step goes from ``sigmas[index]`` straight to
``sigmas[index + merge]``; its Gaussian has a mean linear in (x, v) and an isotropic std.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import torch
from torch import Tensor

FLOW_SDE = "flow_sde"
CPS = "cps"
KERNELS = (FLOW_SDE, CPS)

LOG_SQRT_2PI = float(torch.log(torch.sqrt(2 * torch.as_tensor(math.pi))))
"""log sqrt(2 pi) in single precision, as Flow-GRPO's code and every work built on it computes it. The 1.6e-8 to the
exact value cancels in every ratio; keeping it makes logged log-probabilities comparable to theirs to the last digit."""

Sigmas = Sequence[float] | Tensor


class Kernel(NamedTuple):
    """Coefficients of one transition: x' ~ N(x * x_coefficient + v * v_coefficient, std^2 I)."""

    x_coefficient: float
    v_coefficient: float
    std: float


def flow_sde_scale(sigmas: Sigmas, index: int, eta: float) -> float:
    """The diffusion scale s = eta sqrt(sigma / (1 - sigma)) of step ``index``.

    At sigma = 1 the denominator is 1 - sigmas[1], since 1 - sigma would be zero (as in Flow-GRPO's
    ``sde_step_with_logprob`` and every work built on it).
    """
    sigma = float(sigmas[index])
    remaining = 1.0 - (sigma if sigma < 1.0 else float(sigmas[1]))
    return eta * math.sqrt(sigma / remaining)


def _flow_sde_kernel(sigmas: Sigmas, index: int, merge: int, eta: float) -> Kernel:
    sigma, sigma_next = float(sigmas[index]), float(sigmas[index + merge])
    delta = sigma - sigma_next
    s = flow_sde_scale(sigmas, index, eta)
    drift = s * s / (2.0 * sigma)
    return Kernel(1.0 - drift * delta, -(1.0 + drift * (1.0 - sigma)) * delta, s * math.sqrt(delta))


def _cps_kernel(sigmas: Sigmas, index: int, merge: int, eta: float) -> Kernel:
    # mean = x0_hat (1 - sigma') + x1_hat sigma' cos(eta pi/2), std = sigma' sin(eta pi/2), collected in x and v so
    # that eta = 0 leaves exactly x + (sigma' - sigma) v.
    sigma, sigma_next = float(sigmas[index]), float(sigmas[index + merge])
    angle = eta * math.pi / 2.0
    lost = sigma_next * (1.0 - math.cos(angle))
    return Kernel(1.0 - lost, (sigma_next - sigma) - lost * (1.0 - sigma), sigma_next * math.sin(angle))


def kernel_of(sigmas: Sigmas, index: int, merge: int = 1, eta: float = 0.7, kernel: str = FLOW_SDE) -> Kernel:
    """Coefficients of the transition from ``sigmas[index]`` to ``sigmas[index + merge]``.

    ``flow_sde`` is the paper's kernel (E-GRPO section 3, Flow-GRPO eq. 9). ``cps`` is the coefficient-preserving
    kernel of FlowCPS, whose noise level after the step is sigma' however long the merge is.

    Raises:
        ValueError: unknown kernel, a merge that leaves the schedule, or an eta outside the kernel's range.
    """
    last = len(sigmas) - 1
    if merge < 1 or not 0 <= index <= last - merge:
        raise ValueError(
            f"step {index} merged over {merge} does not fit a schedule of {last} steps: "
            f"index must be 0..{last - 1} and index + merge at most {last}"
        )
    if kernel == FLOW_SDE:
        if eta < 0:
            raise ValueError(f"eta is {eta}, but the noise scale of flow_sde must be 0 or more (the paper uses 0.7)")
        return _flow_sde_kernel(sigmas, index, merge, eta)
    if kernel == CPS:
        if not 0 <= eta <= 1:
            raise ValueError(f"eta is {eta}, but the cps kernel takes 0 (deterministic) to 1 (all noise renewed)")
        return _cps_kernel(sigmas, index, merge, eta)
    raise ValueError(f"unknown kernel {kernel!r}: choose one of {', '.join(KERNELS)}")


def euler(x: Tensor, v: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """Deterministic step x' = x + (sigma' - sigma) v; x, v and the result share one shape [B, ...]."""
    return x + (float(sigma_next) - float(sigma)) * v


def transition(
    x: Tensor,
    v: Tensor,
    sigmas: Sigmas,
    index: int,
    merge: int = 1,
    eta: float = 0.7,
    kernel: str = FLOW_SDE,
) -> tuple[Tensor, Tensor]:
    """Gaussian of the merged step from ``sigmas[index]`` over ``merge`` intervals.

    Args:
        x: state at ``sigmas[index]``, [B, ...]; float32 or float64 (a lower precision is raised to float32).
        v: velocity at (x, sigma), broadcastable to x.

    Returns:
        mean [B, ...] and the 0-dimensional std in the same dtype. With eta = 0 the mean equals :func:`euler`
        bit for bit and the std is 0.

    Raises:
        ValueError: see :func:`kernel_of`.
    """
    coefficients = kernel_of(sigmas, index, merge, eta, kernel)
    x, v = at_least_float32(x), at_least_float32(v)
    mean = x * coefficients.x_coefficient + v * coefficients.v_coefficient
    return mean, torch.tensor(coefficients.std, dtype=mean.dtype, device=mean.device)


def log_prob(x_next: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    """Gaussian log-density of ``x_next`` averaged over all non-batch dimensions, [B].

    The average (not the sum) is what the clip range of 1e-4 is calibrated to. ``mean`` may have batch 1 while
    ``x_next`` has batch G: the group shares its starting latent.

    Raises:
        ValueError: std is not positive (a deterministic step has no density).
    """
    x_next, mean = at_least_float32(x_next), at_least_float32(mean)
    std = torch.as_tensor(std, dtype=mean.dtype, device=mean.device)
    if not bool(std > 0):
        raise ValueError(f"std is {float(std)}: a step without noise has no log-probability; use eta > 0")
    density = -((x_next - mean) ** 2) / (2.0 * std**2) - torch.log(std) - LOG_SQRT_2PI
    return density.flatten(1).mean(dim=1)


def noise_ratio(sigmas: Sigmas, index: int, merge: int = 1, eta: float = 0.7, kernel: str = FLOW_SDE) -> float:
    """Noise level after the step divided by sigma', given the exact v of a point-mass data distribution.

    With x = (1 - sigma) x_0 + sigma eps and v = eps - x_0, the step leaves (1 - sigma') x_0 plus
    (x_coefficient sigma + v_coefficient) eps plus fresh noise of the kernel's std. 1 means the model sees the noise
    level that it is told; more means the merge is too long for it. Infinite when sigma' = 0 and noise remains.
    """
    c = kernel_of(sigmas, index, merge, eta, kernel)
    sigma, sigma_next = float(sigmas[index]), float(sigmas[index + merge])
    remaining = math.hypot(c.x_coefficient * sigma + c.v_coefficient, c.std)
    if sigma_next > 0:
        return remaining / sigma_next
    return 1.0 if remaining == 0 else math.inf


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor itself in float32 or float64, raised to float32 from anything lower (bf16 would lose the ratio)."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
