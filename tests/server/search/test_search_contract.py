"""Properties that every search has."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from server.search.search_cases import (
    OTHER_TARGET,
    TARGET,
    ListedSearch,
    Serving,
    answer_query,
    any_query,
    ends,
    estimate,
    exhaustive_search,
    paper_search,
    pareto_search,
    queries,
    query_at,
    run,
    stream,
    tight_and_loose_queries,
    uniform_sizes,
    whole_space,
    within,
)

from subfleet.protocol.readings import Budget
from subfleet.protocol.schema import from_plain, to_plain
from subfleet.search.candidates import fits
from subfleet.search.query import Columns, EstimateIndex, FoundSize, Query, satisfies
from subfleet.search.searches import PaperSettings, ParetoSettings

SEARCHES: Mapping[str, Callable[[], Serving]] = {
    "paper": lambda: paper_search(whole_space(), PaperSettings(epsilon=0.5)),
    "pareto": lambda: pareto_search(whole_space(), uniform=uniform_sizes(), settings=ParetoSettings(trials=12)),
    "uniform": lambda: Serving(search=ListedSearch(uniform_sizes())),
    "exhaustive": lambda: Serving(search=exhaustive_search(whole_space())),
}
EVERY = pytest.mark.parametrize("name", SEARCHES)


@cache
def trained_search(name: str) -> Serving:
    """A search that has learned from some queries; tests must not let it learn more."""
    search = SEARCHES[name]()
    run(search, queries(40, seed=5))
    return search


@cache
def index_each(name: str) -> tuple[EstimateIndex, ...]:
    """An index of each submodel that a trained search knows, with no other submodel in it."""
    return tuple(EstimateIndex(TARGET, [candidate]) for candidate in trained_search(name).known)


@pytest.mark.slow
@EVERY
@settings(deadline=None, max_examples=100)
@given(query=any_query())
def test_an_answer_is_never_over_any_budget(name: str, query: Query) -> None:
    fit = trained_search(name).best(query)
    smallest = ends()[0]
    if fit is None:
        # Every search knows the smallest submodel of its space, and that of the uniform space is another.
        assert not within(
            min(map(estimate, uniform_sizes()), key=lambda candidate: candidate.order)
            if name == "uniform"
            else smallest,
            query,
        )
        return
    assert within(fit.candidate, query)
    limits = query.limits
    shares = [fit.candidate.training_memory_bytes[query.target] / limits.memory_bytes]
    if limits.downlink_bytes is not None:
        shares.append(fit.candidate.weight_bytes / limits.downlink_bytes)
    if limits.uplink_bytes is not None:
        shares.append(fit.candidate.update_bytes / limits.uplink_bytes)
    assert fit.utilisation == max(shares) <= 1


@pytest.mark.slow
@EVERY
def test_the_pool_only_grows(name: str) -> None:
    search = SEARCHES[name]()
    seen: tuple[FoundSize, ...] = ()
    for index, query in enumerate(queries(30)):
        explored = search.explore(query, stream(index))
        search.learn(explored)
        assert search.pool[: len(seen)] == seen
        assert set(explored) <= set(search.pool)
        seen = search.pool
        search.learn(seen)
        assert search.pool == seen


FULL: Mapping[str, tuple[Callable[[], Serving], int]] = {
    "paper": (lambda: paper_search(whole_space(), PaperSettings(epsilon=0.2, pool_limit=8)), 8 - 2),
    "pareto": (
        lambda: pareto_search(
            whole_space(),
            uniform=uniform_sizes(),
            settings=ParetoSettings(paper=PaperSettings(epsilon=0.2, pool_limit=20), trials=12, built_limit=40),
        ),
        40 + 20 - 2,
    ),
}


@pytest.mark.parametrize("name", FULL)
def test_a_journal_holds_no_more_than_the_pool_and_gives_the_same_answers(name: str) -> None:
    """A round records every submodel found, and a full pool finds no more."""
    make, limit = FULL[name]
    search, explored = make(), list[FoundSize]()
    for index, query in enumerate(queries(150, seed=4)):
        explored += answer_query(search, query, stream(index)).explored
        assert explored == list(search.pool)
    assert len(explored) <= limit
    assert not any(answer.explored for answer in run(search, queries(40, seed=5), first=900)), "it is full"
    restored = make()
    restored.learn(explored)
    device_queries = queries(40, seed=6)
    assert [restored.best(query) for query in device_queries] == [search.best(query) for query in device_queries]


COSTS = ("parameters", "weight_bytes", "update_bytes", "forward_macs")
COLUMNS = st.integers(0, 3) | st.sampled_from([2**61, 2**62 - 1])


@pytest.mark.slow
@given(
    rows=st.lists(st.tuples(st.none() | COLUMNS, COLUMNS, COLUMNS, COLUMNS), max_size=8),
    limits=st.builds(
        Budget,
        memory_bytes=COLUMNS,
        downlink_bytes=st.none() | COLUMNS,
        uplink_bytes=st.none() | COLUMNS,
        forward_macs=st.none() | COLUMNS,
    ),
)
def test_what_fits_alone_fits_in_a_column(rows: list[tuple[int | None, int, int, int]], limits: Budget) -> None:
    candidates = [
        replace(
            ends()[0],
            training_memory_bytes={} if memory is None else {"onnx": memory},
            weight_bytes=weights,
            update_bytes=update,
            forward_macs=macs,
        )
        for memory, weights, update, macs in rows
    ]
    for target in (TARGET, OTHER_TARGET):
        query = Query(target=target, limits=limits)
        alone = [fits(candidate, target, limits) for candidate in candidates]
        assert alone == [satisfies(candidate, query) for candidate in candidates]
        assert alone == [EstimateIndex(target, [candidate]).best(query) is not None for candidate in candidates]
        table = {name: [getattr(candidate, name) for candidate in candidates] for name in COSTS}
        table["memory_bytes"] = [candidate.training_memory_bytes.get(target, 2**62) for candidate in candidates]
        columns = Columns(**{name: np.array(amounts, dtype=np.int64) for name, amounts in table.items()})
        assert alone == columns.find_within(limits).tolist()


@pytest.mark.slow
@EVERY
@settings(deadline=None, max_examples=100)
@given(queries=tight_and_loose_queries())
def test_a_wider_budget_never_gets_fewer_parameters(name: str, queries: tuple[Query, Query]) -> None:
    poorer, richer = (trained_search(name).best(query) for query in queries)
    assert poorer is None or (richer is not None and richer.rank[0] >= poorer.rank[0])


@pytest.mark.slow
@EVERY
@examples(20, deadline=None)
@given(query=any_query())
def test_of_what_is_known_the_answer_has_the_most_parameters_and_then_uses_most(name: str, query: Query) -> None:
    fits_known = [fit for index in index_each(name) if (fit := index.best(query)) is not None]
    best = trained_search(name).best(query)
    assert (best.rank if best else None) == max((fit.rank for fit in fits_known), default=None)


@pytest.mark.slow
@EVERY
def test_exploring_changes_nothing_and_depends_on_the_stream(name: str) -> None:
    search = trained_search(name)
    query, before = query_at(0.6, 0.4), search.pool
    explored = [search.explore(query, stream("same")) for _ in range(3)]
    assert explored[0] == explored[1] == explored[2]
    assert search.pool == before


@pytest.mark.slow
@EVERY
def test_a_search_that_learned_a_journal_goes_on_alike(name: str) -> None:
    device_queries = queries(60, seed=2)
    whole = SEARCHES[name]()
    begun = run(whole, device_queries[:30])
    journal = json.dumps([to_plain(size) for answer in begun for size in answer.explored])
    restored = SEARCHES[name]()
    restored.learn([from_plain(FoundSize, plain) for plain in json.loads(journal)])
    assert restored.pool == whole.pool
    assert run(restored, device_queries[30:], first=30) == run(whole, device_queries[30:], first=30)


@pytest.mark.slow
@EVERY
def test_a_refused_submodel_is_not_given(name: str) -> None:
    query = query_at(0.7, 0.7)
    first = trained_search(name).best(query)
    assert first is not None
    refused_id = first.candidate.architecture.architecture_id
    picky = replace(
        query, refused=lambda candidate: "no" if candidate.architecture.architecture_id == refused_id else ""
    )
    second = trained_search(name).best(picky)
    assert second is not None
    assert second.candidate.architecture.architecture_id != refused_id
    assert trained_search(name).best(replace(query, refused=lambda candidate: "no")) is None


@pytest.mark.slow
@EVERY
def test_a_target_without_an_estimate_has_no_fit(name: str) -> None:
    assert EstimateIndex("unknown", trained_search(name).known).best(query_at(1, 1)) is None
