"""What every search promises, whatever it does inside."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from server.search.search_cases import (
    SPACE,
    TARGETS,
    UNIFORM,
    any_query,
    ends,
    price,
    queries,
    query_at,
    run,
    stream,
    within,
)

from subfleet.protocol.schema import from_plain, to_plain
from subfleet.server.search.listed import ListedSearch, exhaustive_search
from subfleet.server.search.paper import PaperSearch, PaperSettings
from subfleet.server.search.pareto import ParetoSearch, ParetoSettings
from subfleet.server.search.query import Choice, Known, Query, Search

SEARCHES: Mapping[str, Callable[[], Search]] = {
    "paper": lambda: PaperSearch(SPACE, price, TARGETS, PaperSettings(epsilon=0.5)),
    "pareto": lambda: ParetoSearch(SPACE, price, TARGETS, uniform=UNIFORM, settings=ParetoSettings(trials=12)),
    "uniform": lambda: ListedSearch(UNIFORM, price, TARGETS),
    "exhaustive": lambda: exhaustive_search(SPACE, price, TARGETS, goal=1),
}
EVERY = pytest.mark.parametrize("name", SEARCHES)
WARM = {name: make() for name, make in SEARCHES.items()}
for _search in WARM.values():
    run(_search, queries(40, seed=5))


@EVERY
@settings(deadline=None, max_examples=100)
@given(query=any_query())
def test_an_answer_is_never_over_any_budget(name: str, query: Query) -> None:
    fit = WARM[name].choose(query, stream(query.limits.memory_bytes)).fit
    smallest = ends()[0]
    if fit is None:
        # Whatever a search knows, it knows the smallest; the uniform space has a smallest of its own.
        assert not within(min(map(price, UNIFORM), key=lambda one: one.order) if name == "uniform" else smallest, query)
        return
    assert within(fit.candidate, query)
    limits = query.limits
    shares = [fit.candidate.training_memory_bytes[query.target] / limits.memory_bytes]
    if limits.downlink_bytes is not None:
        shares.append(fit.candidate.weight_bytes / limits.downlink_bytes)
    if limits.uplink_bytes is not None:
        shares.append(fit.candidate.update_bytes / limits.uplink_bytes)
    assert fit.utilisation == max(shares) <= 1


@EVERY
def test_the_pool_only_grows(name: str) -> None:
    search = SEARCHES[name]()
    seen: tuple[Known, ...] = ()
    for place, query in enumerate(queries(30)):
        found = search.choose(query, stream(place)).found
        search.learn(found)
        assert search.pool[: len(seen)] == seen
        assert set(found) <= set(search.pool)
        seen = search.pool
        search.learn(seen)
        assert search.pool == seen


@EVERY
def test_choosing_remembers_nothing_and_follows_the_stream(name: str) -> None:
    search = WARM[name]
    query, before = query_at(0.6, 0.4), search.pool
    answers = [search.choose(query, stream("same")) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert search.pool == before


@EVERY
def test_a_search_that_learned_a_journal_goes_on_alike(name: str) -> None:
    asked = queries(60, seed=2)
    whole = SEARCHES[name]()
    begun = run(whole, asked[:30])
    journal = json.dumps([to_plain(one) for choice in begun for one in choice.found])
    restored = SEARCHES[name]()
    restored.learn([from_plain(Known, plain) for plain in json.loads(journal)])
    assert restored.pool == whole.pool
    assert [_told(one) for one in run(restored, asked[30:], first=30)] == [
        _told(one) for one in run(whole, asked[30:], first=30)
    ]


def _told(choice: Choice) -> tuple[object, ...]:
    return choice.fit, choice.found, choice.draws, choice.hit


@EVERY
def test_a_refused_subnet_is_not_given(name: str) -> None:
    query = query_at(0.7, 0.7)
    first = WARM[name].choose(query, stream(1)).fit
    assert first is not None
    gone = first.candidate.spec.spec_id
    picky = replace(query, refused=lambda candidate: "no" if candidate.spec.spec_id == gone else "")
    second = WARM[name].choose(picky, stream(1)).fit
    assert second is not None
    assert second.candidate.spec.spec_id != gone
    assert WARM[name].choose(replace(query, refused=lambda candidate: "no"), stream(1)).fit is None


@EVERY
def test_a_target_without_a_price_is_infinitely_dear(name: str) -> None:
    assert WARM[name].choose(replace(query_at(1, 1), target="unknown"), stream(1)).fit is None
