"""A round that aggregates nothing keeps its number: it is attempted again, and the run reports what it waits for."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    measuring,
    prepared,
    refusal,
    replies,
    size_of,
    task_failed,
    telemetry,
    training,
    update,
)
from server.fake_device import PLENTY_BYTES, Behaviour
from server.server_rig import World, config, fleet
from server.test_calibration import with_calibration
from server.test_selection import draw

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.protocol.messages import Task
from subfleet.protocol.task import Calibrate
from subfleet.rounds.announcing import build_round_info
from subfleet.rounds.closing import describe_missing
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import AggregationRequest, Close, RequestDone, SendTask, Tick
from subfleet.rounds.state import ClientState, RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest
from subfleet.settings.sections import Deadlines, LogClock

LIVE = context_of(clock=None, deadlines=Deadlines(lease_s=1e4))
LOGS = context_of(clock=LogClock(start_s=5.0, step_s=10.0), deadlines=Deadlines(attempts_s=35.0))
LITTLE = 10


def measure_again(context: RunContext, state: RunState, now_s: float) -> RunState:
    """All clients send telemetry again."""
    for name in CLIENTS:
        state, _ = step(context, state, telemetry(context, name, state.round, attempt=state.attempt), now_s)
    return state


def starve_all(context: RunContext, state: RunState, now_s: float) -> RunState:
    """No client has memory for any submodel."""
    for name in CLIENTS:
        state, _ = step(context, state, telemetry(context, name, state.round, LITTLE, attempt=state.attempt), now_s)
    return state


def refuse_all(context: RunContext, state: RunState, now_s: float) -> RunState:
    """All clients get a task and refuse it."""
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), now_s)
    for name in CLIENTS:
        message = replace(refusal(context, state, name), reason="data")
        state, _ = step(context, state, message, now_s)
    return state


def let_time_out(context: RunContext, state: RunState, now_s: float) -> RunState:
    """All clients get a task, and none answers."""
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), now_s)
    return step(context, state, Tick(), state.live.entered_s + context.config.deadlines.round_s)[0]


def return_unusable(context: RunContext, state: RunState, now_s: float) -> RunState:
    """All clients answer with updates that cannot be aggregated."""
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), now_s)
    for name in CLIENTS:
        state, _ = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            now_s,
        )
    event = RequestDone(
        request=AggregationRequest(round=state.round, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused=dict.fromkeys(CLIENTS, "too large")),
    )
    state, actions = step(context, state, event, now_s)
    assert not [action for action in actions if isinstance(action, Close)]
    return state


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (refuse_all, "refused: data: as told"),
        (let_time_out, "missing: no answer came in time"),
        (return_unusable, "refused: too large"),
    ],
)
def test_a_round_without_anything_to_aggregate_is_tried_again_under_its_number(
    end: Callable[[RunContext, RunState, float], RunState], why: str
) -> None:
    state = end(LIVE, measure_again(LIVE, measuring(LIVE), 2.0), 3.0)
    assert (state.phase, state.round, state.aggregated_round, state.attempt) == ("waiting", 1, 0, 1)
    assert state.failed_attempts.waits_for == f"ada, bob, cyd {why}"
    early, _ = step(LIVE, state, Tick(), state.live.entered_s + 0.9)
    assert early.phase == "waiting"
    assert build_round_info(LIVE, early, state.live.entered_s) is None
    state, _ = step(LIVE, early, Tick(), state.live.entered_s + 1.0)
    assert (state.phase, state.round, dict(state.clients)) == ("measure", 1, {})
    info = build_round_info(LIVE, state, state.live.entered_s)
    assert info is not None
    assert (info.round, info.attempt, info.phase, info.message_id) == (1, 1, "measure", "run/1.1/measure")


def test_a_round_is_attempted_again_if_no_submodel_fits_any_client() -> None:
    state = starve_all(LIVE, measuring(LIVE), 2.0)
    assert (state.phase, state.round, state.aggregated_round, state.attempt) == ("waiting", 1, 0, 1)
    assert state.failed_attempts.waits_for.startswith("ada, bob, cyd skipped: no submodel fits: the smallest needs")


def test_pauses_double_up_to_a_maximum_and_the_run_fails_at_its_deadline() -> None:
    context = context_of(clock=None, deadlines=Deadlines(attempts_s=40.0, pause_s=2.0, longest_pause_s=9.0))
    state, pauses = measuring(context), []
    while state.phase != "failed":
        state = starve_all(context, state, state.live.entered_s)
        paused_s = state.live.attempt_times.pause_s
        if state.phase == "waiting":
            pauses.append(paused_s)
            state, _ = step(context, state, Tick(), state.live.entered_s + paused_s)
    assert pauses == [2.0, 4.0, 8.0, 9.0, 9.0, 9.0]
    assert state.failure.startswith(
        "round 1 left nothing to aggregate for 40 s, in 7 attempts (ada, bob, cyd skipped: no submodel"
    )
    assert "start the server again" in state.failure
    info = build_round_info(context, state, state.live.entered_s)
    assert info is not None
    assert info.phase == "finished"


def test_the_deadline_of_the_next_round_begins_anew() -> None:
    context = context_of(clock=None, deadlines=Deadlines(attempts_s=40.0, lease_s=1e4))
    state = starve_all(context, measuring(context), 2.0)
    state, _ = step(context, state, Tick(), 3.0)
    state = aggregate_round(context, measure_again(context, state, 20.0), 20.0)
    assert (state.phase, state.round, state.attempt, state.failed_attempts.waits_for) == ("measure", 2, 0, "")
    state = starve_all(context, state, 44.0)
    assert (state.phase, state.attempt, state.live.attempt_times.pause_s) == ("waiting", 1, 1.0)


def aggregate_round(context: RunContext, state: RunState, now_s: float) -> RunState:
    """All clients train, and the round closes."""
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), now_s)
    for name in CLIENTS:
        state, _ = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            now_s,
        )
    event = RequestDone(
        request=AggregationRequest(round=state.round, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
    )
    return step(context, state, event, now_s)[0]


def test_each_attempt_and_later_round_reads_replayed_logs_one_step_later() -> None:
    state = starve_all(LOGS, starve_all(LOGS, measuring(LOGS), 2.0), 2.0)
    info = build_round_info(LOGS, state, 2.0)
    assert info is not None
    assert (info.round, info.attempt, info.phase, info.log_time_s) == (1, 2, "measure", 25.0)
    state = aggregate_round(LOGS, measure_again(LOGS, state, 2.0), 2.0)
    info = build_round_info(LOGS, state, 2.0)
    assert info is not None
    assert (info.round, info.attempt, info.phase, info.log_time_s) == (2, 0, "measure", 35.0)


def test_the_deadline_counts_the_seconds_of_replayed_logs() -> None:
    state = measuring(LOGS)
    for count in range(1, 5):
        assert state.phase == "measure"
        state = starve_all(LOGS, state, 2.0)
        assert state.failed_attempts.lost == count
    assert state.phase == "failed"
    assert "for 35 s, in 4 attempts" in state.failure


def test_attempts_pause_under_a_logical_clock_if_logs_are_not_the_cause() -> None:
    state = refuse_all(LOGS, measure_again(LOGS, measuring(LOGS), 2.0), 3.0)
    assert (state.phase, state.live.attempt_times.pause_s) == ("waiting", 1.0)


def test_a_clock_that_stands_still_is_no_reason_to_try_at_once() -> None:
    context = context_of(clock=LogClock(step_s=0.0))
    state = starve_all(context, measuring(context), 2.0)
    assert (state.phase, state.live.attempt_times.pause_s) == ("waiting", 1.0)


def test_answers_to_an_earlier_attempt_do_not_count() -> None:
    state = training(LIVE)
    late, old = update(LIVE, state, "ada"), refusal(LIVE, state, "bob")
    state, _ = step(LIVE, state, Tick(), 2.0 + LIVE.config.deadlines.round_s)
    assert replies(step(LIVE, state, late, 700.0)[1]) == ["refused"]
    state, _ = step(LIVE, state, Tick(), 700.0)
    for name in CLIENTS:
        before = replace(telemetry(LIVE, name), message_id="old")
        assert replies(step(LIVE, state, before, 700.0)[1]) == ["refused"]
        state, actions = step(LIVE, state, telemetry(LIVE, name, attempt=1), 700.0)
        assert replies(actions) == ["accepted"]
    jobs: list[Task] = []
    for name in CLIENTS:
        state, actions = step(LIVE, state, prepared(LIVE, state, name), 700.0)
        jobs += [action.task for action in actions if isinstance(action, SendTask)]
    assert [(job.task_id, job.round, job.attempt) for job in jobs] == [(f"run/r1.1/{name}/0", 1, 1) for name in CLIENTS]
    assert replies(
        step(LIVE, state, RequestDone(request=CheckRequest(update=late), result=ChangeSize()), 701.0)[1]
    ) == ["refused"]
    assert replies(step(LIVE, state, old, 701.0)[1]) == ["refused"]
    assert {client.stage for client in state.clients.values()} == {"out"}


def test_a_program_that_could_not_be_written_is_not_requested_in_the_next_attempt() -> None:
    state = measure_again(LIVE, measuring(LIVE), 2.0)
    first = size_of(state.clients["ada"])
    for name in CLIENTS:
        state, _ = step(LIVE, state, task_failed(state, name), 2.0)
    assert state.failed_attempts.waits_for == "ada, bob, cyd skipped: export failed: no"
    state = measure_again(LIVE, step(LIVE, state, Tick(), 3.0)[0], 3.0)
    assert {size_of(client) for client in state.clients.values()} == {LIVE.space[-2].architecture_id} != {first}


def test_another_attempt_draws_other_clients() -> None:
    names = [f"c{number}" for number in range(40)]
    assert len({draw(names, 3, seed=1, round_number=2, attempt=attempt) for attempt in range(4)}) == 4
    assert draw(names, 3, seed=1, round_number=2) == draw(names, 3, seed=1, round_number=2, attempt=0)


def test_missing_clients_are_described_briefly_the_most_frequent_reason_first() -> None:
    reasons = {f"c{number}": f"reason {number % 7} " + "x" * 500 for number in range(9)}
    clients = {
        name: ClientState(client_id=name, device="d", stage="skipped", reason=reason)
        for name, reason in reasons.items()
    }
    clients["done"] = ClientState(client_id="done", device="d", stage="done")
    text = describe_missing(RunState(clients=clients))
    assert text.startswith("c0, c7 skipped: reason 0 xxx")
    assert text.endswith("; 3 more for other reasons")
    assert "done" not in text
    assert len(text) < 1000
    many = {name: ClientState(client_id=name, device="d", stage="missing", reason="late") for name in "abcdef"}
    assert describe_missing(RunState(clients=many)) == "a, b, c and 3 more missing: late"


@pytest.mark.slow
def test_the_journal_keeps_the_attempts_and_forgets_their_answers(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    journal = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2))

    def save_step(before: RunState, after: RunState) -> RunState:
        journal.save(before, after)
        loaded = journal.load(9.0)
        assert (loaded.phase, loaded.round, dict(loaded.clients)) == (after.phase, after.round, dict(after.clients))
        assert (loaded.attempt, loaded.run_attempt) == (after.attempt, after.run_attempt)
        assert loaded.failed_attempts.waits_for == after.failed_attempts.waits_for
        assert loaded.live.attempt_times.since_s is None  # a restarted server begins its deadlines anew
        return after

    state = save_step(RunState(), training(LIVE))
    checked = RequestDone(request=CheckRequest(update=update(LIVE, state, "ada")), result=ChangeSize())
    state = save_step(state, step(LIVE, state, checked, 3.0)[0])
    state = save_step(state, step(LIVE, state, Tick(), 2.0 + LIVE.config.deadlines.round_s)[0])
    assert state.phase == "aggregate"
    event = RequestDone(
        request=AggregationRequest(round=1, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={"ada": "too large"}),
    )
    state = save_step(state, step(LIVE, state, event, 700.0)[0])
    state = save_step(state, step(LIVE, state, Tick(), 701.0)[0])
    assert journal.update_digests(since_round=1) == set()
    state = save_step(state, step(LIVE, state, telemetry(LIVE, "ada", attempt=1), 702.0)[0])
    assert set(journal.load(9.0).clients) == {"ada"}


# --- whole runs


def short_until(log_time_s: float) -> dict[str, Behaviour]:
    """A fleet with logs that have no memory for any submodel before that time."""

    def memory_bytes(at_s: float) -> int:
        return LITTLE if at_s < log_time_s else 14_000 if at_s < log_time_s + 10.0 else PLENTY_BYTES

    return fleet(log_memory_bytes=memory_bytes)


def finish(world: World) -> World:
    world.run()
    return world


@pytest.mark.slow
def test_no_round_is_used_up_while_memory_is_short(tmp_path: Path) -> None:
    world = finish(World(tmp_path, config(rounds=2, deploy_targets=()), short_until(120.0)))
    result = world.server.result()
    assert result.finished
    assert [(record.round, record.log_time_s, record.failed_attempts) for record in result.rounds] == [
        (1, 120.0, 12),
        (2, 130.0, 0),
    ]
    assert {row.status for record in result.rounds for row in record.clients} == {"aggregated"}
    first, second = ({row.architecture_id for row in record.clients} for record in result.rounds)
    assert first != second
    begins = "round 1 left nothing to aggregate (ada, bob, cyd skipped:"
    lines = [line for line in world.notes.messages if line.startswith(begins)]
    assert len(lines) == 12
    assert all(line.endswith("; it is attempted again at once") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_run_that_is_killed_between_attempts_ends_with_the_same_bits(tmp_path: Path, seed: int) -> None:
    calm = finish(World(tmp_path / "calm", config(deploy_targets=()), short_until(60.0)))
    world = World(tmp_path / "hurt", config(deploy_targets=()), short_until(60.0), order=seed)
    generator, kills = random.Random(seed), 0
    for _ in range(4000):
        if world.server.finished:
            break
        if kills < 10 and generator.random() < 0.5:
            world.broker.cut("server", mend_after_s=None)
            world.kill_server()
            kills += 1
        world.turn()
    assert kills == 10
    assert world.model_bytes() == calm.model_bytes()
    times = [(record.log_time_s, record.failed_attempts) for record in world.server.result().rounds]
    assert (
        times
        == [(record.log_time_s, record.failed_attempts) for record in calm.server.result().rounds]
        == [(60.0, 6), (70.0, 0)]
    )


@pytest.mark.slow
def test_a_live_run_waits_for_memory_and_reports_it(tmp_path: Path) -> None:
    from subfleet.reporting.api import HttpAddress, serve_http

    world = World(tmp_path, config(clock=None, rounds=1, deploy_targets=()), fleet())
    begun_s = world.clock.now_s
    for device in world.devices.values():
        device.behaviour.memory_budget_bytes = lambda _: LITTLE if world.clock.now_s - begun_s < 60.0 else PLENTY_BYTES
    world.run(until=lambda: world.server.state.attempt == 4)
    with serve_http(tmp_path / "state", HttpAddress(port=0)) as url:
        (run,) = httpx.get(f"{url}/api/runs").json()
        page = httpx.get(url).text
    assert (run["phase"], run["round"], run["attempt"], run["lost"]) == ("waiting", 1, 4, 4)
    assert run["waits_for"].startswith("ada, bob, cyd skipped: no submodel fits")
    assert "After 4 attempts, it waits for ada, bob, cyd skipped" in page
    (record,) = finish(world).server.result().rounds
    assert world.clock.now_s - begun_s > 60.0
    assert record.failed_attempts == 6  # after 1, 2, 4, 8, 16 and 32 seconds
    assert {row.status for row in record.clients} == {"aggregated"}


@pytest.mark.slow
def test_a_run_that_gave_up_is_tried_again_by_the_next_server(tmp_path: Path) -> None:
    settings = config(rounds=1, deploy_targets=(), deadlines=Deadlines(attempts_s=50.0, linger_s=0.0, lease_s=1e4))
    world = finish(World(tmp_path, settings, short_until(80.0)))
    assert world.server.state.phase == "failed"
    assert world.server.state.failure.startswith(
        "round 1 left nothing to aggregate for 50 s, in 5 attempts (ada, bob, cyd skipped"
    )
    world.kill_server()
    (record,) = finish(world).server.result().rounds
    assert (world.server.state.phase, record.log_time_s, record.failed_attempts) == ("finished", 80.0, 8)


@pytest.mark.slow
def test_a_round_that_measures_norms_is_tried_again_likewise(tmp_path: Path) -> None:
    refusals = dict.fromkeys(CLIENTS, 1)

    def refuse(task: Task) -> tuple[str, int | None] | None:
        if not isinstance(task.work, Calibrate) or not refusals[task.client_id]:
            return None
        refusals[task.client_id] -= 1
        return ("failed", None)

    world = World(tmp_path, config(**with_calibration(rounds=1, deploy_targets=())), fleet(refuse=refuse))
    world.run(until=lambda: world.server.state.attempt == 1 and world.server.state.phase == "measure")
    assert (world.server.state.round, world.server.state.aggregated_round) == (2, 1)
    info = build_round_info(world.context, world.server.state, world.clock.now_s)
    assert info is not None
    assert (info.round, info.log_time_s) == (2, 20.0)
