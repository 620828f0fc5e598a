import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from server.search.search_cases import SPACE, TARGETS, any_query, ends, price, query_at, stream, within

from subfleet.protocol.schema import from_plain, to_plain
from subfleet.server.search.feasibility import Preflights, lacking_operators, refusal, why_not
from subfleet.server.search.limits import Limits
from subfleet.server.search.paper import PaperSearch
from subfleet.server.search.query import Query, fit_of

SMALLEST = ends()[0]
PLENTY = Query(target="onnx", limits=Limits(memory_bytes=2**40))


@settings(deadline=None, max_examples=150)
@given(query=any_query())
def test_there_is_a_reason_exactly_where_a_subnet_does_not_fit(query: Query) -> None:
    for candidate in ends():
        assert (why_not(candidate, query) == "") == (fit_of(candidate, query) is not None)
        if fit_of(candidate, query) is not None:
            assert within(candidate, query)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"memory_bytes": 10}, "bytes of memory and the budget is 10"),
        ({"downlink_bytes": 11}, "down and the link's budget is 11"),
        ({"uplink_bytes": 12}, "up and the link's budget is 12"),
        ({"train_macs": 13}, "multiply-accumulates and the budget is 13"),
        ({"deadline_s": 0.5, "uplink_bps": 1.0}, "the deadline is 0.5 s"),
        ({"deadline_s": 2.0, "macs_per_s": 0.0}, "the deadline is 2 s"),
    ],
)
def test_the_reason_names_the_limit_that_is_broken(limits: dict[str, float], words: str) -> None:
    query = replace(PLENTY, limits=replace(PLENTY.limits, **limits))  # type: ignore[arg-type]
    assert words in why_not(SMALLEST, query)
    assert why_not(SMALLEST, PLENTY) == ""


def test_an_unknown_runtime_is_a_reason() -> None:
    assert "cannot train this model" in why_not(SMALLEST, replace(PLENTY, target="abacus"))


def test_an_operator_that_the_runtime_lacks_is_a_reason_for_every_subnet_that_needs_it() -> None:
    assert lacking_operators(["b", "a", "c"], ["c"]) == ("a", "b")
    assert lacking_operators(["a"], None) == ()
    refused = refusal("phone", "onnx", preflights=Preflights(), needs=lambda one, target: ["Gelu"], listed=["Relu"])
    query = replace(query_at(0.9, 0.9), refused=refused)
    assert PaperSearch(SPACE, price, TARGETS).choose(query, stream(1)).fit is None
    assert why_not(SMALLEST, query) == "the runtime 'onnx' of 'phone' lacks Gelu"


def test_preflights_are_remembered_by_device() -> None:
    spec_id = SMALLEST.spec.spec_id
    told = Preflights().told("phone", "onnx", spec_id, reason="out of memory").told("pi", "onnx", spec_id)
    told = told.told("phone", "executorch", "other", operators=["Sum", "Abs"]).told("phone", "executorch", spec_id)
    assert from_plain(Preflights, json.loads(json.dumps(to_plain(told)))) == told
    assert told.known("phone", "onnx", spec_id) == "out of memory"
    assert told.known("pi", "onnx", spec_id) == ""
    assert told.known("watch", "onnx", spec_id) is None

    def reason(device: str, target: str, needed: str) -> str:
        return refusal(device, target, preflights=told, needs=lambda one, of: [needed])(SMALLEST)

    assert reason("phone", "onnx", "Abs") == "out of memory"
    assert reason("pi", "onnx", "Abs") == ""
    # The operator was found to be lacking with another subnet.
    assert reason("phone", "executorch", "Abs") == "the runtime 'executorch' of 'phone' lacks Abs"
    assert reason("phone", "executorch", "Mul") == ""


def test_the_oldest_results_are_forgotten() -> None:
    told = Preflights(limit=2)
    for name in "abc":
        told = told.told(name, "onnx", "x")
    assert [told.known(name, "onnx", "x") for name in "abc"] == [None, "", ""]


@pytest.mark.parametrize("wrong", [{"memory_bytes": -1}, {"deadline_s": float("nan")}, {"sample_passes": -1}])
def test_limits_below_zero_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        Limits(**({"memory_bytes": 1} | wrong))  # type: ignore[arg-type]
