from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.server_rig import config

from subfleet.elastic.families import network_of
from subfleet.protocol.readings import Budget, Reading
from subfleet.server.assignment import Candidate, budget_of, fits, largest_fitting, ordered, why_nothing_fits
from subfleet.server.methods import METHODS, Method
from subfleet.server.planning import candidates_of

SETTINGS = config(rates=(0.5, 1.0))
CANDIDATES = candidates_of(SETTINGS, network_of(SETTINGS.model))
budgets = st.builds(
    Budget,
    memory_bytes=st.integers(0, 40_000),
    downlink_bytes=st.none() | st.integers(0, 8_000),
    uplink_bytes=st.none() | st.integers(0, 8_000),
)


@given(budgets, st.none() | st.integers(0, len(CANDIDATES)))
def test_the_choice_fits_and_none_larger_does(budget: Budget, below: int | None) -> None:
    place = largest_fitting(CANDIDATES, "onnx", budget, below=below)
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
    first, second = (largest_fitting(CANDIDATES, "onnx", one) for one in (budget, richer))
    assert (-1 if first is None else first) <= (-1 if second is None else second)


@given(st.permutations(CANDIDATES))
def test_the_order_is_one_whatever_came_first(shuffled: list[Candidate]) -> None:
    assert ordered(shuffled) == CANDIDATES


def test_the_link_budget_is_rate_times_time() -> None:
    budget = budget_of(Reading(downlink_bps=8e6, uplink_bps=None), 5, communication_s=2.0)
    assert budget == Budget(memory_bytes=5, downlink_bytes=2_000_000, uplink_bytes=None)


def test_an_estimate_passes_over_no_subnet_whose_activations_are_computed_twice() -> None:
    frugal = config(rates=(0.5, 1.0), training=replace(SETTINGS.training, recompute=True))
    for whole, half in zip(CANDIDATES, candidates_of(frugal, network_of(frugal.model)), strict=True):
        overhead_bytes = frugal.memory_overhead_bytes.get("onnx", 0)
        assert half.training_memory_bytes["onnx"] == 2 * whole.weight_bytes + overhead_bytes
        assert half.training_memory_bytes["onnx"] < whole.training_memory_bytes["onnx"]


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS.keys())
def test_every_method_keeps_the_contract(kind: type[Method]) -> None:
    method = kind()
    network = network_of(SETTINGS.model)
    candidates = candidates_of(config(method=method), network)
    assert candidates == ordered(candidates)
    for one in candidates:
        network.check(one.spec)
    nothing, plenty = Budget(memory_bytes=0), Budget(memory_bytes=2**40)
    assert method.assign(candidates, "onnx", nothing) is None
    assert method.assign(candidates, "onnx", plenty) == len(candidates) - 1
    assert method.assign(candidates, "onnx", plenty, below=0) is None
    assert candidates[-1].spec.spec_id == network.full_spec().spec_id
    assert method.training(SETTINGS.training, 1) == SETTINGS.training
