"""Which limit decided a submodel: the one that excludes a larger one alone, else those that exclude it together."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from server.test_assignment import CANDIDATES, PLAN, ask, budgets

from subfleet.methods.assigner import AssignmentContext, WrittenSize, assign_largest
from subfleet.protocol.readings import Budget
from subfleet.rounds.assigning import BY_METHOD, find_deciding_limit
from subfleet.search.candidates import LIMITS, Candidate, Obstacle
from subfleet.search.queue import ProgramFacts

PLENTY = Budget(memory_bytes=10**9)


def candidate(name: str, parameters: int, *, memory: int, moved: int, macs: int = 1) -> Candidate:
    return Candidate(
        architecture=replace(CANDIDATES[0].architecture, name=name),
        parameters=parameters,
        forward_macs=macs,
        weight_bytes=moved,
        update_bytes=moved,
        training_memory_bytes={"onnx": memory},
    )


SMALL = candidate("small", 1, memory=1, moved=1)
# Deep ones keep more for the backward pass, wide ones move more.
DEEP = candidate("deep", 2, memory=30, moved=10)
WIDE = candidate("wide", 3, memory=20, moved=20)
WHOLE = candidate("whole", 4, memory=40, moved=30, macs=9)


def asked(memory: int, link: int | None = None, **more: object) -> AssignmentContext:
    budget = Budget(memory_bytes=memory, uplink_bytes=link, downlink_bytes=link)
    plain = replace(ask(PLAN, budget), candidates=(SMALL, DEEP, WIDE, WHOLE))
    return replace(plain, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "link", "given_one", "decides"),
    [
        (40, 30, WHOLE, ""),
        (40, None, WHOLE, ""),
        (25, None, WIDE, "memory"),  # the whole exceeds memory alone
        (40, 29, WIDE, "link"),
        (25, 29, WIDE, "memory+link"),  # the whole exceeds both, and there is no other
        (30, 15, DEEP, "link"),  # the wide one exceeds the link alone
        (15, 15, SMALL, "memory"),  # the deep one exceeds memory alone
        (30, 9, SMALL, "link"),
        (25, 15, SMALL, "memory+link"),  # the deep one exceeds memory alone, the wide one the link alone
        (15, 9, SMALL, "memory+link"),
        (0, 0, None, "memory+link"),
        (0, 5, None, "memory"),
    ],
)
def test_a_limit_decides_that_excludes_a_larger_size_alone(
    memory: int, link: int | None, given_one: Candidate | None, decides: str
) -> None:
    question = asked(memory, link)
    assert assign_largest(question).candidate == given_one
    assert find_deciding_limit(question, given_one) == decides


def test_compute_is_a_limit() -> None:
    question = asked(40)
    question = replace(question, budget=replace(question.budget, forward_macs=8))
    assert find_deciding_limit(question, assign_largest(question).candidate) == "compute"


def test_a_method_that_gives_less_than_fits_decides_itself() -> None:
    assert find_deciding_limit(asked(40, 30), SMALL) == BY_METHOD
    assert find_deciding_limit(asked(25, 30), DEEP) == BY_METHOD


def written(peak: int | None, operators: tuple[str, ...] = ()) -> Mapping[str, WrittenSize]:
    size = WHOLE.architecture
    return MappingProxyType(
        {size.architecture_id: WrittenSize(size=size, facts=ProgramFacts(planned_peak_bytes=peak, operators=operators))}
    )


def test_the_programs_own_plan_counts() -> None:
    assert find_deciding_limit(asked(45, written=written(46)), WIDE) == "memory"
    assert find_deciding_limit(asked(45, written=written(45)), WIDE) == BY_METHOD


def test_a_program_that_the_device_cannot_run_is_no_matter_of_memory() -> None:
    assert find_deciding_limit(asked(45, written=written(None)), WIDE) == "runtime"
    lacking = asked(45, written=written(40, ("Conv",)), operators=("Gemm",))
    assert find_deciding_limit(lacking, WIDE) == "runtime"
    assert (
        find_deciding_limit(
            asked(45, refused={WHOLE.architecture.architecture_id: Obstacle(limit="runtime", why="no")}), WIDE
        )
        == "runtime"
    )


@pytest.mark.parametrize("limit", ["memory", "runtime"])
def test_what_turned_out_too_large_is_excluded_by_what_was_found(limit: str) -> None:
    assert find_deciding_limit(asked(45, below=WHOLE, below_limit=limit), WIDE) == limit
    assert find_deciding_limit(asked(45, 25, below=WIDE, below_limit="memory"), DEEP) == "memory"


@given(budgets)
def test_the_largest_fitting_size_is_decided_by_what_it_exceeds(budget: Budget) -> None:
    question = ask(PLAN, budget)
    chosen = assign_largest(question).candidate
    decided = find_deciding_limit(question, chosen)
    larger = [one for one in CANDIDATES if chosen is None or one.order > chosen.order]
    assert (decided == "") == (not larger)
    for limit in decided.split("+") if decided else ():
        assert limit in LIMITS
        assert any(limit in question.find_exceeded(one) for one in larger)
    assert find_deciding_limit(question, CANDIDATES[-1]) == ""


@given(budgets)
def test_what_may_be_given_exceeds_nothing(budget: Budget) -> None:
    question = ask(PLAN, budget)
    for one in CANDIDATES:
        assert question.allows(one) == (not question.find_exceeded(one))
