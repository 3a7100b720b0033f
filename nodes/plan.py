"""E-GRPO Plan: which steps explore, how far each jumps, and what that costs."""

from __future__ import annotations

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from ..egrpo.schedule import (
    ACTIVE_CHOICES,
    ENTROPY_UNITS,
    GROUPINGS,
    UNREACHABLE_CHOICES,
    PlanError,
    active_indices,
    flow_sigmas,
    parse_merges,
    plan_steps,
    quantile_tau,
    tau_for_groups,
)
from ..egrpo.sde import KERNELS
from . import types

CUSTOM, EXPLICIT, ADAPTIVE = "custom", "explicit", "adaptive"
FIXED_MERGES = {"none": 1, "fixed_2": 2, "fixed_4": 4, "fixed_6": 6}
TAU_MODES = ("fixed", "quantile", "groups")
MAX_STEPS = 1000


class EGRPOPlan(io.ComfyNode):
    """Chooses active steps and merges. An output node, so that a bad plan is reported before a model is loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EGRPOPlan",
            display_name="E-GRPO Plan",
            category="E-GRPO/plan",
            description=(
                "Finds the steps of a sampling schedule that are worth exploring. Steps of low entropy are merged into "
                "longer jumps until each reaches the threshold tau. The defaults are the paper's. Shows the plan as a "
                "plot and a table, with the number of model evaluations it costs."
            ),
            search_aliases=["grpo schedule", "entropy", "merge steps", "sigmas", "active steps"],
            is_output_node=True,
            inputs=[
                io.Int.Input(
                    "steps",
                    default=16,
                    min=1,
                    max=MAX_STEPS,
                    tooltip=(
                        "Denoising steps of the schedule. Ignored when sigmas is connected. The paper trains with 16."
                    ),
                ),
                io.Float.Input(
                    "shift",
                    default=3.0,
                    min=0.01,
                    max=100.0,
                    step=0.05,
                    round=False,
                    tooltip="Time shift of the schedule, 1 = none. Ignored when sigmas is connected. The paper uses 3.",
                ),
                io.Float.Input(
                    "eta",
                    default=0.7,
                    min=0.0,
                    max=10.0,
                    step=0.05,
                    round=False,
                    tooltip=(
                        "Noise scale of the active steps. More explores further and makes rougher images. The cps "
                        "kernel takes at most 1."
                    ),
                ),
                io.Combo.Input(
                    "tau_mode",
                    options=list(TAU_MODES),
                    default="fixed",
                    tooltip=(
                        "How the entropy threshold is chosen: fixed uses tau, quantile uses tau_quantile, groups uses "
                        "target_groups. Only for adaptive merging."
                    ),
                ),
                io.Float.Input(
                    "tau",
                    default=2.2,
                    min=-20.0,
                    max=20.0,
                    step=0.05,
                    round=False,
                    tooltip=(
                        "Entropy that every active step must reach, for tau_mode fixed. Higher merges more; 0 merges "
                        "nothing. The paper uses 2.2."
                    ),
                ),
                io.Float.Input(
                    "tau_quantile",
                    default=0.75,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    advanced=True,
                    tooltip=(
                        "For tau_mode quantile: the threshold is this quantile of the entropies of the active steps "
                        "before merging."
                    ),
                ),
                io.Int.Input(
                    "target_groups",
                    default=4,
                    min=1,
                    max=MAX_STEPS,
                    advanced=True,
                    tooltip=(
                        "For tau_mode groups: the smallest threshold whose number of active steps comes nearest to "
                        "this. Most useful with disjoint grouping."
                    ),
                ),
                io.Combo.Input(
                    "active_steps",
                    options=[*ACTIVE_CHOICES, CUSTOM],
                    default="first_half",
                    tooltip="Steps that may explore. first_half is the paper's choice; custom uses custom_steps.",
                ),
                io.String.Input(
                    "custom_steps",
                    default="",
                    placeholder="0,1,4",
                    advanced=True,
                    tooltip="For active_steps custom: step numbers from 0, for example 0,1,4.",
                ),
                io.Combo.Input(
                    "merging",
                    options=[ADAPTIVE, *FIXED_MERGES, EXPLICIT],
                    default=ADAPTIVE,
                    tooltip=(
                        "adaptive: each step merges until it reaches tau. none: no merging. fixed_N: every step jumps "
                        "N. explicit: see explicit_merges."
                    ),
                ),
                io.String.Input(
                    "explicit_merges",
                    default="",
                    placeholder="0:1 1:1 2:2 4:3",
                    advanced=True,
                    tooltip=(
                        "For merging explicit: step:length pairs. They also name the active steps, so active_steps is "
                        "ignored."
                    ),
                ),
                io.Combo.Input(
                    "grouping",
                    options=list(GROUPINGS),
                    default="overlapping",
                    tooltip=(
                        "overlapping: every active step has its own merge (the paper). disjoint: the next active step "
                        "starts where a merge ended; cheaper."
                    ),
                ),
                io.Combo.Input(
                    "kernel",
                    options=list(KERNELS),
                    default=KERNELS[0],
                    tooltip=(
                        "How noise is added. flow_sde is the paper's. cps keeps the noise level exact however long the "
                        "merge is."
                    ),
                ),
                io.Combo.Input(
                    "entropy_unit",
                    options=list(ENTROPY_UNITS),
                    default=ENTROPY_UNITS[0],
                    advanced=True,
                    tooltip=(
                        "Unit that tau is compared in. exp: e^(h/d), the reading under which 2.2 gives the paper's "
                        "merges. log2 orders steps alike on another scale."
                    ),
                ),
                io.Combo.Input(
                    "unreachable",
                    options=list(UNREACHABLE_CHOICES),
                    default=UNREACHABLE_CHOICES[0],
                    advanced=True,
                    tooltip=(
                        "What to do with a step that stays below tau even when merged to the end: leave it out, or "
                        "merge it to the end."
                    ),
                ),
                io.Boolean.Input(
                    "allow_flip",
                    default=False,
                    advanced=True,
                    tooltip=(
                        "Accept merges so long that the latent changes sign. Only to repeat such experiments: the "
                        "images are ruined."
                    ),
                ),
                io.Int.Input(
                    "group_size",
                    default=8,
                    min=2,
                    max=256,
                    tooltip=(
                        "Only for the cost line of the table. The group size of training is set on E-GRPO Train LoRA."
                    ),
                ),
                io.Sigmas.Input(
                    "sigmas",
                    optional=True,
                    tooltip="Any schedule of a rectified flow, falling from at most 1 to 0. Replaces steps and shift.",
                ),
            ],
            outputs=[
                types.Plan.Output("plan", tooltip="For E-GRPO Train LoRA, Rollout Preview and Evaluate."),
                io.Sigmas.Output("sigmas", tooltip="The schedule, to sample with the steps that are trained."),
                io.Image.Output(
                    "plot", tooltip="Entropy per step, the threshold, the jumps, and the noise they leave."
                ),
                io.String.Output("table", tooltip="One line per active step, notes, and the cost per prompt."),
            ],
        )

    @classmethod
    def validate_inputs(cls, custom_steps: str | None = None, explicit_merges: str | None = None) -> bool | str:
        # Only free text: naming an input turns off ComfyUI's own range check of it.
        try:
            if custom_steps:
                active_indices(custom_steps, MAX_STEPS)
            if explicit_merges:
                parse_merges(explicit_merges)
        except PlanError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        steps: int,
        shift: float,
        eta: float,
        tau_mode: str,
        tau: float,
        tau_quantile: float,
        target_groups: int,
        active_steps: str,
        custom_steps: str,
        merging: str,
        explicit_merges: str,
        grouping: str,
        kernel: str,
        entropy_unit: str,
        unreachable: str,
        allow_flip: bool,
        group_size: int,
        sigmas: Tensor | None = None,
    ) -> io.NodeOutput:
        from ..egrpo.plots import plot_plan, to_tensor

        schedule = flow_sigmas(steps, shift) if sigmas is None else sigmas
        active = _chosen_steps(active_steps, custom_steps)
        merge = _chosen_merge(merging, explicit_merges)
        if merge is None:
            shared = {"eta": eta, "active": active, "kernel": kernel, "entropy_unit": entropy_unit}
            if tau_mode == "quantile":
                tau = quantile_tau(schedule, tau_quantile, **shared)
            elif tau_mode == "groups":
                tau = tau_for_groups(schedule, target_groups, grouping=grouping, **shared)
        plan = plan_steps(
            schedule,
            eta,
            tau,
            active,
            grouping,
            merge=merge,
            kernel=kernel,
            entropy_unit=entropy_unit,
            unreachable=unreachable,
            allow_flip=allow_flip,
        )
        plot = to_tensor(plot_plan(plan))
        table = plan.table(group_size)
        return io.NodeOutput(
            plan,
            torch.tensor(plan.sigmas, dtype=torch.float32),
            plot,
            table,
            ui={**ui.PreviewImage(plot, cls=cls).as_dict(), "text": [table]},
        )


def _chosen_steps(active_steps: str, custom_steps: str) -> str:
    if active_steps != CUSTOM:
        return active_steps
    if not custom_steps.strip():
        raise PlanError("active_steps is custom, but custom_steps is empty: write step numbers such as 0,1,4")
    return custom_steps


def _chosen_merge(merging: str, explicit_merges: str) -> int | dict[int, int] | None:
    """``merge`` of :func:`egrpo.schedule.plan_steps`."""
    if merging == ADAPTIVE:
        return None
    if merging == EXPLICIT:
        merges = parse_merges(explicit_merges)
        if not merges:
            raise PlanError("merging is explicit, but explicit_merges is empty: write pairs such as 0:1 1:1 2:2 4:3")
        return merges
    return FIXED_MERGES[merging]
