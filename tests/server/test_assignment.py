from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.server_rig import config

from subfleet.elastic.maps import nested_maps
from subfleet.protocol.readings import Budget, Reading
from subfleet.server.assignment import Candidate, budget_of, fits, ordered, why_nothing_fits
from subfleet.server.methods import METHODS, Method
from subfleet.server.methods.policies import Ask, Draw, largest_fitting
from subfleet.server.planning import plan_of
from subfleet.server.rounds import Plan

SETTINGS = config(rates=(0.5, 1.0))
PLAN = plan_of(SETTINGS, "run")
CANDIDATES = PLAN.candidates


def ask(plan: Plan, budget: Budget, below: Candidate | None = None) -> Ask:
    """A client with this budget."""
    return Ask(
        network=plan.network,
        candidates=plan.candidates,
        price=plan.price,
        draw=Draw(seed=0, round=1, client_id="ada"),
        target="onnx",
        budget=budget,
        below=below,
    )


def largest(budget: Budget, below: int | None = None) -> int | None:
    """Place of the chosen candidate; only those before `below` may be chosen."""
    limit = None if below is None else CANDIDATES[below]
    chosen = largest_fitting(ask(PLAN, budget, limit)).candidate
    return None if chosen is None else CANDIDATES.index(chosen)


budgets = st.builds(
    Budget,
    memory_bytes=st.integers(0, 40_000),
    downlink_bytes=st.none() | st.integers(0, 8_000),
    uplink_bytes=st.none() | st.integers(0, 8_000),
)


@given(budgets, st.none() | st.integers(0, len(CANDIDATES) - 1))
def test_the_choice_fits_and_none_larger_does(budget: Budget, below: int | None) -> None:
    place = largest(budget, below)
    allowed = CANDIDATES[:below]
    if place is None:
        assert not any(fits(one, "onnx", budget) for one in allowed)
        assert why_nothing_fits(CANDIDATES, "onnx", budget).startswith("no subnet fits")
    else:
        assert fits(allowed[place], "onnx", budget)
        assert not any(fits(one, "onnx", budget) for one in allowed[place + 1 :])


@given(budgets, st.integers(0, 10_000))
def test_more_memory_never_gives_less(budget: Budget, more: int) -> None:
    richer = replace(budget, memory_bytes=budget.memory_bytes + more)
    first, second = (largest(one) for one in (budget, richer))
    assert (-1 if first is None else first) <= (-1 if second is None else second)


@given(st.permutations(CANDIDATES))
def test_the_order_is_one_whatever_came_first(shuffled: list[Candidate]) -> None:
    assert ordered(shuffled) == CANDIDATES


def test_the_link_budget_is_rate_times_time() -> None:
    budget = budget_of(Reading(downlink_bps=8e6, uplink_bps=None), 5, communication_s=2.0)
    assert budget == Budget(memory_bytes=5, downlink_bytes=2_000_000, uplink_bytes=None)


def test_an_estimate_passes_over_no_subnet_whose_activations_are_computed_twice() -> None:
    frugal = config(rates=(0.5, 1.0), training=replace(SETTINGS.training, recompute=True))
    for whole, half in zip(CANDIDATES, plan_of(frugal, "run").candidates, strict=True):
        overhead_bytes = frugal.memory_overhead_bytes.get("onnx", 0)
        assert half.training_memory_bytes["onnx"] == 2 * whole.weight_bytes + overhead_bytes
        assert half.training_memory_bytes["onnx"] < whole.training_memory_bytes["onnx"]


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS.keys())
def test_every_method_keeps_the_contract(kind: type[Method]) -> None:
    plan = plan_of(config(method=kind()), "run")
    for one in plan.candidates:
        plan.network.check(one.spec)
        assert plan.network.size_of(one.spec) == one.spec
    assign, draw = plan.policies.assign, Draw(seed=0, round=1, client_id="ada")
    nothing, plenty = Budget(memory_bytes=0), Budget(memory_bytes=2**40)
    assert assign(ask(plan, nothing)).candidate is None
    given = assign(ask(plan, plenty)).candidate
    assert given is not None
    assert assign(ask(plan, plenty)) == assign(ask(plan, plenty))
    assert assign(ask(plan, plenty, below=plan.candidates[0])).candidate is None
    placed = plan.policies.place(plan.network, given.spec, draw)
    assert plan.network.size_of(placed).spec_id == given.spec.spec_id
    student = plan.policies.student(plan.network, given.spec, draw)
    assert student is None or nested_maps(plan.network, given.spec, student)
    assert kind.INFO.title
