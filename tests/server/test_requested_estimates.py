"""Cost estimates and searches are asked for, and answered by an event: no step makes them, and none waits for them."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    prepared,
    refusal,
    replies,
    select_requests,
    telemetry,
)
from server.server_rig import MODEL, World, config, estimates_of, fleet

from subfleet.elastic.building import network_of
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.export.requests import AnyRequest, EstimateRequest
from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.progress import Waiting
from subfleet.rounds.signals import Action, RequestDone, RequestFailed, Tick
from subfleet.rounds.sizing import AT_ONCE, explore_sizes
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CostRequest, SearchRequest, TaskRequest
from subfleet.search import searches

METHOD = DynamicSelection(distillation=None)
PLAN = context_of(method=METHOD)
ESTIMATES = estimates_of(network_of(MODEL))
ONNX = CostRequest(target="onnx")
FIRST = SearchRequest(run_attempt=1)


def asked() -> tuple[RunState, tuple[Action, ...]]:
    """Everybody has told what it can give; nothing is made yet."""
    state, found = measuring(PLAN), tuple[Action, ...]()
    for name in CLIENTS:
        state, actions = step(PLAN, state, telemetry(PLAN, name), 2.0)
        found += actions
    assert state.phase == "train"
    return state, found


def estimated(state: RunState) -> tuple[RunState, tuple[Action, ...]]:
    return step(PLAN, state, RequestDone(request=ONNX, result=ESTIMATES), 3.0)


def given() -> RunState:
    state, _ = estimated(asked()[0])
    return step(PLAN, state, RequestDone(request=FIRST, result=explore_sizes(PLAN, state)), 4.0)[0]


def test_estimates_are_asked_for_once_and_a_search_when_they_are_there() -> None:
    state, actions = asked()
    assert select_requests(CostRequest, actions) == [ONNX], "with the first client that answers, and never again"
    assert not select_requests(SearchRequest, actions)
    assert not select_requests(TaskRequest, actions)
    assert {client.stage for client in state.clients.values()} == {"answered"}
    for _ in range(3):
        state, actions = step(PLAN, state, Tick(), 2.5)
        assert actions == ()
    state, actions = estimated(state)
    assert (select_requests(SearchRequest, actions), select_requests(TaskRequest, actions)) == ([FIRST], [])
    assert step(PLAN, state, Tick(), 3.5)[1] == ()
    found = explore_sizes(PLAN, state)
    state, actions = step(PLAN, state, RequestDone(request=FIRST, result=found), 4.0)
    assert [one.participant.client_id for one in select_requests(TaskRequest, actions)] == list(CLIENTS)
    assert (state.pool, state.live.requested) == (found.sizes, frozenset())
    again, actions = step(PLAN, state, RequestDone(request=FIRST, result=found), 4.0)
    assert (again.pool, select_requests(SearchRequest, actions)) == (state.pool, []), "what comes twice counts once"


def test_no_step_estimates_a_network_or_searches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = estimated(asked()[0])
    made = explore_sizes(PLAN, state)
    monkeypatch.setattr(searches.ParetoSearch, "explore", lambda *_: pytest.fail("a step searched"))
    monkeypatch.setattr(searches.ParetoSearch, "over", lambda *_, **__: pytest.fail("a step made a search"))
    state, actions = step(PLAN, state, RequestDone(request=FIRST, result=made), 4.0)
    assert len(select_requests(TaskRequest, actions)) == len(CLIENTS)
    for name in CLIENTS:
        state, _ = step(PLAN, state, prepared(PLAN, state, name, planned_peak_bytes=10**10), 4.0)


def test_a_target_that_has_no_estimates_leaves_its_devices_out_with_the_reason() -> None:
    state, _ = asked()
    state, _ = step(PLAN, state, RequestFailed(request=ONNX, reason="export failed: no such operator"), 3.0)
    made = explore_sizes(PLAN, state)
    state, _ = step(PLAN, state, RequestDone(request=FIRST, result=made), 3.0)
    assert state.failed_attempts.waits_for == "ada, bob, cyd skipped: export failed: no such operator"


def test_a_search_that_fails_leaves_everybody_out_with_the_reason() -> None:
    state, _ = estimated(asked()[0])
    state, _ = step(PLAN, state, RequestFailed(request=FIRST, reason="the search failed: no"), 3.0)
    assert state.failed_attempts.waits_for == "ada, bob, cyd skipped: the search failed: no"


def test_the_deadline_ends_the_wait_for_estimates() -> None:
    state, _ = asked()
    late_s = 2.0 + PLAN.config.deadlines.round_s
    state, _ = step(PLAN, state, Tick(), late_s)
    assert (state.phase, state.failed_attempts.waits_for) == (
        "waiting",
        "ada, bob, cyd missing: no size was chosen for it in time",
    )


def stored(state: RunState, folder: Path) -> RunState:
    folder.mkdir(parents=True, exist_ok=True)
    engine = open_database(folder)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2))
    journal.save(RunState(), state)
    found = journal.load(9.0)
    engine.dispose()
    return found


def test_a_server_that_is_killed_asks_for_estimates_again_and_gives_the_same_sizes(tmp_path: Path) -> None:
    for place, state in enumerate((asked()[0], estimated(asked()[0])[0])):
        found = stored(state, tmp_path / str(place))
        assert (found.live.estimates, found.live.searches, found.live.requested) == ({}, {}, frozenset())
        assert select_requests(CostRequest, list_resume_actions(PLAN, found)) == [ONNX]
        found, actions = estimated(found)
        assert select_requests(SearchRequest, actions) == [FIRST]
        found, actions = step(PLAN, found, RequestDone(request=FIRST, result=explore_sizes(PLAN, found)), 9.0)
        assert found.pool == given().pool
        assert {name: client.size for name, client in found.clients.items()} == {
            name: client.size for name, client in given().clients.items()
        }


def test_what_was_found_before_a_kill_is_not_looked_for_again(tmp_path: Path) -> None:
    """Tasks and refusals wait until a smaller size could be chosen; the same is found, and nothing more."""
    before = given()
    found = stored(before, tmp_path)
    actions = list_resume_actions(PLAN, found)
    assert (select_requests(CostRequest, actions), select_requests(TaskRequest, actions)) == ([ONNX], [])
    early, actions = step(PLAN, found, prepared(PLAN, found, "ada", planned_peak_bytes=10**12), 9.0)
    assert (early.clients, actions) == (found.clients, ())
    found, _ = estimated(early)
    found, actions = step(PLAN, found, RequestDone(request=FIRST, result=explore_sizes(PLAN, found)), 9.0)
    assert found.pool == before.pool
    assert [one.participant.client_id for one in select_requests(TaskRequest, actions)] == list(CLIENTS)
    sizes: list[Any] = []
    for state in (before, found):
        after, _ = step(PLAN, state, prepared(PLAN, state, "ada", planned_peak_bytes=10**12), 9.0)
        sizes.append(after.clients["ada"].size)
    assert sizes[0] == sizes[1] != before.clients["ada"].size


def test_models_are_refused_without_estimates(tmp_path: Path) -> None:
    """After a restart nothing asks for cost estimates in that phase, as nobody is given a size."""
    state = given()
    last = {name: replace(client, stage="done") for name, client in state.clients.items()}
    total = PLAN.config.total_rounds
    state = replace(state, at=Waiting(), round=total, aggregated_round=total, clients={}, last=last)
    state, _ = step(PLAN, state, Tick(), 9.0)
    state, _ = step(
        PLAN,
        replace(
            state,
            live=replace(state.live, estimates={}, searches={}),
        ),
        prepared(PLAN, state, "ada", models=True),
        9.0,
    )
    _, actions = step(PLAN, state, refusal(PLAN, state, "ada"), 9.0)
    assert (state.phase, replies(actions)) == ("deploy", ["accepted"])


def test_a_refusal_is_answered_when_a_smaller_size_can_be_chosen(tmp_path: Path) -> None:
    state, _ = step(PLAN, given(), prepared(PLAN, given(), "ada"), 4.0)
    no = refusal(PLAN, state, "ada", available_bytes=2000)
    after, actions = step(PLAN, state, no, 5.0)
    assert replies(actions) == ["accepted"]
    found = stored(state, tmp_path)
    assert step(PLAN, found, no, 9.0)[1] == (), "the device sends it again"
    found, _ = estimated(found)
    found, _ = step(PLAN, found, RequestDone(request=FIRST, result=explore_sizes(PLAN, found)), 9.0)
    again, actions = step(PLAN, found, no, 9.0)
    assert replies(actions) == ["accepted"]
    assert again.clients["ada"].size == after.clients["ada"].size


def test_a_few_are_given_sizes_in_each_step_and_their_choices_are_those_of_one_step() -> None:
    context = context_of(min_clients=3)
    state = measuring(context)
    for name in CLIENTS:
        state, _ = step(context, state, telemetry(context, name), 2.0)
    one = state.clients["ada"]
    count = 2 * AT_ONCE + 1
    names = [f"c{number:02}" for number in range(count)]
    waiting = {name: replace(one, client_id=name, stage="answered", given=None) for name in names}
    members = dict.fromkeys(names, state.live.members["ada"])
    state = replace(
        state,
        requested_attempt=0,
        clients=MappingProxyType(waiting),
        live=replace(state.live, members=PersistentMap(members), entered_s=2.0),
    )
    sized = []
    while any(client.stage == "answered" for client in state.clients.values()):
        assert state.requested_attempt == 0, "requested programs are weighed when all are told"
        state, actions = step(context, state, Tick(), 2.0)
        sized.append([one.participant.client_id for one in select_requests(TaskRequest, actions)])
    assert [len(some) for some in sized] == [AT_ONCE, AT_ONCE, 1]
    assert [name for some in sized for name in some] == names
    assert state.requested_attempt == 1


class Slow:
    """Cost estimates that come when they are let."""

    def __init__(self, world: World) -> None:
        self.files: list[tuple[EstimateRequest, Future[Path]]] = []
        self.exports = world.exports
        self._submit = world.exports.submit
        world.exports.submit = self.submit  # type: ignore[method-assign]

    def submit(self, request: AnyRequest, **named: Any) -> "Future[Path]":
        if not isinstance(request, EstimateRequest):
            return self._submit(request, **named)
        file: Future[Path] = Future()
        self.files.append((request, file))
        return file

    def let(self) -> None:
        for request, file in self.files:
            file.set_result(self._submit(request).result())
        self.files.clear()


def _sizes(world: World) -> list[Mapping[str, str]]:
    return [{row.client_id: row.architecture_id for row in record.clients} for record in world.notes.records]


@pytest.mark.slow
def test_a_run_goes_on_alike_where_the_server_is_killed_while_estimates_are_on_their_way(tmp_path: Path) -> None:
    settings = config(method=METHOD, rounds=2)
    calm = World(tmp_path / "calm", settings, fleet())
    calm.run()
    world = World(tmp_path / "killed", settings, fleet())
    slow = Slow(world)
    world.run(until=lambda: world.server.state.phase == "train")
    for _ in range(20):
        world.turn()
    assert {client.stage for client in world.server.state.clients.values()} == {"answered"}
    assert len(slow.files) == 1
    world.kill_server()
    world.turn()
    assert len(slow.files) == 2, "the next server asks again"
    slow.let()
    world.run(until=lambda: world.server.state.pool != () and world.server.state.phase == "train")
    world.kill_server()
    world.turn()
    slow.let()
    world.run()
    assert _sizes(world) == _sizes(calm)
    assert world.model_bytes() == calm.model_bytes()


def test_what_the_exporter_wrote_is_read_without_running_anything(tmp_path: Path) -> None:
    path = tmp_path / "estimates"
    path.write_bytes(ESTIMATES.pack())
    network = network_of(MODEL)
    read = MemoryEstimates.unpack(path.read_bytes())
    full = [network.full_architecture()]
    assert read.memory_bytes(network, full) == ESTIMATES.memory_bytes(network, full)
