from collections.abc import Iterable
from dataclasses import replace
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.search.search_cases import SPACE, TARGETS, UNIFORM, ends, pareto_search, price, queries, query_at, run

from subfleet.search.candidates import Candidate
from subfleet.search.query import Query, fit_of
from subfleet.search.queue import LEAST_GAIN, SizedProgram, Wish, given_now, most_wanted, wish_of

UNIFORM_PRICES = sorted(map(price, UNIFORM), key=lambda one: one.order)


def _planned(candidate: Candidate, more: float) -> Candidate:
    memory = {name: int(needed * more) for name, needed in candidate.training_memory_bytes.items()}
    return replace(candidate, training_memory_bytes=MappingProxyType(memory))


def _given(written: Iterable[Candidate], query: Query, space: Iterable[Candidate] = ()) -> Candidate | None:
    return given_now(written, tuple(space), lambda one: fit_of(one, query) is not None)


def _wish(place: int, lost: float, target: str = "onnx") -> Wish:
    return Wish(program=SizedProgram(size=UNIFORM_PRICES[place].spec, target=target), lost=lost)


def test_a_device_gets_the_largest_written_size_that_fits() -> None:
    query, (smallest, largest) = query_at(0.6, 0.6), ends()
    fitting = [one for one in UNIFORM_PRICES if fit_of(one, query) is not None]
    assert 2 < len(fitting) < len(UNIFORM_PRICES), "the budget is between the sizes"
    assert _given([smallest, fitting[1], largest], query, UNIFORM_PRICES) == fitting[1]
    assert _given([fitting[-1], fitting[1], smallest], query, UNIFORM_PRICES) == fitting[-1]


def test_the_exact_plan_of_a_written_size_decides() -> None:
    query = query_at(0.6, 1)
    best = max((one for one in UNIFORM_PRICES if fit_of(one, query) is not None), key=lambda one: one.order)
    assert _given([_planned(best, 10), ends()[0]], query) == ends()[0]
    assert _given([_planned(ends()[1], 1e-6)], query) == _planned(ends()[1], 1e-6)


def test_where_no_written_size_fits_it_is_the_largest_of_the_space_that_does() -> None:
    query = query_at(0.5, 0.5)
    fitting = [one for one in UNIFORM_PRICES if fit_of(one, query) is not None]
    for written in ([], [ends()[1]]):
        assert _given(written, query, UNIFORM_PRICES) == fitting[-1]
        assert _given(written, query) is None
    assert _given([], query_at(0, 0), UNIFORM_PRICES) is None


def test_a_wish_tells_which_share_of_its_parameters_is_lost() -> None:
    best, now = UNIFORM_PRICES[-1], UNIFORM_PRICES[2]
    wish = wish_of(best, now, "onnx")
    lost = (best.parameters - now.parameters) / best.parameters
    assert wish == Wish(program=SizedProgram(size=best.spec, target="onnx"), lost=lost)
    assert wish_of(best, best, "onnx") is None
    assert wish_of(now, best, "onnx") is None, "nothing is lost by what has more"


@pytest.mark.parametrize("share", [0.98, 1.02])
def test_what_gains_next_to_nothing_is_no_wish(share: float) -> None:
    def having(parameters: float) -> Candidate:
        return replace(ends()[0], parameters=int(parameters))

    wish = wish_of(having(10**9), having((1 - share * LEAST_GAIN) * 10**9), "onnx")
    assert (wish is None) == (share < 1)


def test_programs_are_begun_up_to_the_limit_and_those_first_that_lose_most_together() -> None:
    wishes = [_wish(3, 0.2), _wish(4, 0.3), _wish(5, 0.25), _wish(3, 0.2)]
    started = most_wanted(wishes, (), 2)
    assert [wish.program.size for wish in started] == [UNIFORM_PRICES[3].spec, UNIFORM_PRICES[4].spec]
    assert started[0].lost == pytest.approx(0.4)
    assert most_wanted(wishes, (), 0) == ()


def test_programs_that_there_are_are_not_begun_and_targets_have_their_own() -> None:
    wishes = [_wish(3, 0.5), _wish(3, 0.4, "executorch"), _wish(4, 0.3)]
    assert most_wanted(wishes, {wishes[0].program.key, "onnx/other"}, 9) == tuple(wishes[1:])


@pytest.mark.slow
@given(
    wishes=st.lists(st.builds(_wish, st.integers(0, 7), st.floats(LEAST_GAIN, 1), st.sampled_from(TARGETS))),
    seed=st.integers(0, 99),
    limit=st.integers(0, 9),
)
def test_the_order_of_devices_takes_no_part(wishes: list[Wish], seed: int, limit: int) -> None:
    shuffled = list(wishes)
    Random(seed).shuffle(shuffled)
    begun = most_wanted(wishes, (), limit)
    assert begun == most_wanted(shuffled, (), limit)
    assert len(begun) == min(limit, len({wish.program.key for wish in wishes}))


@pytest.mark.slow
def test_what_is_lost_falls_as_programs_are_written() -> None:
    search = pareto_search(SPACE, uniform=UNIFORM)
    written = {ends()[0].spec.spec_id: ends()[0]}
    losses = []
    for number in range(8):
        asked = [query for query in queries(12, seed=number) if fit_of(ends()[0], query) is not None]
        wishes = []
        for query, answer in zip(asked, run(search, asked, first=100 * number), strict=True):
            now = _given(written.values(), query)
            assert answer.fit is not None
            assert now is not None
            wishes.append(wish_of(answer.fit.candidate, now, query.target))
        losses.append(sum(wish.lost for wish in wishes if wish is not None) / len(asked))
        known = {f"onnx/{name}" for name in written}
        for begun in most_wanted(filter(None, wishes), known, 4):
            size = begun.program.size
            written[size.spec_id] = price(size)
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
