from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.methods.method_cases import QUICK
from server.server_rig import config, search_of

from subfleet.methods.assigner import AssignmentContext, Draw, WrittenSize, assign_largest
from subfleet.protocol.readings import Budget, Reading
from subfleet.rounds.context import RunContext
from subfleet.search.candidates import (
    Candidate,
    build_budget,
    find_obstacles,
    fits,
    limit_forward_macs,
    list_lacking_operators,
    order_candidates,
)
from subfleet.search.query import EstimateIndex, Query, satisfies
from subfleet.search.queue import ProgramFacts
from subfleet.serving.run_context import create_context

SETTINGS = config(rates=(0.5, 1.0))
PLAN = create_context(SETTINGS, "run")
CANDIDATES = PLAN.first.candidates


def build_question_for(context: RunContext, budget: Budget, below: Candidate | None = None) -> AssignmentContext:
    """Build the question of a client with this budget."""
    return AssignmentContext(
        networks={"": context.network},
        candidates=context.first.candidates,
        estimate=context.first.estimate,
        draw=Draw(seed=0, round=1, client_id="ada", memory=context.roles.memory.initial),
        target="onnx",
        budget=budget,
        below=below,
        search=search_of(context),
    )


def find_largest(budget: Budget, below: int | None = None) -> int | None:
    """Return the index of the chosen candidate; only those before `below` may be chosen."""
    limit = None if below is None else CANDIDATES[below]
    chosen = assign_largest(build_question_for(PLAN, budget, limit)).candidate
    return None if chosen is None else CANDIDATES.index(chosen)


budgets = st.builds(
    Budget,
    memory_bytes=st.integers(0, 40_000),
    downlink_bytes=st.none() | st.integers(0, 8_000),
    uplink_bytes=st.none() | st.integers(0, 8_000),
    forward_macs=st.none() | st.integers(0, 1_000),
    disk_bytes=st.none() | st.integers(0, 24_000),
)


def fits_budget(candidate: Candidate, budget: Budget) -> bool:
    """Whether a candidate is within a budget, checked limit by limit."""
    costs = {
        "memory_bytes": candidate.training_memory_bytes["onnx"],
        "downlink_bytes": candidate.weight_bytes,
        "uplink_bytes": candidate.update_bytes,
        "forward_macs": candidate.forward_macs,
        "disk_bytes": 3 * candidate.weight_bytes,
    }
    limits = {name: getattr(budget, name) for name in costs}
    return all(limits[name] is None or amount <= limits[name] for name, amount in costs.items())


@given(budgets, st.none() | st.integers(0, len(CANDIDATES) - 1))
def test_the_choice_fits_and_none_larger_does(budget: Budget, below: int | None) -> None:
    index = find_largest(budget, below)
    allowed = CANDIDATES[:below]
    if index is None:
        assert not any(fits_budget(candidate, budget) for candidate in allowed)
    else:
        assert fits_budget(allowed[index], budget)
        assert not any(fits_budget(candidate, budget) for candidate in allowed[index + 1 :])


COSTS: Mapping[str, Callable[[Candidate], int]] = {
    "memory_bytes": lambda candidate: candidate.training_memory_bytes["onnx"],
    "downlink_bytes": lambda candidate: candidate.weight_bytes,
    "uplink_bytes": lambda candidate: candidate.update_bytes,
    "forward_macs": lambda candidate: candidate.forward_macs,
    "disk_bytes": lambda candidate: 3 * candidate.weight_bytes,
}
LIMIT_NAMES = {
    "memory_bytes": "memory",
    "downlink_bytes": "link",
    "uplink_bytes": "link",
    "forward_macs": "compute",
    "disk_bytes": "disk",
}


@pytest.mark.parametrize("name", COSTS)
def test_a_limit_equal_to_the_cost_of_a_submodel_fits_and_one_less_does_not(name: str) -> None:
    plenty = Budget(memory_bytes=2**40)
    for index, candidate in enumerate(CANDIDATES):
        cost = COSTS[name](candidate)
        # The other estimates stay apart, so that only this limit is exceeded.
        changed = replace(candidate, weight_bytes=cost, update_bytes=cost) if LIMIT_NAMES[name] == "link" else candidate
        for short in (0, 1):
            budget = replace(plenty, **{name: cost - short})
            query = Query(target="onnx", limits=budget)
            exceeded = {obstacle.limit for obstacle in find_obstacles(changed, "onnx", budget)}
            assert exceeded == ({LIMIT_NAMES[name]} if short else set())
            assert fits(changed, "onnx", budget) != bool(short)
            assert build_question_for(PLAN, budget).allows(changed) != bool(short)
            assert build_question_for(PLAN, budget).find_exceeded(changed) == exceeded
            assert satisfies(changed, query) != bool(short)
            assert (EstimateIndex("onnx", [changed]).best(query) is None) == bool(short)
            assert (find_largest(budget) == index) != bool(short)


def test_a_search_returns_only_submodels_below_the_number_of_parameters() -> None:
    for candidate in CANDIDATES:
        for extra, fits_limit in ((0, False), (1, True)):
            plenty = Budget(memory_bytes=2**40)
            query = Query(target="onnx", limits=plenty, below_parameters=candidate.parameters + extra)
            assert satisfies(candidate, query) == fits_limit
            assert (EstimateIndex("onnx", [candidate]).best(query) is not None) == fits_limit


def test_an_exported_program_fits_a_budget_of_its_peak_and_not_one_byte_less() -> None:
    candidate = CANDIDATES[1]
    peak_bytes = 2 * candidate.training_memory_bytes["onnx"]
    written = {
        candidate.architecture.architecture_id: WrittenSize(
            size=candidate.architecture, facts=ProgramFacts(planned_peak_bytes=peak_bytes)
        )
    }
    for short in (0, 1):
        question = replace(build_question_for(PLAN, Budget(memory_bytes=peak_bytes - short)), written=written)
        assert question.allows(candidate) != bool(short)
        assert question.find_exceeded(candidate) == (frozenset({"memory"}) if short else frozenset())


@given(budgets, st.integers(0, 10_000))
def test_more_memory_never_assigns_a_smaller_submodel(budget: Budget, extra_bytes: int) -> None:
    richer = replace(budget, memory_bytes=budget.memory_bytes + extra_bytes)
    first, second = (find_largest(limits) for limits in (budget, richer))
    assert (-1 if first is None else first) <= (-1 if second is None else second)


@given(st.permutations(CANDIDATES))
def test_the_order_of_candidates_does_not_depend_on_their_input_order(shuffled: list[Candidate]) -> None:
    assert order_candidates(shuffled) == CANDIDATES


def test_the_link_budget_is_rate_times_time() -> None:
    budget = build_budget(Reading(downlink_bps=8e6, uplink_bps=None), 5, communication_s=2.0)
    assert budget == Budget(memory_bytes=5, downlink_bytes=2_000_000, uplink_bytes=None)


@pytest.mark.parametrize(
    ("macs_per_s", "training_s", "expected"),
    [(None, 10.0, None), (1e6, 0.0, None), (3e6, 10.0, 100_000), (0.1, 1.0, 0), (1e300, 1e9, 2**60)],
)
def test_the_budget_of_a_forward_pass_is_the_speed_times_the_time(
    macs_per_s: float | None, training_s: float, expected: int | None
) -> None:
    assert limit_forward_macs(macs_per_s, training_s, sample_passes=100) == expected


def test_a_runtime_that_lists_nothing_lacks_nothing() -> None:
    assert list_lacking_operators(["b", "a", "c"], ["c"]) == ("a", "b")
    assert list_lacking_operators(["a"], ()) == ()


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"memory_bytes": 10}, "bytes of memory and the budget is 10"),
        ({"downlink_bytes": 11}, "the link budget is 11 down and unknown up"),
        ({"uplink_bytes": 12}, "the link budget is unknown down and 12 up"),
        ({"forward_macs": 13}, "multiply-accumulates a sample and the budget is 13"),
    ],
)
def test_the_reason_names_the_limit_that_is_broken(limit: dict[str, int], words: str) -> None:
    plenty = Budget(memory_bytes=2**40)
    assert words in next(find_obstacles(CANDIDATES[0], "onnx", replace(plenty, **limit))).why
    assert next(find_obstacles(CANDIDATES[0], "onnx", plenty), None) is None


@cache
def context_of_method(name: str) -> RunContext:
    return create_context(config(method=QUICK[name]), "run")


def test_recomputed_activations_are_not_part_of_the_estimate() -> None:
    frugal = config(rates=(0.5, 1.0), training=replace(SETTINGS.training, recompute=True))
    for whole, half in zip(CANDIDATES, create_context(frugal, "run").first.candidates, strict=True):
        overhead_bytes = frugal.memory_overhead_bytes.get("onnx", 0)
        assert half.training_memory_bytes["onnx"] == 2 * whole.weight_bytes + overhead_bytes
        assert half.training_memory_bytes["onnx"] < whole.training_memory_bytes["onnx"]
