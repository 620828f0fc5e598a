"""The session with a scripted server: rounds, refusals, power cuts in every phase, bad links and late acks."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from agent.agent_cases import announce
from edge_client.fleet_rig import PROGRAM, WEIGHTS, Rig, fake_update
from matrices import mostly_long

from subfleet.protocol.errors import (
    DataError,
    DivergedError,
    FileError,
    LoadError,
    MemoryLimitError,
    NoRoomError,
    ProtocolError,
    TrainingError,
)
from subfleet.protocol.messages import Ack, Deployed, Presence, Profile, Refusal, Telemetry, Update, encode
from subfleet.transport.in_memory import Faults


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def read_update(rig: Rig, name: str = "t1") -> bytes:
    return rig.server.blobs.path(rig.server.updates[name].blob).read_bytes()


def is_settled(rig: Rig) -> bool:
    return not rig.store.load().answers


def test_a_whole_round(rig: Rig) -> None:
    rig.play_round()
    assert read_update(rig) == fake_update(PROGRAM, WEIGHTS + b"t1")
    rig.until(lambda: is_settled(rig))
    assert {type(message) for message in rig.server.heard} >= {Presence, Profile, Telemetry, Ack, Update}
    job = rig.trainer.jobs[0]
    assert (job.data, job.client_id, job.round, job.memory_limit_bytes) == ("d", "pi", 1, 1000)
    assert rig.meter.log_times.count(10.0) >= 2  # for the round and before the training


def test_programs_are_kept_and_weights_and_updates_are_not(rig: Rig) -> None:
    rig.play_round()
    rig.until(lambda: is_settled(rig))
    blob_names = {path.name for path in (rig.folder / "device" / "blobs").iterdir() if path.is_file()}
    task = rig.server.task
    assert task is not None
    assert blob_names == {task.programs[0].blob.sha256}
    message_count = len(rig.server.heard)
    rig.play_round(2, "t2")
    later_requests = [message for message in rig.server.heard[message_count:] if message.KIND == "request"]
    assert {message.blob.sha256 for message in later_requests} == {rig.server.train_task("t2", 2).weights[0].sha256}  # type: ignore[union-attr]  # requests
    assert not list(rig.store.work_folder.iterdir())


def test_a_submodel_that_does_not_fit_any_more_is_refused_for_memory(rig: Rig) -> None:
    rig.server.announce(announce(1, "train"))
    rig.meter.free_bytes = 1280
    rig.server.assign(rig.server.train_task())
    rig.until(lambda: bool(rig.server.of(Refusal)))
    (refusal,) = {message for message in rig.server.of(Refusal) if isinstance(message, Refusal)}
    assert (refusal.reason, refusal.available_bytes) == ("memory", 400)
    assert rig.trainer.jobs == []


def test_a_program_that_was_damaged_on_disk_is_fetched_anew(rig: Rig) -> None:
    rig.play_round()
    task = rig.server.task
    assert task is not None
    program = rig.folder / "device" / "blobs" / task.programs[0].blob.sha256
    program.write_bytes(bytes(len(PROGRAM)))
    rig.play_round(2, "t2")
    assert read_update(rig, "t2") == fake_update(PROGRAM, WEIGHTS + b"t2")
    assert program.read_bytes() == PROGRAM


def test_a_missing_blob_folder_fails_tasks_and_not_the_agent(rig: Rig) -> None:
    rig.play_round()
    shutil.rmtree(rig.folder / "device" / "blobs")
    rig.server.announce(announce(2, "train"))
    rig.server.assign(rig.server.train_task("t2", 2))
    rig.until(lambda: bool(rig.server.of(Refusal)))
    rig.until(lambda: is_settled(rig))
    (refusal,) = {message for message in rig.server.of(Refusal) if isinstance(message, Refusal)}
    assert (refusal.task_id, refusal.reason) == ("t2", "disk")


def test_the_memory_of_samples_is_deducted_before_the_fraction_for_training(rig: Rig) -> None:
    rig.meter.free_bytes = 480
    rig.server.announce(announce())
    rig.until(lambda: bool(rig.server.of(Telemetry)))
    assert {telemetry.memory_budget_bytes for telemetry in rig.server.of(Telemetry)} == {0}  # type: ignore[union-attr]  # of() filtered them


def test_a_device_offers_at_most_its_memory_limit(rig: Rig) -> None:
    rig.kill()
    rig.max_training_bytes = 450
    rig.start()
    rig.server.announce(announce())
    rig.until(lambda: bool(rig.server.of(Telemetry)))
    assert {telemetry.memory_budget_bytes for telemetry in rig.server.of(Telemetry)} == {450}  # type: ignore[union-attr]  # of() filtered them
    rig.server.announce(announce(1, "train"))
    rig.server.assign(rig.server.train_task())
    rig.until(lambda: bool(rig.server.of(Refusal)))
    (refusal,) = {message for message in rig.server.of(Refusal) if isinstance(message, Refusal)}
    assert (refusal.reason, refusal.available_bytes) == ("memory", 450)


@pytest.mark.parametrize(
    ("error", "reason", "available_bytes"),
    [
        (
            MemoryLimitError(needed_bytes=2000, limit_bytes=1000),
            "memory",
            250,
        ),  # 500 are planned, and it needs 4 times as much
        (MemoryError(), "memory", 250),
        (DataError("the data are gone"), "data", None),
        (ProtocolError("no program"), "program", None),
        (NoRoomError("the disk is full"), "disk", None),
        (FileError("the program cannot be read"), "program", None),
        (LoadError("the runtime lacks an operator"), "runtime", None),
        (DivergedError("the loss was nan in step 2"), "diverged", None),
        (TrainingError("the runtime gave up"), "failed", None),
        (ZeroDivisionError("a defect"), "failed", None),
    ],
)
def test_whatever_ends_a_training_becomes_a_refusal(
    rig: Rig, error: Exception, reason: str, available_bytes: int | None
) -> None:
    rig.trainer.error = error
    rig.server.announce(announce(1, "train"))
    rig.server.assign(rig.server.train_task())
    rig.until(lambda: bool(rig.server.of(Refusal)))
    refusal = rig.server.of(Refusal)[0]
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.available_bytes) == (reason, available_bytes)


@pytest.mark.slow
def test_heartbeats_go_on_while_it_trains(rig: Rig) -> None:
    rig.trainer.gate.clear()
    rig.server.announce(announce(1, "train"))
    rig.server.assign(rig.server.train_task())
    rig.until(lambda: bool(rig.trainer.jobs))
    before = len(rig.server.of(Presence))
    rig.until(lambda: len(rig.server.of(Presence)) >= before + 3)
    rig.trainer.gate.set()
    rig.until(lambda: "t1" in rig.server.updates)


def after_telemetry(rig: Rig) -> None:
    rig.server.announce(announce(1))
    rig.until(lambda: bool(rig.server.of(Telemetry)))


def after_the_task_came(rig: Rig) -> None:
    after_telemetry(rig)
    rig.server.announce(announce(1, "train"))
    rig.server.assign(rig.server.train_task())
    rig.until(lambda: rig.store.load().task is not None)


def in_the_middle_of_a_transfer(rig: Rig) -> None:
    after_the_task_came(rig)
    # One turn transfers fewer chunks than the program has.
    rig.session.turn(0)
    rig.server.turn()
    assert list((rig.folder / "device" / "blobs").rglob("*.part"))


def while_it_trains(rig: Rig) -> None:
    rig.trainer.gate.clear()
    after_the_task_came(rig)
    rig.until(lambda: bool(rig.trainer.jobs))


def before_the_ack(rig: Rig) -> None:
    rig.server.hold = {Update.KIND}
    after_the_task_came(rig)
    rig.until(lambda: bool(rig.store.load().updates))


def after_the_server_stored_it(rig: Rig) -> None:
    before_the_ack(rig)
    rig.until(lambda: "t1" in rig.server.updates)


@pytest.mark.parametrize(
    ("phase", "trainings"),
    [
        (after_telemetry, 1),
        (after_the_task_came, 1),
        (in_the_middle_of_a_transfer, 1),
        (while_it_trains, 2),
        (before_the_ack, 1),
        (after_the_server_stored_it, 1),
    ],
)
def test_a_power_cut_in_any_phase_costs_time_and_no_result(
    rig: Rig, phase: Callable[[Rig], None], trainings: int
) -> None:
    phase(rig)
    rig.kill()
    rig.server.hold = set()
    rig.trainer.gate.set()
    rig.start()
    if rig.server.task is None:
        rig.play_round()
    rig.until(lambda: "t1" in rig.server.updates)
    rig.until(lambda: is_settled(rig))
    assert read_update(rig) == fake_update(PROGRAM, WEIGHTS + b"t1")
    assert len(rig.trainer.jobs) == trainings


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_long(range(5), 0, 2, 4))
def test_rounds_come_to_an_end_over_a_link_that_loses_doubles_and_reorders(tmp_path: Path, seed: int) -> None:
    rig = Rig(tmp_path, Faults(seed=seed, loss=0.2, double=0.2, delay_s=0.4))
    for number in (1, 2):
        rig.play_round(number, f"t{number}")
        assert read_update(rig, f"t{number}") == fake_update(PROGRAM, WEIGHTS + f"t{number}".encode())
    rig.until(lambda: is_settled(rig))
    assert len(rig.trainer.jobs) == 2


def test_transfers_continue_after_a_broken_link(rig: Rig) -> None:
    rig.server.announce(announce(1, "train"))
    rig.server.assign(rig.server.train_task())
    for _ in range(4):
        rig.turn()
        before = len(rig.server.of(Profile))
        rig.broker.cut("pi", mend_after_s=0.2)
        rig.until(lambda before=before: len(rig.server.of(Profile)) > before)  # type: ignore[misc]  # the loop's own value
    rig.until(lambda: "t1" in rig.server.updates)
    assert len(rig.trainer.jobs) == 1


@pytest.mark.slow
def test_a_late_ack_ends_the_resending(rig: Rig) -> None:
    rig.server.hold = {Update.KIND}
    rig.play_round()
    before = len(rig.server.of(Update))
    rig.until(lambda: len(rig.server.of(Update)) >= before + 2)
    rig.server.announce(announce(2))  # the update of round 1 is still kept
    rig.until(lambda: len(rig.server.of(Update)) >= before + 3)
    rig.server.hold = set()
    rig.until(lambda: is_settled(rig))
    assert len(rig.server.updates) == 1


def test_models_are_placed_and_the_session_leaves(rig: Rig) -> None:
    rig.kill()
    rig.start(leave_when_finished=True)
    rig.play_round()
    rig.server.assign(rig.server.deploy_task())
    rig.until(lambda: bool(rig.server.of(Deployed)))
    folder = rig.folder / "device" / "models" / "run"
    assert (folder / "model.onnx").read_bytes() == b"model onnx"
    assert (folder / "model.pte").read_bytes() == b"model executorch"
    deployed = rig.server.of(Deployed)[0]
    assert isinstance(deployed, Deployed)
    assert deployed.files == ("models/run/model.onnx", "models/run/model.pte")
    rig.server.announce(announce(1, "finished"))
    rig.until(lambda: rig.session.left)
    rig.session.close()
    rig.server.turn()
    assert goodbyes(rig) == [(False, ""), (False, "the run is finished")]


def test_a_stopped_session_sends_a_plain_goodbye_and_then_its_reason(rig: Rig) -> None:
    rig.until(lambda: bool(rig.server.of(Presence)))
    rig.session.close()
    rig.server.turn()
    assert goodbyes(rig) == [(False, ""), (False, "it was stopped")]


def goodbyes(rig: Rig) -> list[tuple[bool, str]]:
    last = [message for message in rig.server.of(Presence)[-2:] if isinstance(message, Presence)]
    return [(message.online, message.reason) for message in last]


def test_strange_messages_are_dropped_and_the_session_goes_on(rig: Rig) -> None:
    stranger = rig.broker.client("stranger")
    stranger.open(())
    for topic in ("all/round", "down/pi/task", "down/pi/chunk", "down/pi/ack", "down/pi/x/y", "down/pi/none"):
        for payload in (b"", b"{", b"\xff" * 60, b'{"schema":3,"kind":"task"}'):
            stranger.publish(f"subfleet/1/main/{topic}", payload)
    rig.play_round()
    assert len(rig.trainer.jobs) == 1


def test_a_refused_architecture_is_logged_once_for_each_problem(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    other = rig.broker.client("other")
    other.open(())
    rig.turn()
    first = Ack(of="profile.s1", status="refused", reason="none", message_id="r", problem="not_in_space")
    second = replace(first, reason="no such axis", problem="unknown_axis")
    for answer in (first, first, second):
        other.publish("subfleet/1/main/down/pi/ack", encode(answer))
        rig.turn()
    warnings = [record.getMessage() for record in caplog.records if "architecture" in record.getMessage()]
    assert warnings == [
        "the declared architecture is refused (not_in_space): none",
        "the declared architecture is refused (unknown_axis): no such axis",
    ]
