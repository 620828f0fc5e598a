"""Exact memory plans correct the cost estimates of a search, and decide in the end."""

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


def assignment_context(memory_bytes: int, written: Mapping[str, WrittenSize]) -> AssignmentContext:
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


def plan_sizes(factor: float, *candidates: Candidate) -> dict[str, WrittenSize]:
    """Written sizes with plans of `factor` times the cost estimates of their candidates."""
    return {
        candidate.architecture.architecture_id: WrittenSize(
            size=candidate.architecture,
            facts=ProgramFacts(planned_peak_bytes=int(factor * candidate.training_memory_bytes["onnx"])),
        )
        for candidate in candidates
    }


def choose(context: AssignmentContext, method: DynamicSelection = CORRECTED) -> Candidate:
    """The size that the search prefers, whether it has a program or not."""
    assignment = method.roles().assigner.assign(context)
    assert assignment.candidate is not None
    return PLAN.first.estimate(
        assignment.candidate.architecture if assignment.requested is None else assignment.requested.program.size
    )


def is_largest(context: AssignmentContext, method: DynamicSelection = CORRECTED) -> bool:
    """Whether the search prefers the largest submodel, under any name."""
    return choose(context, method).architecture.architecture_id == LARGEST.architecture.architecture_id


def test_without_plans_a_margin_of_the_budget_is_kept() -> None:
    estimate = LARGEST.training_memory_bytes["onnx"]
    assert not is_largest(assignment_context(estimate, {}))
    assert is_largest(assignment_context(estimate, {}), replace(CORRECTED, estimates="estimated"))
    assert is_largest(assignment_context(int(1.04 * estimate), {}))


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.25])
def test_plans_correct_the_size_that_is_chosen(factor: float) -> None:
    written = plan_sizes(factor, *PLAN.first.candidates[:4])
    estimate = LARGEST.training_memory_bytes["onnx"]
    assert is_largest(assignment_context(int(1.01 * factor * estimate), written))
    smaller = choose(assignment_context(int(0.99 * factor * estimate), written))
    assert smaller.training_memory_bytes["onnx"] < estimate


def test_one_plan_far_above_its_estimate_raises_no_other_estimate() -> None:
    products = itertools.product(*([Prefix(size=size) for size in (4, 8)] for _ in WIDTHS))
    architectures = (Architecture(axes=tuple(zip(WIDTHS, prefixes, strict=True))) for prefixes in products)
    outlier, *rest = (PLAN.first.estimate(architecture) for architecture in architectures)
    written = {**plan_sizes(1.0, *rest), **plan_sizes(3.0, outlier)}
    assert len(written) > 10
    assert is_largest(assignment_context(int(1.01 * LARGEST.training_memory_bytes["onnx"]), written))


def test_with_few_plans_the_most_expensive_one_counts() -> None:
    first, second, *_ = PLAN.first.candidates
    written = {**plan_sizes(1.0, first), **plan_sizes(1.25, second)}
    estimate = LARGEST.training_memory_bytes["onnx"]
    assert is_largest(assignment_context(int(1.26 * estimate), written))
    assert not is_largest(assignment_context(int(1.24 * estimate), written))


def test_a_written_size_counts_by_its_own_plan() -> None:
    estimate = LARGEST.training_memory_bytes["onnx"]
    known = plan_sizes(1.5, LARGEST)
    assert not is_largest(
        assignment_context(int(1.4 * estimate), {**known, **plan_sizes(1.0, *PLAN.first.candidates[:-1])})
    )
    assert is_largest(assignment_context(int(1.6 * estimate), known))


def test_sizes_without_a_program_correct_nothing() -> None:
    broken = {
        candidate.architecture.architecture_id: WrittenSize(
            size=candidate.architecture, facts=ProgramFacts(planned_peak_bytes=None)
        )
        for candidate in PLAN.first.candidates[:2]
    }
    assert is_largest(assignment_context(int(1.04 * LARGEST.training_memory_bytes["onnx"]), broken))


def test_plans_of_a_target_that_has_no_estimates_correct_nothing() -> None:
    unknown = {
        key: replace(size, estimate=replace(PLAN.first.estimate(size.size), training_memory_bytes={}))
        for key, size in plan_sizes(3.0, *PLAN.first.candidates[:2]).items()
    }
    assert is_largest(assignment_context(int(1.04 * LARGEST.training_memory_bytes["onnx"]), unknown))


def test_the_choice_does_not_depend_on_the_order_of_plans() -> None:
    written = {**plan_sizes(1.2, *PLAN.first.candidates[:2]), **plan_sizes(0.9, *PLAN.first.candidates[2:4])}
    reordered = dict(reversed(written.items()))
    budget_bytes = int(0.9 * LARGEST.training_memory_bytes["onnx"])
    assert choose(assignment_context(budget_bytes, written)) == choose(assignment_context(budget_bytes, reordered))
