"""Which limit decided a submodel: one that alone excludes a larger one, or several that exclude it together."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from server.test_assignment import CANDIDATES, PLAN, budgets, build_question_for

from subfleet.methods.assigner import AssignmentContext, WrittenSize, assign_largest
from subfleet.protocol.readings import Budget
from subfleet.rounds.assigning import BY_METHOD, find_deciding_limit
from subfleet.search.candidates import LIMITS, Candidate, Obstacle
from subfleet.search.queue import ProgramFacts

PLENTY = Budget(memory_bytes=10**9)


def build_candidate(name: str, parameters: int, *, memory: int, moved: int, macs: int = 1) -> Candidate:
    return Candidate(
        architecture=replace(CANDIDATES[0].architecture, name=name),
        parameters=parameters,
        forward_macs=macs,
        weight_bytes=moved,
        update_bytes=moved,
        training_memory_bytes={"onnx": memory},
    )


SMALL = build_candidate("small", 1, memory=1, moved=1)
# Deep ones keep more for the backward pass, wide ones move more.
DEEP = build_candidate("deep", 2, memory=30, moved=10)
WIDE = build_candidate("wide", 3, memory=20, moved=20)
WHOLE = build_candidate("whole", 4, memory=40, moved=30, macs=9)


def build_question(memory: int, link: int | None = None, **changes: object) -> AssignmentContext:
    budget = Budget(memory_bytes=memory, uplink_bytes=link, downlink_bytes=link)
    question = replace(build_question_for(PLAN, budget), candidates=(SMALL, DEEP, WIDE, WHOLE))
    return replace(question, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "link", "expected", "decides"),
    [
        (40, 30, WHOLE, ""),
        (40, None, WHOLE, ""),
        (25, None, WIDE, "memory"),  # the whole exceeds memory alone
        (40, 29, WIDE, "link"),
        (25, 29, WIDE, "memory+link"),  # the whole exceeds both, and no other is larger
        (30, 15, DEEP, "link"),  # the wide one exceeds the link alone
        (15, 15, SMALL, "memory"),  # the deep one exceeds memory alone
        (30, 9, SMALL, "link"),
        (25, 15, SMALL, "memory+link"),  # the deep one exceeds memory alone, the wide one the link alone
        (15, 9, SMALL, "memory+link"),
        (0, 0, None, "memory+link"),
        (0, 5, None, "memory"),
    ],
)
def test_the_limit_that_alone_excludes_a_larger_size_decides(
    memory: int, link: int | None, expected: Candidate | None, decides: str
) -> None:
    question = build_question(memory, link)
    assert assign_largest(question).candidate == expected
    assert find_deciding_limit(question, expected) == decides


def test_compute_is_a_limit() -> None:
    question = build_question(40)
    question = replace(question, budget=replace(question.budget, forward_macs=8))
    assert find_deciding_limit(question, assign_largest(question).candidate) == "compute"


def test_a_method_that_assigns_less_than_fits_decides_itself() -> None:
    assert find_deciding_limit(build_question(40, 30), SMALL) == BY_METHOD
    assert find_deciding_limit(build_question(25, 30), DEEP) == BY_METHOD


def written_sizes(peak: int | None, operators: tuple[str, ...] = ()) -> Mapping[str, WrittenSize]:
    size = WHOLE.architecture
    return MappingProxyType(
        {size.architecture_id: WrittenSize(size=size, facts=ProgramFacts(planned_peak_bytes=peak, operators=operators))}
    )


def test_the_programs_own_plan_counts() -> None:
    assert find_deciding_limit(build_question(45, written=written_sizes(46)), WIDE) == "memory"
    assert find_deciding_limit(build_question(45, written=written_sizes(45)), WIDE) == BY_METHOD


def test_a_program_that_the_device_cannot_run_is_no_matter_of_memory() -> None:
    assert find_deciding_limit(build_question(45, written=written_sizes(None)), WIDE) == "runtime"
    lacking = build_question(45, written=written_sizes(40, ("Conv",)), operators=("Gemm",))
    assert find_deciding_limit(lacking, WIDE) == "runtime"
    assert (
        find_deciding_limit(
            build_question(45, refused={WHOLE.architecture.architecture_id: Obstacle(limit="runtime", why="no")}), WIDE
        )
        == "runtime"
    )


@pytest.mark.parametrize("limit", ["memory", "runtime"])
def test_a_size_that_proved_too_large_is_excluded_by_the_observed_limit(limit: str) -> None:
    assert find_deciding_limit(build_question(45, below=WHOLE, below_limit=limit), WIDE) == limit
    assert find_deciding_limit(build_question(45, 25, below=WIDE, below_limit="memory"), DEEP) == "memory"


@given(budgets)
def test_the_largest_fitting_size_is_decided_by_what_it_exceeds(budget: Budget) -> None:
    question = build_question_for(PLAN, budget)
    chosen = assign_largest(question).candidate
    deciding = find_deciding_limit(question, chosen)
    larger = [candidate for candidate in CANDIDATES if chosen is None or candidate.order > chosen.order]
    assert (deciding == "") == (not larger)
    for limit in deciding.split("+") if deciding else ():
        assert limit in LIMITS
        assert any(limit in question.find_exceeded(candidate) for candidate in larger)
    assert find_deciding_limit(question, CANDIDATES[-1]) == ""


@given(budgets)
def test_an_allowed_submodel_exceeds_no_limit(budget: Budget) -> None:
    question = build_question_for(PLAN, budget)
    for candidate in CANDIDATES:
        assert question.allows(candidate) == (not question.find_exceeded(candidate))
