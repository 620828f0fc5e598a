"""The agent of an emulated device: what it fetches, refuses and stops, and when."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from agent.agent_cases import RESULT, announce, profile, train_task

from subfleet.agent.states import AgentSettings
from subfleet.device.meters import ReplayMeter
from subfleet.device.timing import ReplayedTiming
from subfleet.device_profiles import LogRow, ReplayedLog, ResourceLog
from subfleet.edge_client.task_work import TrainingOutput
from subfleet.emulation.batch.agenda import Agenda, LogicalClock
from subfleet.emulation.batch.agents import EmulatedAgent
from subfleet.emulation.batch.disk import EmulatedDisk
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.messages import Ack, Message, Refusal, Task, Telemetry, Update
from subfleet.protocol.readings import Reading
from subfleet.transport.blob_store import BlobStore


class NoWork:
    """Work that only notes that it was done, and writes a small output."""

    def __init__(self, folder: Path) -> None:
        self.done: list[str] = []
        self._folder = folder

    def expect(self, task: Task) -> None:
        pass

    def begin(self, task: Task, memory_limit_bytes: int) -> Callable[[], TrainingOutput]:
        def finish() -> TrainingOutput:
            self.done.append(task.task_id)
            path = self._folder / "output"
            path.write_bytes(task.task_id.encode())
            return TrainingOutput(task_id=task.task_id, result=RESULT, output_path=path)

        return finish


class Device:
    """An agent with a link of 8 kB a second and a pace of one multiplication a second."""

    def __init__(self, folder: Path, *, macs: int) -> None:
        reading = Reading(memory_free_bytes=10**9, downlink_bps=64_000.0, uplink_bps=64_000.0)
        rows = (LogRow(t_s=0.0, reading=reading),)
        log = ReplayedLog(ResourceLog(device="virtual", source="a test", licence="none", rows=rows))
        timing = ReplayedTiming(log=log, macs_per_s=1.0, sample_count=1, held_out_count=0)
        self._macs = macs
        self.clock, self.agenda, self.work = LogicalClock(), Agenda(), NoWork(folder)
        self.blobs, self.said, self.fetched_bytes = BlobStore(folder / "blobs"), list[Message](), list[int]()
        self.agent = EmulatedAgent(
            settings=AgentSettings(profile=profile(), heartbeat_s=1e9, telemetry_s=1e9),
            work=self.work,
            disk=EmulatedDisk(None),
            meter=ReplayMeter(log),
            timing=timing,
            blobs=self.blobs,
            clock=self.clock,
            agenda=self.agenda,
            say=self.said.append,
            count=self.fetched_bytes.append,
        )
        self.agent.join()

    def wait(self, until_s: float) -> None:
        while self.agenda.next_s <= until_s:
            self.clock.advance(self.agenda.next_s)
            self.agenda.run(self.clock())
        self.clock.advance(until_s)

    def make_task(self, name: str = "t1", number: int = 1, **changes: object) -> Task:
        task = train_task(name, number)
        program = self.blobs.add(bytes(16_000))
        weights = self.blobs.add(bytes(8_000) + name.encode())
        return replace(
            train_task(
                name, number, program=replace(task.programs[0], blob=program), weights=weights, forward_macs=self._macs
            ),
            **changes,  # type: ignore[arg-type]
        )

    def find(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.said if isinstance(message, kind)]


def test_blobs_come_one_after_the_other_and_work_begins_after_them(tmp_path: Path) -> None:
    device = Device(tmp_path, macs=1)
    device.agent.receive(announce())
    (telemetry,) = device.find(Telemetry)
    assert cast("Telemetry", telemetry).reading.downlink_bps == 64_000.0
    device.agent.receive(device.make_task(deadline_s=60.0))
    device.wait(2.9)
    assert (device.fetched_bytes, device.work.done) == ([16_000], [])
    device.wait(3.1)
    assert sum(device.fetched_bytes) == pytest.approx(24_000, abs=10)
    passes = 3
    device.wait(3.1 + passes)
    assert device.work.done == ["t1"]
    (update,) = (cast("Update", said) for said in device.find(Update))
    assert update.train_seconds == 3.0
    assert update.seconds == pytest.approx(6.0, abs=0.01)


def test_a_known_program_is_not_fetched_again(tmp_path: Path) -> None:
    device = Device(tmp_path, macs=0)
    for number in (1, 2):
        device.agent.receive(announce(number))
        task = device.make_task(f"t{number}", number)
        device.agent.receive(task)
        device.wait(device.clock() + 10.0)
        (update,) = device.find(Update)
        device.agent.receive(Ack(of=cast("Update", update).message_id, status="accepted"))
        device.said.clear()
    assert device.fetched_bytes == [16_000, 8_002, 8_002]


def test_a_task_that_the_link_cannot_bring_in_time_is_refused_at_once(tmp_path: Path) -> None:
    device = Device(tmp_path, macs=1)
    device.agent.receive(announce())
    device.agent.receive(device.make_task(deadline_s=2.0))
    (refusal,) = device.find(Refusal)
    assert cast("Refusal", refusal).reason == "link"
    assert "fetching" in cast("Refusal", refusal).detail


def test_a_task_of_a_round_that_is_over_is_not_trained(tmp_path: Path) -> None:
    device = Device(tmp_path, macs=100)
    device.agent.receive(announce())
    device.agent.receive(device.make_task(deadline_s=1000.0))
    device.wait(10.0)
    device.agent.receive(announce(2))
    device.wait(1000.0)
    assert device.work.done == [], "nobody needs it, so it costs nothing"
    assert len(device.find(Telemetry)) == 2


def test_a_log_goes_on_from_the_time_at_which_its_device_was_asked(tmp_path: Path) -> None:
    device = Device(tmp_path, macs=1)
    device.agent.catch_up(None, announce(1, "train", log_time_s=500.0, asynchronous=True), 500.0)
    device.agent.receive(announce(1, log_time_s=60.0, asynchronous=True))
    assert len(device.find(Telemetry)) == 1
    device.wait(10.0)
    closed = announce(2, "train", log_time_s=900.0, asynchronous=True)
    device.agent.catch_up(None, closed, 890.0)
    assert device.agent.log_time_s == 70.0, "it has slept while a buffer was closed"
    device.agent.receive(device.make_task(deadline_s=1000.0))
    device.agent.receive(announce(3, "train", log_time_s=1500.0, asynchronous=True))
    device.wait(100.0)
    assert (device.agent.log_time_s, device.work.done) == (160.0, ["t1"])


def test_a_fetch_that_is_given_up_frees_the_link(tmp_path: Path) -> None:
    device = Device(tmp_path, macs=1)
    device.agent.receive(announce())
    device.agent.receive(device.make_task(deadline_s=1000.0))
    device.wait(0.5)
    device.agent.receive(announce(2))
    device.agent.receive(device.make_task("t2", 2, deadline_s=1000.0))
    device.wait(0.5 + 2.9)
    assert device.work.done == []
    device.wait(0.5 + 3.1 + 3)
    assert device.work.done == ["t2"], "both blobs take 3 s from when they were asked for"


def test_a_blob_that_the_server_has_lost_is_a_refusal(tmp_path: Path) -> None:
    device = Device(tmp_path, macs=1)
    device.agent.receive(announce())
    task = device.make_task()
    device.blobs.prune(set())
    device.agent.receive(task)
    device.wait(10.0)
    (refusal,) = device.find(Refusal)
    assert cast("Refusal", refusal).reason == "program"
    assert BlobRef.of(bytes(16_000)).sha256 == task.programs[0].blob.sha256
