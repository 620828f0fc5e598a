"""A round that is certain to fail is attempted only twice: then the run ends and reports the reason."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    join_client,
    measuring,
    prepared,
    profile,
    refusal,
    task_failed,
    telemetry,
    update,
)
from server.fake_device import SHAPE
from server.server_rig import World, config, fleet

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.protocol.messages import RefusalReason, Task
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.obstacles import REFUSALS
from subfleet.rounds.signals import RequestFailed, Tick
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CheckRequest
from subfleet.search.candidates import LIMITS
from subfleet.settings.sections import Deadlines

PLAN = context_of(clock=None, deadlines=Deadlines(lease_s=1e4))
PASSING = [reason for reason, course in REFUSALS.items() if course.lasts == "passing"]

Answers = Mapping[str, tuple[RefusalReason, str]]


def attempt(context: RunContext, state: RunState, answers: Answers) -> RunState:
    """Make one more attempt at the open round, in which each client answers every task with its refusal."""
    if state.phase == "waiting":
        state, _ = step(context, state, Tick(), state.live.entered_s + 100.0)
    assert state.phase == "measure"
    now_s = state.live.entered_s
    for name in answers:
        state, _ = step(context, state, telemetry(context, name, state.round, attempt=state.attempt), now_s)
    if state.phase == "measure":
        state, _ = step(context, state, Tick(), now_s + context.config.deadlines.measure_s)
    for name, (reason, detail) in answers.items():
        while state.phase == "train" and name in state.clients and state.clients[name].stage == "preparing":
            state, _ = step(context, state, prepared(context, state, name), now_s)
            refused = replace(refusal(context, state, name), reason=reason, detail=detail)
            state, _ = step(context, state, refused, now_s)
    return state


def same_refusals(reason: RefusalReason, detail: str = "no") -> Answers:
    return dict.fromkeys(CLIENTS, (reason, detail))


def test_every_reason_of_the_protocol_has_a_course_and_a_known_limit() -> None:
    assert set(REFUSALS) == set(get_args(RefusalReason))
    for reason, course in REFUSALS.items():
        assert course.limit is None or course.limit in LIMITS
        # The limit of a budget has the device's name for it; no other reason concerns the runtime.
        assert course.limit in (None, reason)


@pytest.mark.parametrize("reason", ["data", "diverged"])
def test_a_run_ends_after_the_second_attempt_if_every_device_fails_for_good(reason: RefusalReason) -> None:
    state = attempt(PLAN, measuring(PLAN), same_refusals(reason, "label 12 of 10"))
    assert (state.phase, state.attempt) == ("waiting", 1)
    state = attempt(PLAN, state, same_refusals(reason, "label 12 of 10"))
    assert (state.phase, state.attempt) == ("failed", 2)
    assert state.failure == (
        "round 1 left nothing to aggregate in 2 attempts, and further attempts would fail for the same reasons: "
        f"ada, bob, cyd refused: {reason}: label 12 of 10; repair these devices, and start the run again"
    )


@pytest.mark.parametrize("reason", ["runtime", "program"])
def test_a_program_that_no_device_can_run_ends_the_run_once_every_size_was_tried(reason: RefusalReason) -> None:
    """An attempt tries three of the four sizes; the third attempt has none left."""
    state = measuring(PLAN)
    for number in (1, 2):
        state = attempt(PLAN, state, same_refusals(reason, f"no kernel {number}"))
        assert (state.phase, state.attempt) == ("waiting", number)
    state = attempt(PLAN, state, same_refusals(reason, "nothing was given"))
    assert (state.phase, state.attempt) == ("failed", 3)
    assert {client.stage for client in state.clients.values()} == {"skipped"}
    assert f"ada, bob, cyd refused: {reason}: no kernel 2;" in state.failure


@pytest.mark.parametrize("reason", PASSING)
def test_a_passing_obstacle_is_waited_for(reason: RefusalReason) -> None:
    state = measuring(PLAN)
    for number in range(1, 6):
        state = attempt(PLAN, state, same_refusals(reason))
        assert (state.phase, state.attempt) == ("waiting", number)


def test_an_unclear_failure_is_final_when_it_is_repeated_in_the_same_words() -> None:
    state = measuring(PLAN)
    for number in range(1, 4):
        state = attempt(PLAN, state, same_refusals("failed", f"error {number}"))
        assert state.phase == "waiting"
    assert attempt(PLAN, state, same_refusals("failed", "error 3")).phase == "failed"


def test_the_first_reason_is_reported() -> None:
    state = attempt(PLAN, measuring(PLAN), same_refusals("data", "label 12 of 10"))
    state = attempt(PLAN, state, same_refusals("diverged", "the loss was nan"))
    assert "ada, bob, cyd refused: data: label 12 of 10;" in state.failure
    assert "nan" not in state.failure


@pytest.mark.parametrize("reason", PASSING)
def test_one_device_with_a_passing_obstacle_keeps_the_run_going(reason: RefusalReason) -> None:
    state = measuring(PLAN)
    for _ in range(4):
        state = attempt(PLAN, state, {**same_refusals("data"), "cyd": (reason, "no")})
        assert state.phase == "waiting"


def test_a_passing_obstacle_resets_the_failed_attempts_of_a_device() -> None:
    state = attempt(PLAN, measuring(PLAN), same_refusals("data"))
    state = attempt(PLAN, state, {**same_refusals("data"), "cyd": ("memory", "no")})
    state = attempt(PLAN, state, same_refusals("data"))
    assert state.phase == "waiting"
    assert attempt(PLAN, state, same_refusals("data")).phase == "failed"


def test_fewer_devices_than_a_round_needs_end_no_run() -> None:
    state = attempt(PLAN, measuring(PLAN), same_refusals("data"))
    state, _ = step(PLAN, state, Tick(), state.live.entered_s + 100.0)
    # One of the three stays silent, so that the second attempt has two clients.
    state = attempt(PLAN, state, dict.fromkeys(CLIENTS[:2], ("data", "no")))
    assert state.clients["cyd"].stage == "missing"
    assert state.phase == "waiting"


def test_a_healthy_device_that_joins_before_the_end_of_the_second_attempt_keeps_the_run_going() -> None:
    state = attempt(PLAN, measuring(PLAN), same_refusals("data"))
    state = join_client(PLAN, state, "dan", state.live.entered_s)
    state = attempt(PLAN, state, {**same_refusals("data"), "dan": ("memory", "not now")})
    assert state.phase == "waiting"
    for _ in range(2):
        state = attempt(PLAN, state, {**same_refusals("data"), "dan": ("data", "no")})
    assert state.phase == "failed", "two attempts of every connected device"


def test_a_restarted_device_has_two_attempts_again() -> None:
    state = attempt(PLAN, measuring(PLAN), same_refusals("data"))
    state, _ = step(PLAN, state, replace(profile("ada"), session_id="ada-2"), state.live.entered_s)
    assert set(state.failed_attempts.failing) == {"bob", "cyd"}
    state = attempt(PLAN, state, same_refusals("data"))
    assert state.phase == "waiting"


def test_a_client_that_is_not_selected_has_neither_failed_nor_recovered() -> None:
    """Each attempt selects two of three clients; the run ends when each has been selected twice."""
    context = context_of(clock=None, deadlines=Deadlines(lease_s=1e4), clients_per_round=2)
    state, draw_counts = measuring(context), dict.fromkeys(CLIENTS, 0)
    while state.phase != "failed":
        state = attempt(context, state, same_refusals("data"))
        for name, client in state.clients.items():
            draw_counts[name] += client.stage == "refused"
        assert (state.phase == "failed") == (min(draw_counts.values()) >= 2)
        assert state.attempt < 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_shape": (SHAPE[0] + 1,)}, "its samples have shape"),
        ({"runtimes": ("torch",)}, "it runs torch, but the run has programs for"),
        ({"class_counts": (1,) * 99}, "classes"),
    ],
)
def test_devices_that_can_never_take_part_end_the_run(changes: dict[str, Any], words: str) -> None:
    state = measuring(PLAN)
    for name in CLIENTS:
        state, _ = step(PLAN, state, replace(profile(name), **changes), 1.0)
    for number in (1, 2):
        state = attempt(PLAN, state, same_refusals("data"))
        assert state.attempt == number
    assert state.phase == "failed"
    assert words in state.failure


def test_a_device_that_is_not_available_now_is_waited_for() -> None:
    state = measuring(PLAN)
    for _ in range(3):
        if state.phase == "waiting":
            state, _ = step(PLAN, state, Tick(), state.live.entered_s + 100.0)
        for name in CLIENTS:
            report = telemetry(PLAN, name, state.round, attempt=state.attempt)
            report = replace(report, reading=replace(report.reading, available=False))
            state, _ = step(PLAN, state, report, state.live.entered_s)
        assert state.phase == "waiting"


def test_sizes_that_cannot_be_exported_end_the_run_with_the_reason_that_the_exporter_gave() -> None:
    state, attempts = measuring(PLAN), 0
    while state.phase != "failed":
        attempts += 1
        assert attempts <= len(PLAN.space) + 2
        if state.phase == "waiting":
            state, _ = step(PLAN, state, Tick(), state.live.entered_s + 100.0)
        for name in CLIENTS:
            state, _ = step(PLAN, state, telemetry(PLAN, name, attempt=state.attempt), state.live.entered_s)
        for name in [name for name, client in state.clients.items() if client.stage == "preparing"]:
            state, _ = step(
                PLAN, state, task_failed(state, name, "export failed: no lowering of Fft"), state.live.entered_s
            )
    assert "export failed: no lowering of Fft" in state.failure


def test_unusable_updates_end_the_run_after_the_second_attempt() -> None:
    state = measuring(PLAN)
    for number in (1, 2):
        if state.phase == "waiting":
            state, _ = step(PLAN, state, Tick(), state.live.entered_s + 100.0)
        for name in CLIENTS:
            state, _ = step(PLAN, state, telemetry(PLAN, name, attempt=state.attempt), state.live.entered_s)
        for name in CLIENTS:
            state, _ = step(PLAN, state, prepared(PLAN, state, name), state.live.entered_s)
            event = RequestFailed(
                request=CheckRequest(update=update(PLAN, state, name)), reason="tensor 'a' is not finite"
            )
            state, _ = step(PLAN, state, event, state.live.entered_s)
        assert state.attempt == number
    assert state.phase == "failed"
    assert "refused: tensor 'a' is not finite" in state.failure


def test_the_journal_keeps_the_failed_attempts_of_each_client(tmp_path: Path) -> None:
    """A run that is killed between the two attempts still ends after the second."""
    state = attempt(PLAN, measuring(PLAN), same_refusals("data"))
    engine = open_database(tmp_path)
    Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2)).save(RunState(), state)
    engine = open_database(tmp_path)
    loaded = Journal(engine, begin_run(engine, name="test", settings="{}", round_count=2)).load(9.0)
    assert loaded.failed_attempts.failing == state.failed_attempts.failing
    assert {failing.times for failing in loaded.failed_attempts.failing.values()} == {1}


@pytest.mark.slow
def test_a_run_reports_its_end_on_the_screen_and_in_the_api_and_goes_on_when_it_is_repaired(
    tmp_path: Path,
) -> None:
    from subfleet.reporting.api import HttpAddress, serve_http

    broken = True

    def refuse(task: Task) -> tuple[str, int | None] | None:
        return ("diverged", None) if broken else None

    world = World(tmp_path, config(clock=None, rounds=1, deploy_targets=()), fleet(refuse=refuse))
    world.run()
    failure = world.server.state.failure
    assert world.server.state.attempt == 2
    assert failure.startswith(
        "round 1 left nothing to aggregate in 2 attempts, and further attempts would fail for the same reasons: ada"
    )
    with serve_http(tmp_path / "state", HttpAddress(port=0)) as url:
        (run,) = httpx.get(f"{url}/api/runs").json()
    assert (run["phase"], run["failure"]) == ("failed", failure)
    (message,) = [message for message in world.notes.messages if message.endswith("it is attempted again in 1 s")]
    assert "refused: diverged" in message
    broken = False
    world.kill_server()
    assert world.server.state.failed_attempts.failing == {}
    world.run()
    assert world.server.state.phase == "finished"
