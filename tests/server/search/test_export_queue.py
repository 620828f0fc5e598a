from collections.abc import Iterable
from dataclasses import replace
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.search.search_cases import (
    OTHER_TARGET,
    SPACE,
    TARGET,
    UNIFORM,
    ends,
    estimate,
    pareto_search,
    queries,
    query_at,
    run,
)

from subfleet.search.candidates import Candidate
from subfleet.search.query import Query, satisfies
from subfleet.search.queue import (
    LEAST_GAIN,
    RequestedProgram,
    SizedProgram,
    give_written,
    rank_requested,
    request_program,
)

UNIFORM_ESTIMATES = sorted(map(estimate, UNIFORM), key=lambda one: one.order)


def _planned(candidate: Candidate, more: float) -> Candidate:
    memory = {name: int(needed * more) for name, needed in candidate.training_memory_bytes.items()}
    return replace(candidate, training_memory_bytes=MappingProxyType(memory))


def _given(written: Iterable[Candidate], query: Query, space: Iterable[Candidate] = ()) -> Candidate | None:
    return give_written(written, tuple(space), lambda one: satisfies(one, query))


def _requested_program(place: int, lost: float, target: str = "onnx") -> RequestedProgram:
    return RequestedProgram(program=SizedProgram(size=UNIFORM_ESTIMATES[place].architecture, target=target), lost=lost)


def test_a_device_gets_the_largest_written_size_that_fits() -> None:
    query, (smallest, largest) = query_at(0.6, 0.6), ends()
    fitting = [one for one in UNIFORM_ESTIMATES if satisfies(one, query)]
    assert 2 < len(fitting) < len(UNIFORM_ESTIMATES), "the budget is between the sizes"
    assert _given([smallest, fitting[1], largest], query, UNIFORM_ESTIMATES) == fitting[1]
    assert _given([fitting[-1], fitting[1], smallest], query, UNIFORM_ESTIMATES) == fitting[-1]


def test_the_exact_plan_of_a_written_size_decides() -> None:
    query = query_at(0.6, 1)
    best = max((one for one in UNIFORM_ESTIMATES if satisfies(one, query)), key=lambda one: one.order)
    assert _given([_planned(best, 10), ends()[0]], query) == ends()[0]
    assert _given([_planned(ends()[1], 1e-6)], query) == _planned(ends()[1], 1e-6)


def test_where_no_written_size_fits_it_is_the_largest_of_the_space_that_does() -> None:
    query = query_at(0.5, 0.5)
    fitting = [one for one in UNIFORM_ESTIMATES if satisfies(one, query)]
    for written in ([], [ends()[1]]):
        assert _given(written, query, UNIFORM_ESTIMATES) == fitting[-1]
        assert _given(written, query) is None
    assert _given([], query_at(0, 0), UNIFORM_ESTIMATES) is None


def test_a_requested_program_tells_which_share_of_its_parameters_is_lost() -> None:
    best, now = UNIFORM_ESTIMATES[-1], UNIFORM_ESTIMATES[2]
    requested_program = request_program(best, now, "onnx")
    lost = (best.parameters - now.parameters) / best.parameters
    assert requested_program == RequestedProgram(program=SizedProgram(size=best.architecture, target="onnx"), lost=lost)
    assert request_program(best, best, "onnx") is None
    assert request_program(now, best, "onnx") is None, "nothing is lost by what has more"


@pytest.mark.parametrize("share", [0.98, 1.02])
def test_what_gains_next_to_nothing_is_no_requested_program(share: float) -> None:
    def having(parameters: float) -> Candidate:
        return replace(ends()[0], parameters=int(parameters))

    requested_program = request_program(having(10**9), having((1 - share * LEAST_GAIN) * 10**9), "onnx")
    assert (requested_program is None) == (share < 1)


def test_programs_are_begun_up_to_the_limit_and_those_first_that_lose_most_together() -> None:
    requested_programs = [
        _requested_program(3, 0.2),
        _requested_program(4, 0.3),
        _requested_program(5, 0.25),
        _requested_program(3, 0.2),
    ]
    started = rank_requested(requested_programs, (), 2)
    assert [requested_program.program.size for requested_program in started] == [
        UNIFORM_ESTIMATES[3].architecture,
        UNIFORM_ESTIMATES[4].architecture,
    ]
    assert started[0].lost == pytest.approx(0.4)
    assert rank_requested(requested_programs, (), 0) == ()


def test_programs_that_there_are_are_not_begun_and_targets_have_their_own() -> None:
    requested_programs = [
        _requested_program(3, 0.5),
        _requested_program(3, 0.4, "executorch"),
        _requested_program(4, 0.3),
    ]
    assert rank_requested(requested_programs, {requested_programs[0].program.key, "onnx/other"}, 9) == tuple(
        requested_programs[1:]
    )


@pytest.mark.slow
@given(
    requested_programs=st.lists(
        st.builds(
            _requested_program, st.integers(0, 7), st.floats(LEAST_GAIN, 1), st.sampled_from((TARGET, OTHER_TARGET))
        )
    ),
    seed=st.integers(0, 99),
    limit=st.integers(0, 9),
)
def test_the_order_of_devices_takes_no_part(requested_programs: list[RequestedProgram], seed: int, limit: int) -> None:
    shuffled = list(requested_programs)
    Random(seed).shuffle(shuffled)
    begun = rank_requested(requested_programs, (), limit)
    assert begun == rank_requested(shuffled, (), limit)
    assert len(begun) == min(limit, len({requested_program.program.key for requested_program in requested_programs}))


@pytest.mark.slow
def test_what_is_lost_falls_as_programs_are_written() -> None:
    search = pareto_search(SPACE, uniform=UNIFORM)
    written = {ends()[0].architecture.architecture_id: ends()[0]}
    losses = []
    for number in range(8):
        asked = [query for query in queries(12, seed=number) if satisfies(ends()[0], query)]
        requested_programs = []
        for query, answer in zip(asked, run(search, asked, first=100 * number), strict=True):
            now = _given(written.values(), query)
            assert answer.fit is not None
            assert now is not None
            requested_programs.append(request_program(answer.fit.candidate, now, query.target))
        losses.append(
            sum(requested_program.lost for requested_program in requested_programs if requested_program is not None)
            / len(asked)
        )
        known = {f"onnx/{name}" for name in written}
        for begun in rank_requested(filter(None, requested_programs), known, 4):
            size = begun.program.size
            written[size.architecture_id] = estimate(size)
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
