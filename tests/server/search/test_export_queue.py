import json
from dataclasses import replace

import pytest
from server.search.search_cases import SPACE, TARGETS, UNIFORM, ends, price, queries, query_at, run

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import from_plain, to_plain
from subfleet.server.assignment import Candidate
from subfleet.server.search.pareto import ParetoSearch
from subfleet.server.search.query import Fit, Query, fit_of
from subfleet.server.search.queue import Exported, ExportQueue, Given, given_now

MIDDLE = [price(spec) for spec in UNIFORM]


def _written(queue: ExportQueue, candidate: Candidate, *, target: str = "onnx", more: float = 1.0) -> ExportQueue:
    planned = int(candidate.training_memory_bytes[target] * more)
    return queue.written(Exported(spec=candidate.spec, target=target, planned_peak_bytes=planned))


def _fit(candidate: Candidate, utilisation: float) -> Fit:
    return Fit(candidate=candidate, utilisation=utilisation)


def test_until_its_own_is_ready_a_device_gets_the_largest_exported_one_that_fits() -> None:
    query, (smallest, largest) = query_at(0.6, 0.6), ends()
    fitting = [one for one in MIDDLE if fit_of(one, query) is not None]
    chosen = fit_of(max(fitting, key=lambda one: one.parameters), query)
    assert chosen is not None
    queue = ExportQueue()
    assert given_now(chosen, query, queue.programs("onnx", price)) == Given(fit=None, lost=chosen.utilisation)
    for candidate in (fitting[1], smallest, largest):
        queue = _written(queue, candidate)
    now = given_now(chosen, query, queue.programs("onnx", price))
    assert now.fit is not None
    assert now.fit.candidate.spec == fitting[1].spec
    assert now.lost == pytest.approx(chosen.utilisation - now.fit.utilisation)
    own = given_now(chosen, query, _written(queue, chosen.candidate).programs("onnx", price))
    assert own.fit is not None
    assert (own.fit.candidate.spec, own.lost) == (chosen.candidate.spec, 0)


def test_the_exact_plan_decides_what_fits() -> None:
    query = query_at(0.6, 1)
    chosen = max(filter(None, (fit_of(one, query) for one in MIDDLE)), key=lambda fit: fit.utilisation)
    queue = _written(_written(ExportQueue(), chosen.candidate, more=1.5), ends()[0])
    now = given_now(chosen, query, queue.programs("onnx", price))
    assert now.fit is not None
    assert now.fit.candidate.spec == ends()[0].spec
    other = Query(target="executorch", limits=query.limits)
    assert given_now(chosen, other, queue.programs("executorch", price)).fit is None


def test_a_round_starts_a_limited_number_of_exports_those_first_that_lose_most() -> None:
    queue = ExportQueue(limit=2)
    for place, lost in ((3, 0.2), (4, 0.3), (5, 0.25), (3, 0.2), (6, 0.001)):
        queue = queue.asked(_fit(MIDDLE[place], 0.9), "onnx", Given(fit=None, lost=lost))
    queue, started = queue.started()
    assert [wish.spec for wish in started] == [MIDDLE[3].spec, MIDDLE[4].spec]
    assert (queue.figures.devices, queue.figures.started, queue.figures.left) == (5, 2, 1)
    assert queue.figures.lost == pytest.approx(0.951)
    assert queue.figures.mean_lost == pytest.approx(0.951 / 5)
    assert queue.next_round().figures.devices == 0
    assert queue.next_round().started()[1] == ()


def test_programs_that_there_are_or_that_cannot_be_are_not_wanted() -> None:
    queue = _written(ExportQueue(), MIDDLE[3]).broken(MIDDLE[4].spec, "onnx", "no kernel")
    for place in (3, 4):
        queue = queue.asked(_fit(MIDDLE[place], 0.9), "onnx", Given(fit=None, lost=0.5))
    assert queue.started()[1] == ()
    queue = queue.asked(_fit(MIDDLE[3], 0.9), "executorch", Given(fit=None, lost=0.5))
    assert [(wish.spec, wish.target) for wish in queue.started()[1]] == [(MIDDLE[3].spec, "executorch")]


def test_a_queue_survives_a_journal() -> None:
    queue = _written(ExportQueue(limit=3), MIDDLE[3]).broken(MIDDLE[4].spec, "onnx", "no kernel")
    queue = queue.asked(_fit(MIDDLE[5], 0.9), "onnx", Given(fit=None, lost=0.5))
    assert from_plain(ExportQueue, json.loads(json.dumps(to_plain(queue)))) == queue


def test_the_utilisation_that_is_lost_falls_as_programs_are_written() -> None:
    search = ParetoSearch(SPACE, price, TARGETS, uniform=UNIFORM)
    queue = _written(ExportQueue(limit=4), ends()[0])
    losses = []
    for number in range(8):
        asked = [query for query in queries(12, seed=number) if fit_of(ends()[0], query) is not None]
        programs = queue.programs("onnx", price)
        for query, choice in zip(asked, run(search, asked, first=100 * number), strict=True):
            assert choice.fit is not None
            now = given_now(choice.fit, query, programs)
            assert now.fit is None or fit_of(now.fit.candidate, query) is not None
            queue = queue.asked(choice.fit, "onnx", now)
        queue, started = queue.started()
        losses.append(queue.figures.mean_lost)
        assert len(started) <= 4
        for wish in started:
            queue = _written(queue, price(wish.spec))
        queue = queue.next_round()
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


@pytest.mark.parametrize("wrong", [{"limit": -1}, {"worth": 1.5}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        replace(ExportQueue(), **wrong)  # type: ignore[arg-type]
