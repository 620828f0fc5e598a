"""Cost estimates and searches are requested, and answered by an event: no step computes them or waits for them."""

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


def measure_all() -> tuple[RunState, tuple[Action, ...]]:
    """All clients have sent telemetry; nothing is made yet."""
    state, all_actions = measuring(PLAN), tuple[Action, ...]()
    for name in CLIENTS:
        state, actions = step(PLAN, state, telemetry(PLAN, name), 2.0)
        all_actions += actions
    assert state.phase == "train"
    return state, all_actions


def complete_estimates(state: RunState) -> tuple[RunState, tuple[Action, ...]]:
    return step(PLAN, state, RequestDone(request=ONNX, result=ESTIMATES), 3.0)


def assign_sizes() -> RunState:
    state, _ = complete_estimates(measure_all()[0])
    return step(PLAN, state, RequestDone(request=FIRST, result=explore_sizes(PLAN, state)), 4.0)[0]


def test_estimates_are_requested_once_and_a_search_after_them() -> None:
    state, actions = measure_all()
    assert select_requests(CostRequest, actions) == [ONNX], "with the first answer, and never again"
    assert not select_requests(SearchRequest, actions)
    assert not select_requests(TaskRequest, actions)
    assert {client.stage for client in state.clients.values()} == {"answered"}
    for _ in range(3):
        state, actions = step(PLAN, state, Tick(), 2.5)
        assert actions == ()
    state, actions = complete_estimates(state)
    assert (select_requests(SearchRequest, actions), select_requests(TaskRequest, actions)) == ([FIRST], [])
    assert step(PLAN, state, Tick(), 3.5)[1] == ()
    result = explore_sizes(PLAN, state)
    state, actions = step(PLAN, state, RequestDone(request=FIRST, result=result), 4.0)
    assert [request.participant.client_id for request in select_requests(TaskRequest, actions)] == list(CLIENTS)
    assert (state.pool, state.live.requested) == (result.sizes, frozenset())
    again, actions = step(PLAN, state, RequestDone(request=FIRST, result=result), 4.0)
    assert (again.pool, select_requests(SearchRequest, actions)) == (state.pool, []), "a repeated result counts once"


def test_no_step_estimates_a_network_or_searches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = complete_estimates(measure_all()[0])
    result = explore_sizes(PLAN, state)
    monkeypatch.setattr(searches.ParetoSearch, "explore", lambda *_: pytest.fail("a step searched"))
    monkeypatch.setattr(searches.ParetoSearch, "begin", lambda *_, **__: pytest.fail("a step made a search"))
    state, actions = step(PLAN, state, RequestDone(request=FIRST, result=result), 4.0)
    assert len(select_requests(TaskRequest, actions)) == len(CLIENTS)
    for name in CLIENTS:
        state, _ = step(PLAN, state, prepared(PLAN, state, name, planned_peak_bytes=10**10), 4.0)


def test_a_target_that_has_no_estimates_leaves_its_devices_out_with_the_reason() -> None:
    state, _ = measure_all()
    state, _ = step(PLAN, state, RequestFailed(request=ONNX, reason="export failed: no such operator"), 3.0)
    result = explore_sizes(PLAN, state)
    state, _ = step(PLAN, state, RequestDone(request=FIRST, result=result), 3.0)
    assert state.failed_attempts.waits_for == "ada, bob, cyd skipped: export failed: no such operator"


def test_a_search_that_fails_leaves_everybody_out_with_the_reason() -> None:
    state, _ = complete_estimates(measure_all()[0])
    state, _ = step(PLAN, state, RequestFailed(request=FIRST, reason="the search failed: no"), 3.0)
    assert state.failed_attempts.waits_for == "ada, bob, cyd skipped: the search failed: no"


def test_the_deadline_ends_the_wait_for_estimates() -> None:
    state, _ = measure_all()
    late_s = 2.0 + PLAN.config.deadlines.round_s
    state, _ = step(PLAN, state, Tick(), late_s)
    assert (state.phase, state.failed_attempts.waits_for) == (
        "waiting",
        "ada, bob, cyd missing: no size was chosen for it in time",
    )


def reload(state: RunState, folder: Path) -> RunState:
    folder.mkdir(parents=True, exist_ok=True)
    engine = open_database(folder)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2))
    journal.save(RunState(), state)
    loaded = journal.load(9.0)
    engine.dispose()
    return loaded


def test_a_server_that_is_killed_asks_for_estimates_again_and_gives_the_same_sizes(tmp_path: Path) -> None:
    for index, state in enumerate((measure_all()[0], complete_estimates(measure_all()[0])[0])):
        loaded = reload(state, tmp_path / str(index))
        assert (loaded.live.estimates, loaded.live.searches, loaded.live.requested) == ({}, {}, frozenset())
        assert select_requests(CostRequest, list_resume_actions(PLAN, loaded)) == [ONNX]
        loaded, actions = complete_estimates(loaded)
        assert select_requests(SearchRequest, actions) == [FIRST]
        loaded, actions = step(PLAN, loaded, RequestDone(request=FIRST, result=explore_sizes(PLAN, loaded)), 9.0)
        assert loaded.pool == assign_sizes().pool
        assert {name: client.size for name, client in loaded.clients.items()} == {
            name: client.size for name, client in assign_sizes().clients.items()
        }


def test_results_from_before_a_kill_are_not_searched_again(tmp_path: Path) -> None:
    """Tasks and refusals wait until a smaller size can be chosen; the search finds the same, and nothing more."""
    before = assign_sizes()
    loaded = reload(before, tmp_path)
    actions = list_resume_actions(PLAN, loaded)
    assert (select_requests(CostRequest, actions), select_requests(TaskRequest, actions)) == ([ONNX], [])
    early, actions = step(PLAN, loaded, prepared(PLAN, loaded, "ada", planned_peak_bytes=10**12), 9.0)
    assert (early.clients, actions) == (loaded.clients, ())
    loaded, _ = complete_estimates(early)
    loaded, actions = step(PLAN, loaded, RequestDone(request=FIRST, result=explore_sizes(PLAN, loaded)), 9.0)
    assert loaded.pool == before.pool
    assert [request.participant.client_id for request in select_requests(TaskRequest, actions)] == list(CLIENTS)
    sizes: list[Any] = []
    for state in (before, loaded):
        after, _ = step(PLAN, state, prepared(PLAN, state, "ada", planned_peak_bytes=10**12), 9.0)
        sizes.append(after.clients["ada"].size)
    assert sizes[0] == sizes[1] != before.clients["ada"].size


def test_models_are_refused_without_estimates(tmp_path: Path) -> None:
    """After a restart nothing requests cost estimates in that phase, as no client is assigned a size."""
    state = assign_sizes()
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
    state, _ = step(PLAN, assign_sizes(), prepared(PLAN, assign_sizes(), "ada"), 4.0)
    message = refusal(PLAN, state, "ada", available_bytes=2000)
    after, actions = step(PLAN, state, message, 5.0)
    assert replies(actions) == ["accepted"]
    loaded = reload(state, tmp_path)
    assert step(PLAN, loaded, message, 9.0)[1] == (), "the device sends it again"
    loaded, _ = complete_estimates(loaded)
    loaded, _ = step(PLAN, loaded, RequestDone(request=FIRST, result=explore_sizes(PLAN, loaded)), 9.0)
    again, actions = step(PLAN, loaded, message, 9.0)
    assert replies(actions) == ["accepted"]
    assert again.clients["ada"].size == after.clients["ada"].size


def test_a_few_clients_are_assigned_sizes_in_each_step_as_in_one_step() -> None:
    context = context_of(min_clients=3)
    state = measuring(context)
    for name in CLIENTS:
        state, _ = step(context, state, telemetry(context, name), 2.0)
    client = state.clients["ada"]
    count = 2 * AT_ONCE + 1
    names = [f"c{number:02}" for number in range(count)]
    waiting = {name: replace(client, client_id=name, stage="answered", given=None) for name in names}
    members = dict.fromkeys(names, state.live.members["ada"])
    state = replace(
        state,
        requested_attempt=0,
        clients=MappingProxyType(waiting),
        live=replace(state.live, members=PersistentMap(members), entered_s=2.0),
    )
    sized = []
    while any(client.stage == "answered" for client in state.clients.values()):
        assert state.requested_attempt == 0, "requested programs are weighed when all sizes are assigned"
        state, actions = step(context, state, Tick(), 2.0)
        sized.append([request.participant.client_id for request in select_requests(TaskRequest, actions)])
    assert [len(batch) for batch in sized] == [AT_ONCE, AT_ONCE, 1]
    assert [name for batch in sized for name in batch] == names
    assert state.requested_attempt == 1


class Slow:
    """Cost estimates that are delivered when the test says."""

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

    def deliver(self) -> None:
        for request, file in self.files:
            file.set_result(self._submit(request).result())
        self.files.clear()


def _sizes(world: World) -> list[Mapping[str, str]]:
    return [{row.client_id: row.architecture_id for row in record.clients} for record in world.notes.records]


@pytest.mark.slow
def test_a_run_is_the_same_if_the_server_is_killed_while_estimates_are_pending(tmp_path: Path) -> None:
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
    slow.deliver()
    world.run(until=lambda: world.server.state.pool != () and world.server.state.phase == "train")
    world.kill_server()
    world.turn()
    slow.deliver()
    world.run()
    assert _sizes(world) == _sizes(calm)
    assert world.model_bytes() == calm.model_bytes()


def test_written_estimates_are_read_without_computing(tmp_path: Path) -> None:
    path = tmp_path / "estimates"
    path.write_bytes(ESTIMATES.pack())
    network = network_of(MODEL)
    read = MemoryEstimates.unpack(path.read_bytes())
    full = [network.full_architecture()]
    assert read.memory_bytes(network, full) == ESTIMATES.memory_bytes(network, full)
