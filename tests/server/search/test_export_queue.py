from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.search.search_cases import (
    OTHER_TARGET,
    TARGET,
    ends,
    estimate,
    pareto_search,
    queries,
    query_at,
    run,
    uniform_sizes,
    whole_space,
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


@cache
def uniform_estimates() -> tuple[Candidate, ...]:
    return tuple(sorted(map(estimate, uniform_sizes()), key=lambda candidate: candidate.order))


def _scale_memory(candidate: Candidate, factor: float) -> Candidate:
    memory = {name: int(needed * factor) for name, needed in candidate.training_memory_bytes.items()}
    return replace(candidate, training_memory_bytes=MappingProxyType(memory))


def _choose_written(written: Iterable[Candidate], query: Query, space: Iterable[Candidate] = ()) -> Candidate | None:
    return give_written(written, tuple(space), lambda candidate: satisfies(candidate, query))


def _requested_program(index: int, lost: float, target: str = "onnx") -> RequestedProgram:
    return RequestedProgram(
        program=SizedProgram(size=uniform_estimates()[index].architecture, target=target), lost=lost
    )


def test_a_device_gets_the_largest_written_size_that_fits() -> None:
    query, (smallest, largest) = query_at(0.6, 0.6), ends()
    fitting = [candidate for candidate in uniform_estimates() if satisfies(candidate, query)]
    assert 2 < len(fitting) < len(uniform_estimates()), "the budget is between the sizes"
    assert _choose_written([smallest, fitting[1], largest], query, uniform_estimates()) == fitting[1]
    assert _choose_written([fitting[-1], fitting[1], smallest], query, uniform_estimates()) == fitting[-1]


def test_the_exact_plan_of_a_written_size_decides() -> None:
    query = query_at(0.6, 1)
    best = max(
        (candidate for candidate in uniform_estimates() if satisfies(candidate, query)),
        key=lambda candidate: candidate.order,
    )
    assert _choose_written([_scale_memory(best, 10), ends()[0]], query) == ends()[0]
    assert _choose_written([_scale_memory(ends()[1], 1e-6)], query) == _scale_memory(ends()[1], 1e-6)


def test_without_a_fitting_program_a_device_gets_the_largest_size_that_fits() -> None:
    query = query_at(0.5, 0.5)
    fitting = [candidate for candidate in uniform_estimates() if satisfies(candidate, query)]
    for written in ([], [ends()[1]]):
        assert _choose_written(written, query, uniform_estimates()) == fitting[-1]
        assert _choose_written(written, query) is None
    assert _choose_written([], query_at(0, 0), uniform_estimates()) is None


def test_a_requested_program_has_the_fraction_of_parameters_lost() -> None:
    best, now = uniform_estimates()[-1], uniform_estimates()[2]
    requested_program = request_program(best, now, "onnx")
    lost = (best.parameters - now.parameters) / best.parameters
    assert requested_program == RequestedProgram(program=SizedProgram(size=best.architecture, target="onnx"), lost=lost)
    assert request_program(best, best, "onnx") is None
    assert request_program(now, best, "onnx") is None, "a larger submodel loses nothing"


@pytest.mark.parametrize("fraction", [0.98, 1.02])
def test_a_program_with_a_negligible_gain_is_not_requested(fraction: float) -> None:
    def with_parameters(parameters: float) -> Candidate:
        return replace(ends()[0], parameters=int(parameters))

    requested_program = request_program(
        with_parameters(10**9), with_parameters((1 - fraction * LEAST_GAIN) * 10**9), "onnx"
    )
    assert (requested_program is None) == (fraction < 1)


def test_programs_are_begun_up_to_the_limit_and_those_first_that_lose_most_together() -> None:
    requested_programs = [
        _requested_program(3, 0.2),
        _requested_program(4, 0.3),
        _requested_program(5, 0.25),
        _requested_program(3, 0.2),
    ]
    started = rank_requested(requested_programs, (), 2)
    assert [requested_program.program.size for requested_program in started] == [
        uniform_estimates()[3].architecture,
        uniform_estimates()[4].architecture,
    ]
    assert started[0].lost == pytest.approx(0.4)
    assert rank_requested(requested_programs, (), 0) == ()


def test_written_programs_are_not_begun_again_and_each_target_has_its_own() -> None:
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
def test_the_order_of_devices_does_not_matter(
    requested_programs: list[RequestedProgram], seed: int, limit: int
) -> None:
    shuffled = list(requested_programs)
    Random(seed).shuffle(shuffled)
    begun = rank_requested(requested_programs, (), limit)
    assert begun == rank_requested(shuffled, (), limit)
    assert len(begun) == min(limit, len({requested_program.program.key for requested_program in requested_programs}))


@pytest.mark.slow
def test_losses_fall_as_programs_are_written() -> None:
    search = pareto_search(whole_space(), uniform=uniform_sizes())
    written = {ends()[0].architecture.architecture_id: ends()[0]}
    losses = []
    for number in range(8):
        round_queries = [query for query in queries(12, seed=number) if satisfies(ends()[0], query)]
        requested_programs = []
        for query, answer in zip(round_queries, run(search, round_queries, first=100 * number), strict=True):
            now = _choose_written(written.values(), query)
            assert answer.fit is not None
            assert now is not None
            requested_programs.append(request_program(answer.fit.candidate, now, query.target))
        losses.append(
            sum(requested_program.lost for requested_program in requested_programs if requested_program is not None)
            / len(round_queries)
        )
        known = {f"onnx/{name}" for name in written}
        for begun in rank_requested(filter(None, requested_programs), known, 4):
            size = begun.program.size
            written[size.architecture_id] = estimate(size)
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
