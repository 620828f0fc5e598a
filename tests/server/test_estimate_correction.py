"""Exact plans correct the cost estimates that a search goes by, and decide in the end."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from server.coordinator_cases import context_of
from server.server_rig import search_of

from subfleet.methods.assigner import AssignmentContext, Draw, WrittenSize
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.search.candidates import Candidate
from subfleet.search.queue import ProgramFacts

PLAN = context_of(method=DynamicSelection(distillation=None, estimates="estimated"))
CORRECTED = DynamicSelection(distillation=None)
LARGEST = PLAN.first.candidates[-1]
WIDTHS = tuple(name for name, axis in sorted(PLAN.network.axes.items()) if axis.kind == "channel")


def asked(memory_bytes: int, written: Mapping[str, WrittenSize]) -> AssignmentContext:
    return AssignmentContext(
        networks={"": PLAN.network},
        candidates=PLAN.first.candidates,
        estimate=PLAN.first.estimate,
        draw=Draw(seed=0, round=2, client_id="ada"),
        target="onnx",
        budget=Budget(memory_bytes=memory_bytes),
        written=written,
        search=search_of(PLAN),
    )


def planned(factor: float, *candidates: Candidate) -> dict[str, WrittenSize]:
    """Candidates whose programs are planned to take so much more than their cost estimate."""
    return {
        one.architecture.architecture_id: WrittenSize(
            size=one.architecture,
            facts=ProgramFacts(planned_peak_bytes=int(factor * one.training_memory_bytes["onnx"])),
        )
        for one in candidates
    }


def chosen(ask: AssignmentContext, method: DynamicSelection = CORRECTED) -> Candidate:
    """What the search would give, whether it has a program or not."""
    found = method.roles().assigner.assign(ask)
    assert found.candidate is not None
    return PLAN.first.estimate(
        found.candidate.architecture if found.requested is None else found.requested.program.size
    )


def whole(ask: AssignmentContext, method: DynamicSelection = CORRECTED) -> bool:
    """Whether the search would give the largest submodel, under whatever name."""
    return chosen(ask, method).architecture.architecture_id == LARGEST.architecture.architecture_id


def test_without_plans_a_little_of_the_budget_is_kept_back() -> None:
    estimate = LARGEST.training_memory_bytes["onnx"]
    assert not whole(asked(estimate, {}))
    assert whole(asked(estimate, {}), replace(CORRECTED, estimates="estimated"))
    assert whole(asked(int(1.04 * estimate), {}))


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.25])
def test_plans_move_what_is_given(factor: float) -> None:
    written = planned(factor, *PLAN.first.candidates[:4])
    estimate = LARGEST.training_memory_bytes["onnx"]
    assert whole(asked(int(1.01 * factor * estimate), written))
    smaller = chosen(asked(int(0.99 * factor * estimate), written))
    assert smaller.training_memory_bytes["onnx"] < estimate


def test_one_plan_far_above_its_estimate_does_not_make_all_dear() -> None:
    sizes = itertools.product(*([Prefix(size=kept) for kept in (4, 8)] for _ in WIDTHS))
    architectures = (Architecture(axes=tuple(zip(WIDTHS, one, strict=True))) for one in sizes)
    odd, *others = (PLAN.first.estimate(one) for one in architectures)
    written = {**planned(1.0, *others), **planned(3.0, odd)}
    assert len(written) > 10
    assert whole(asked(int(1.01 * LARGEST.training_memory_bytes["onnx"]), written))


def test_of_few_plans_the_dearest_counts() -> None:
    one, other, *_ = PLAN.first.candidates
    written = {**planned(1.0, one), **planned(1.25, other)}
    estimate = LARGEST.training_memory_bytes["onnx"]
    assert whole(asked(int(1.26 * estimate), written))
    assert not whole(asked(int(1.24 * estimate), written))


def test_a_written_size_counts_by_its_own_plan() -> None:
    estimate = LARGEST.training_memory_bytes["onnx"]
    known = planned(1.5, LARGEST)
    assert not whole(asked(int(1.4 * estimate), {**known, **planned(1.0, *PLAN.first.candidates[:-1])}))
    assert whole(asked(int(1.6 * estimate), known))


def test_sizes_without_a_program_correct_nothing() -> None:
    broken = {
        one.architecture.architecture_id: WrittenSize(
            size=one.architecture, facts=ProgramFacts(planned_peak_bytes=None)
        )
        for one in PLAN.first.candidates[:2]
    }
    assert whole(asked(int(1.04 * LARGEST.training_memory_bytes["onnx"]), broken))


def test_plans_of_a_target_that_has_no_estimates_correct_nothing() -> None:
    unknown = {
        key: replace(size, estimate=replace(PLAN.first.estimate(size.size), training_memory_bytes={}))
        for key, size in planned(3.0, *PLAN.first.candidates[:2]).items()
    }
    assert whole(asked(int(1.04 * LARGEST.training_memory_bytes["onnx"]), unknown))


def test_the_answer_does_not_depend_on_the_order_in_which_plans_came() -> None:
    written = {**planned(1.2, *PLAN.first.candidates[:2]), **planned(0.9, *PLAN.first.candidates[2:4])}
    turned = dict(reversed(written.items()))
    budget_bytes = int(0.9 * LARGEST.training_memory_bytes["onnx"])
    assert chosen(asked(budget_bytes, written)) == chosen(asked(budget_bytes, turned))
