"""Asynchronous rounds: a full buffer of updates is a round, and no client waits for another."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.asynchronous_cases import ALLOWED, Run, acks, asked, buffered, checked, find_request
from server.coordinator_cases import CLIENTS, prepared, refusal, telemetry
from server.server_rig import config

from subfleet.journal.rows import build_round_record
from subfleet.link.traffic import Traffic
from subfleet.methods import METHODS
from subfleet.methods.combining import explain_rounds
from subfleet.protocol.errors import ConfigError
from subfleet.rounds.ongoing import compute_staleness
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import (
    AggregationRequest,
    Ask,
    SendTask,
    Tick,
    Withdraw,
)
from subfleet.rounds.state import AcceptedUpdate, Exclusion
from subfleet.rounds.work import TaskRequest
from subfleet.settings.sections import AsynchronousSettings, Deadlines, Evaluations

ROOT = Path(__file__).resolve().parents[2]


# --- the configuration ------------------------------------------------------------------------------------------------


def test_methods_are_allowed_or_refused_in_a_sentence() -> None:
    for name, method in METHODS.items():
        if name in ALLOWED:
            assert config(method=method(), asynchronous=buffered()).asynchronous == buffered()
            continue
        changes: dict[str, Any] = {} if name != "power_of_choice" else {"evaluation": Evaluations(every=1)}
        with pytest.raises(ConfigError) as raised:
            config(method=method(), asynchronous=buffered(), **changes)
        why = explain_rounds(method().roles())
        assert why or "fedoras" in name
        assert f"method '{name}' {why}" in str(raised.value) or name == "fedoras"


def test_the_page_of_rounds_names_all_methods() -> None:
    page = (ROOT / "docs/reference/rounds.md").read_text(encoding="utf-8").split("## Asynchronous rounds")[1]
    listed = page.split("Methods are refused if")[1].split("\n\n")[0]
    refused, allowed = (set(re.findall(r"`(\w+)`", part)) for part in listed.split("`standalone`"))
    assert (refused | {"standalone"}, allowed) == ({*METHODS} - ALLOWED, ALLOWED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clients_per_round": 5}, "clients_per_round is 5"),
        ({"quorum": 0.5}, "quorum is 0.5"),
        ({"evaluation": Evaluations(every=2)}, "evaluation.every is 2"),
        ({"norms": "calibrated"}, "norms are 'calibrated'"),
    ],
)
def test_what_a_round_of_all_needs_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(asynchronous=buffered(), **changes)


def test_bounds() -> None:
    for name in ("buffer", "concurrency", "max_staleness"):
        wrong: dict[str, Any] = {name: 0}
        with pytest.raises(ConfigError, match=name):
            AsynchronousSettings(**wrong)
    assert [buffered().compute_factor(age) for age in (0, 1, 3, 8)] == [1.0, 1 / math.sqrt(2), 0.5, 1 / 3]
    assert buffered(staleness="none").compute_factor(8) == 1.0


# --- the state machine ------------------------------------------------------------------------------------------------


def test_a_round_opens_with_as_many_clients_as_may_train() -> None:
    run = Run(buffered(concurrency=2))
    assert run.state.phase == "train", "there is no phase in which all are measured"
    assert len(run.in_stage("asked")) == 2
    assert len(run.stages()) == 2
    run.send()
    assert len(run.in_stage("out")) == 2


def test_a_fast_client_contributes_while_a_slow_one_trains() -> None:
    run = Run(buffered(buffer=1, concurrency=2), clients=("ada", "bob"))
    run.send()
    ages = []
    for number in range(1, 4):
        request = find_request(run.train("ada"))
        assert [client.client_id for client in request.clients] == ["ada"]
        close = run.aggregate()
        assert [client.client_id for client in close.clients] == ["ada"]
        record = build_round_record(run.context, close, Traffic())
        ages += [row.staleness for row in record.clients]
        assert run.state.round == number + 1
        assert run.state.clients["bob"].task is not None
        assert run.state.clients["bob"].task.round == 1
        run.send()
    request = find_request(run.train("bob"))
    assert [compute_staleness(request.round, client) for client in request.clients] == [3]
    record = build_round_record(run.context, run.aggregate(), Traffic())
    assert [(row.client_id, row.staleness) for row in record.clients] == [("bob", 3)]
    assert ages == [0, 0, 0]


def test_a_client_that_is_done_is_replaced_at_once_but_not_by_itself() -> None:
    run = Run(buffered(buffer=3, concurrency=2))
    first = run.in_stage("asked")
    run.send()
    (last,) = {*CLIENTS} - {*first}
    assert asked(run.train(first[0])) == [last]
    assert asked(run.train(first[1])) == [], "each counts once in a buffer"
    run.send()
    assert len(find_request(run.train(last)).clients) == 3


def test_a_full_buffer_closes_the_round_and_the_others_go_on() -> None:
    run = Run(buffered(buffer=2, concurrency=3))
    run.send()
    run.train("ada")
    task = run.state.clients["cyd"].task
    assert [client.client_id for client in find_request(run.train("bob")).clients] == ["ada", "bob"]
    assert (run.state.phase, run.stages()["cyd"]) == ("aggregate", "out")
    run.aggregate()
    assert run.state.round == 2
    assert run.state.clients["cyd"].task == task
    assert asked(run.actions) == ["ada", "bob"]


def test_what_arrives_while_a_buffer_is_aggregated_counts_in_the_next() -> None:
    run = Run(buffered(buffer=1, concurrency=3))
    run.send()
    run.train("ada")
    update = run.update("bob")
    assert acks(run.apply(update)) == [], "without an ack the device repeats it"
    for _ in range(2):
        assert acks(run.apply(checked(update))) == []
    assert acks(run.apply(refusal(run.context, run.state, "cyd"))) == []
    close = run.aggregate()
    assert [client.client_id for client in close.clients] == ["ada"]
    assert [ack.status for ack in acks(run.actions) if ack.of == update.message_id] == ["accepted"]
    request = find_request(run.actions)
    assert [(client.client_id, client.stage) for client in request.clients] == [("bob", "done")]
    assert (run.state.phase, run.state.round) == ("aggregate", 2), "one update fills the buffer"
    run.aggregate()
    assert run.state.clients["cyd"].refusals, "a refusal is answered with a smaller task"


def test_a_client_cannot_fill_what_is_postponed() -> None:
    run = Run(buffered(buffer=1, concurrency=3))
    run.send()
    run.train("ada")
    for number in range(5):
        assert acks(run.apply(replace(run.update("bob"), message_id=f"m{number}"))) == []
    assert len(run.state.live.postponed) == 1
    assert [ack.status for ack in acks(run.apply(run.update("ada")))] == ["duplicate"]
    stranger = replace(run.update("bob"), client_id="eve")
    assert [ack.status for ack in acks(run.apply(stranger))] == ["refused"]
    assert len(run.state.live.postponed) == 1


def test_a_buffer_closes_with_fewer_updates_if_nobody_is_left_to_ask() -> None:
    run = Run(buffered(buffer=3, concurrency=3))
    run.measure("ada")
    run.apply(telemetry(run.context, "bob", 1, memory_bytes=10))
    run.apply(telemetry(run.context, "cyd", 1, memory_bytes=10))
    assert run.in_stage("skipped") == ["bob", "cyd"]
    run.apply(prepared(run.context, run.state, "ada"))
    assert [client.client_id for client in find_request(run.train("ada")).clients] == ["ada"]


def test_excluded_clients_are_not_asked() -> None:
    run = Run(buffered(buffer=1, concurrency=1))
    (first,) = run.in_stage("asked")
    run.send()
    run.train(first)
    excluded = {name: Exclusion(until_round=2, reason="it was odd") for name in CLIENTS[:2]}
    run.state = replace(run.state, outliers=replace(run.state.outliers, excluded=excluded))
    run.aggregate()
    assert run.in_stage("asked") == [CLIENTS[2]]
    assert {run.state.clients[name].reason for name in run.in_stage("skipped")} == {"it was odd"}
    assert len(run.in_stage("skipped")) == 2


def test_an_attempt_without_an_update_is_repeated_after_a_pause() -> None:
    run = Run(buffered(buffer=2, concurrency=3))
    for name in CLIENTS:
        run.apply(telemetry(run.context, name, 1, memory_bytes=10))
    assert (run.state.phase, run.state.round, run.state.attempt) == ("train", 1, 1), "logs alone decided: no pause"
    assert run.in_stage("asked") == sorted(CLIENTS)


def test_deadlines_count_from_the_task_of_each_client() -> None:
    deadlines = Deadlines(round_s=100.0, measure_s=10.0, lease_s=1e6)
    run = Run(buffered(buffer=1, concurrency=2), clients=("ada", "bob", "cyd"), deadlines=deadlines)
    first, second = run.in_stage("asked")
    run.send(first)
    run.apply(Tick(), 9.0)
    assert run.stages()[second] == "asked"
    assert Withdraw not in map(type, run.actions)
    run.apply(Tick(), 1.0)
    assert run.stages()[second] == "missing"
    assert "no telemetry came in time" in run.state.clients[second].reason
    (third,) = run.in_stage("asked")
    run.apply(Tick(), 5.0)
    run.send(third)
    task = run.state.clients[third].task
    assert task is not None
    assert task.deadline_s == 100.0
    run.apply(Tick(), 85.0)
    assert (run.stages()[first], run.stages()[third]) == ("missing", "out"), "the first has had 100 seconds"
    assert [action.task_id for action in run.actions if isinstance(action, Withdraw)] == [f"run/r1/{first}/0"]
    run.train(third)
    assert run.state.clients[third].trained == AcceptedUpdate(
        update=run.state.clients[third].trained.update,  # type: ignore[union-attr]
        change=ChangeSize(),
        took_s=85.0,
    )


def test_an_update_that_arrived_in_time_counts_even_if_an_aggregation_takes_long() -> None:
    run = Run(buffered(buffer=1, concurrency=2), deadlines=Deadlines(round_s=100.0, lease_s=1e6))
    first, second = run.in_stage("asked")
    run.send()
    run.train(first)
    run.train(second)
    run.now_s += 200.0
    run.aggregate()
    assert run.stages()[second] == "done"


def test_updates_of_too_old_versions_are_refused() -> None:
    run = Run(buffered(buffer=1, concurrency=2, max_staleness=2), clients=("ada", "bob"))
    run.send()
    late = run.update("bob")
    for _ in range(2):
        run.train("ada")
        run.aggregate()
        run.send()
    assert run.stages()["bob"] == "out", "two versions old"
    run.train("ada")
    run.aggregate()
    client = run.state.clients["bob"]
    assert client.stage == "refused"
    assert client.reason == "its update would be 3 versions old, but asynchronous.max_staleness is 2"
    assert Withdraw(task_id=late.task_id) in run.actions
    run.apply(late)
    (ack,) = acks(run.actions)
    assert ack.status == "refused"
    assert "max_staleness is 2" in ack.reason


def test_a_client_that_was_asked_is_asked_for_the_next_round() -> None:
    run = Run(buffered(buffer=1, concurrency=2), clients=("ada", "bob"))
    run.send("ada")
    run.train("ada")
    run.aggregate()
    assert asked(run.actions) == ["bob", "ada"]
    assert {action.info.round for action in run.actions if isinstance(action, Ask)} == {2}
    run.apply(telemetry(run.context, "bob", 1))
    assert [ack.status for ack in acks(run.actions)] == ["refused"]
    run.send("bob")
    assert run.state.clients["bob"].task is not None
    assert run.state.clients["bob"].task.round == 2


def test_a_task_that_is_not_sent_yet_gets_the_newest_version() -> None:
    run = Run(buffered(buffer=1, concurrency=2), clients=("ada", "bob"))
    run.send("ada")
    run.measure("bob")
    old = prepared(run.context, run.state, "bob")
    run.train("ada")
    run.apply(old)
    run.aggregate()
    assert run.stages()["bob"] == "preparing"
    (request,) = (action for action in run.actions if isinstance(action, TaskRequest))
    assert request.round == 2
    run.apply(prepared(run.context, run.state, "bob"))
    assert run.state.clients["bob"].task is not None
    assert run.state.clients["bob"].task.round == 2


def test_a_restarted_server_keeps_the_versions_of_its_clients() -> None:
    run = Run(buffered(buffer=1, concurrency=2), clients=("ada", "bob"))
    run.send()
    run.train("ada")
    run.aggregate()
    task, waiting = run.state.clients["bob"].task, run.in_stage("asked")
    run.now_s += 500.0
    actions = run.restart()
    assert SendTask(task=task) in actions  # type: ignore[arg-type]
    assert asked(actions) == waiting == ["ada"]
    run.apply(Tick(), 99.0)
    assert run.stages()["bob"] == "out", "its deadline begins again"
    request = find_request(run.train("bob"))
    assert [compute_staleness(request.round, client) for client in request.clients] == [1]


def test_a_server_restarted_while_it_aggregates_sends_the_other_tasks_again() -> None:
    run = Run(buffered(buffer=1, concurrency=2), clients=("ada", "bob"))
    run.send()
    run.train("ada")
    actions = run.restart()
    assert [client.client_id for client in find_request(actions).clients] == ["ada"]
    assert SendTask(task=run.state.clients["bob"].task) in actions  # type: ignore[arg-type]


def test_a_restarted_server_waits_for_clients_that_it_has_not_heard_yet() -> None:
    run = Run(buffered(buffer=2, concurrency=1), deadlines=Deadlines(lease_s=20.0))
    (first,) = run.in_stage("asked")
    run.send()
    run.train(first)
    run.state = replace(run.state, clients={first: run.state.clients[first]})
    run.restart()
    assert not any(isinstance(action, AggregationRequest) for action in run.apply(Tick(), 1.0))
    assert find_request(run.apply(Tick(), 20.0)).clients, "nobody has come back"


def test_after_the_last_round_all_tasks_end() -> None:
    run = Run(buffered(buffer=1, concurrency=2), clients=("ada", "bob"))
    run.context = replace(run.context, config=replace(run.context.config, rounds=1))
    run.send()
    task = run.state.clients["bob"].task
    run.train("ada")
    run.aggregate()
    assert task is not None
    assert Withdraw(task_id=task.task_id) in run.actions
    assert run.state.phase == "deploy"
    assert "bob" not in run.state.clients


def test_bytes_count_in_the_round_in_which_a_client_is_done() -> None:
    run, traffic = Run(buffered(buffer=1, concurrency=3)), Traffic()
    run.send()
    run.train("ada")
    for name in CLIENTS:
        traffic.count(name, "sent", 1000)
    run.train("bob")
    before = run.state
    close = run.aggregate()
    assert [row.bytes_down for row in build_round_record(run.context, close, traffic).clients] == [1000]
    traffic.follow(before, run.state)
    assert run.state.clients["bob"].stage == "done", "its update had arrived meanwhile"
    assert [traffic.of(name) for name in CLIENTS] == [(0, 0), (1000, 0), (1000, 0)]
