"""Schedules, entropies and merge plans against the numbers of the method."""

import json
import random
from pathlib import Path

import pytest
import torch

from egrpo.schedule import (
    Plan,
    PlanError,
    active_indices,
    checked_sigmas,
    flow_sigmas,
    parse_merges,
    plan_steps,
    quantile_tau,
    step_entropy,
    tau_for_groups,
)
from egrpo.sde import CPS

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sigmas.json").read_text())["schedules"]
PAPER = flow_sigmas(16, 3.0)


def merges(plan):
    return [step.merge for step in plan.steps]


def indices(plan):
    return [step.index for step in plan.steps]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_schedules(name):
    steps, shift = name[1:].split("_s")
    sigmas = flow_sigmas(int(steps), float(shift))
    assert sigmas.dtype == torch.float64
    torch.testing.assert_close(sigmas, torch.tensor(GOLDEN[name], dtype=torch.float64), rtol=0, atol=1e-11)


def test_entropies_of_the_paper_setting():
    expected = [2.893, 2.989, 2.137, 1.763, 1.542, 1.392, 1.281, 1.193]
    assert [round(step_entropy(PAPER, i), 3) for i in range(8)] == expected


@pytest.mark.parametrize(
    ("tau", "expected"),
    [
        (1.8, [1, 1, 1, 2, 2, 2, 2, 3]),
        (2.0, [1, 1, 1, 2, 2, 2, 3, 3]),
        (2.2, [1, 1, 2, 2, 2, 3, 3, 3]),
        (2.6, [1, 1, 2, 3, 3, 4, 4, 4]),
        (0.0, [1] * 8),
    ],
)
def test_merge_lists_of_the_paper_setting(tau, expected):
    plan = plan_steps(PAPER, tau=tau)
    assert indices(plan) == list(range(8))
    assert merges(plan) == expected


def test_entropy_in_log2_gives_the_other_reading():
    plan = plan_steps(PAPER, tau=2.2, entropy_unit="log2")
    assert merges(plan) == [1, 1, 2, 2, 2, 3, 3, 3]
    assert merges(plan_steps(PAPER, tau=2.6, entropy_unit="log2")) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_disjoint_plan_reproduces_the_published_list():
    plan = plan_steps(PAPER, tau=2.6, grouping="disjoint", active="first_half")
    assert list(zip(indices(plan), merges(plan))) == [(0, 1), (1, 1), (2, 2), (4, 3), (7, 4)]


def test_merged_entropy_reaches_the_threshold_and_one_less_does_not():
    plan = plan_steps(PAPER, tau=2.2)
    for step in plan.steps:
        assert step.entropy == step_entropy(PAPER, step.index, step.merge) >= 2.2
        assert step.merge == 1 or step_entropy(PAPER, step.index, step.merge - 1) < 2.2


def test_active_choices():
    chosen = {name: active_indices(name, 16) for name in ("first_half", "second_half", "first_4", "second_8", "all")}
    assert chosen == {
        "first_half": list(range(8)),
        "second_half": list(range(8, 16)),
        "first_4": list(range(4)),
        "second_8": list(range(8, 16)),
        "all": list(range(16)),
    }
    assert active_indices("first_half", 7) == [0, 1, 2, 3]
    assert active_indices("4, 0 2", 16) == [0, 2, 4]


def test_explicit_list_names_steps_and_merges():
    plan = plan_steps(PAPER, merge=parse_merges("0:1 1:1, 2:2 4:3"))
    assert list(zip(indices(plan), merges(plan))) == [(0, 1), (1, 1), (2, 2), (4, 3)]
    assert plan.tau is None


def test_fixed_merge():
    assert merges(plan_steps(PAPER, merge=2, active="2 3 4 5")) == [2, 2, 2, 2]


def test_unreachable_steps_are_left_out_with_a_note_or_merged_to_the_end():
    plan = plan_steps(PAPER, tau=2.2, active="all")
    left_out = sorted(set(range(16)) - set(indices(plan)))
    assert left_out and all(any(f"step {i} left out" in note for note in plan.notes) for i in left_out)
    to_end = plan_steps(PAPER, tau=2.2, active="all", unreachable="merge_to_end")
    assert indices(to_end) == list(range(16))
    assert all(step.index + step.merge == 16 for step in to_end.steps if step.index in left_out)


def test_flip_is_refused_by_name_unless_allowed():
    with pytest.raises(PlanError, match=r"step 1 merged over 4 flips the latent.*-0\.2"):
        plan_steps(PAPER, merge={1: 4})
    allowed = plan_steps(PAPER, merge={1: 4}, allow_flip=True).steps[0]
    assert allowed.contraction == pytest.approx(-0.24, abs=5e-3)
    assert allowed.noise_ratio == pytest.approx(1.84, abs=5e-3)


def test_cps_keeps_the_noise_level_of_a_merge_that_would_flip():
    step = plan_steps(PAPER, merge={1: 4}, kernel=CPS).steps[0]
    assert step.noise_ratio == pytest.approx(1.0)


def test_rough_merge_carries_a_note():
    assert any("step 1 merged over 3" in note for note in plan_steps(PAPER, merge={1: 3}).notes)
    assert plan_steps(PAPER).notes == ()


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([1.0, 0.5, 0.5, 0.0], r"sigma 2 \(0.5\) is not below sigma 1 \(0.5\)"),
        ([1.0, 0.2, 0.6, 0.0], "must strictly decrease"),
        ([14.6, 3.0, 0.0], "above 1"),
        ([1.0, 0.5], "last sigma is 0.5"),
        ([1.0, float("nan"), 0.0], "sigma 1 is nan"),
        ([1.0], "at least two"),
    ],
)
def test_bad_schedules_are_refused(sigmas, message):
    with pytest.raises(PlanError, match=message):
        plan_steps(sigmas)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eta": 0.0}, "eta is 0.0"),
        ({"eta": float("nan")}, "eta is nan"),
        ({"eta": 1.5, "kernel": CPS}, "eta is 1.5"),
        ({"merge": {14: 3}}, "step 14 merged over 3 passes the end"),
        ({"merge": {3: 0}}, "step 3 merged over 0"),
        ({"merge": 6, "active": "12"}, "passes the end"),
        ({"active": "99"}, r"\[99\] lie outside"),
        ({"active": "some"}, "neither a choice"),
        ({"active": ""}, "no step"),
        ({"active": "15", "tau": 50.0}, "no step"),
        ({"grouping": "random"}, "unknown grouping 'random'"),
        ({"kernel": "sde"}, "unknown kernel 'sde'"),
        ({"entropy_unit": "bits"}, "unknown entropy unit 'bits'"),
        ({"unreachable": "keep"}, "unknown choice 'keep'"),
        ({"granularity": (0,)}, "granularity"),
        ({"granularity": ()}, "granularity"),
        ({"merge": {14: 2}, "kernel": CPS}, "step 14 merged over 2 has no noise"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(PlanError, match=message):
        plan_steps(PAPER, **settings)


@pytest.mark.parametrize(("steps", "shift"), [(0, 3.0), (16, 0.0), (16, float("nan"))])
def test_bad_schedule_settings_are_refused(steps, shift):
    with pytest.raises(PlanError):
        flow_sigmas(steps, shift)


@pytest.mark.parametrize("text", ["2", "2:", "a:1", "0:1 2-3"])
def test_bad_explicit_lists_are_refused(text):
    with pytest.raises(PlanError, match="is not step:merge"):
        parse_merges(text)


def random_schedule(seed):
    draw = random.Random(seed)
    inner = sorted({draw.uniform(0.01, 0.99) for _ in range(draw.randint(3, 30))}, reverse=True)
    return [draw.choice([1.0, 0.995]), *inner, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_any_decreasing_schedule_can_be_planned(seed):
    sigmas = random_schedule(seed)
    assert list(checked_sigmas(torch.tensor(sigmas, dtype=torch.float64))) == sigmas
    plan = plan_steps(sigmas, tau=1.0, active="all", allow_flip=True, unreachable="merge_to_end", granularity=(1, 2, 3))
    last = len(sigmas) - 1
    assert plan.total_steps == last
    for step in plan.steps:
        assert step.sigma == sigmas[step.index] and step.sigma_next == sigmas[step.index + step.merge]
        for stride in (1, 2, 3, 5):
            tail = plan.tail(step, stride)
            assert tail[0] == step.index + step.merge and tail[-1] == last
            assert all(0 < b - a <= stride for a, b in zip(tail, tail[1:]))


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [({"merge": parse_merges("0:1 1:1 2:2 4:3")}, 616, 4), ({"tau": 0.0}, 1120, 8)],
)
def test_evaluations_of_the_worked_examples(settings, forward, backward):
    assert plan_steps(PAPER, **settings).evaluations(12) == (forward, backward)


def test_granularity_adds_its_coarser_tails():
    single = plan_steps(PAPER, merge={1: 1}).evaluations(2)
    double = plan_steps(PAPER, merge={1: 1}, granularity=(1, 2)).evaluations(2)
    assert single == (16 + 2 * 14, 1) and double == (16 + 2 * (14 + 7), 1)


@pytest.mark.parametrize("kernel", ["flow_sde", "cps"])
def test_plan_survives_json(kernel):
    plan = plan_steps(PAPER, tau=2.6, grouping="disjoint", kernel=kernel, granularity=(1, 2), active="all")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_table_shows_every_step_and_the_cost():
    table = plan_steps(PAPER).table(group_size=12)
    rows = [line.split() for line in table.splitlines()[1:9]]
    assert [(int(row[0]), int(row[2])) for row in rows] == list(enumerate([1, 1, 2, 2, 2, 3, 3, 3]))
    assert "8 active" in table and "8 with gradient" in table


def test_quantile_tau_merges_nothing_at_zero_and_most_at_one():
    lowest, highest = quantile_tau(PAPER, 0.0), quantile_tau(PAPER, 1.0)
    assert merges(plan_steps(PAPER, tau=lowest)) == [1] * 8
    assert highest == pytest.approx(2.989, abs=1e-3)
    with pytest.raises(PlanError, match="quantile is 1.5"):
        quantile_tau(PAPER, 1.5)


@pytest.mark.parametrize("groups", [2, 3, 4, 5, 8])
def test_tau_for_groups_hits_the_number_of_groups(groups):
    tau = tau_for_groups(PAPER, groups, grouping="disjoint")
    reached = len(plan_steps(PAPER, tau=tau, grouping="disjoint").steps)
    others = [tau * factor for factor in (0.5, 0.8, 0.95, 1.05, 1.2, 1.5)]
    for other in others:
        try:
            assert abs(reached - groups) <= abs(len(plan_steps(PAPER, tau=other, grouping="disjoint").steps) - groups)
        except PlanError:
            continue
