"""A task that is too large for a device's disk or link is refused by its sizes, before any blob is fetched."""

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent.agent_cases import (
    announce,
    blob,
    connected_agent,
    deploy_task,
    find_action,
    kinds,
    score_task,
    train_task,
    with_submodel,
)
from edge_client.fleet_rig import PROGRAM, WEIGHTS, Rig

from subfleet.agent.actions import Keep, Prune, Weigh
from subfleet.agent.events import Weighed
from subfleet.agent.weighing import HEADER_BYTES, find_objection
from subfleet.edge_client.store import STATE_BYTES, AgentStore
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.disk import needed_bytes
from subfleet.protocol.messages import ChunkRequest, Refusal, Task, Telemetry
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget, Reading
from subfleet.protocol.update_codecs import Qsgd

KIB = 1024
_Usage = namedtuple("_Usage", "total used free")


def resize_blob(text: str, size_bytes: int) -> BlobRef:
    return replace(blob(text), size_bytes=size_bytes)


def program(size_bytes: int) -> ProgramRef:
    return replace(train_task().programs[0], blob=resize_blob("program", size_bytes))


def large_task(program_bytes: int = 300, weight_bytes: int = 100, **changes: Any) -> Task:
    return train_task(program=program(program_bytes), weights=resize_blob("weights", weight_bytes), **changes)


def weigh(task: Task, room_bytes: int, *present: str) -> Weighed:
    lacking = frozenset(ref.sha256 for ref in task.blobs) - {blob(text).sha256 for text in present}
    return Weighed(task_id=task.task_id, lacking=lacking, room_bytes=room_bytes)


def test_a_task_needs_its_missing_blobs_and_twice_its_update() -> None:
    task = large_task()
    assert needed_bytes(task, weigh(task, 0).lacking) == 300 + 3 * 100
    assert needed_bytes(task, weigh(task, 0, "program").lacking) == 3 * 100
    models = deploy_task()
    assert needed_bytes(models, weigh(models, 0).lacking) == 2 * sum(
        program.blob.size_bytes for program in models.programs
    )
    assert needed_bytes(score_task(), frozenset()) == 0


@pytest.mark.parametrize(
    ("room_bytes", "present", "fits"),
    [(600, (), True), (599, (), False), (300, ("program",), True), (299, ("program",), False)],
)
def test_a_task_fits_the_disk_or_is_refused_for_it(room_bytes: int, present: tuple[str, ...], fits: bool) -> None:
    task = large_task()
    objection = find_objection(task, weigh(task, room_bytes, *present), None, 60.0)
    if fits:
        assert objection is None
        return
    assert objection is not None
    assert (objection.reason, objection.available_bytes) == ("disk", room_bytes)
    assert objection.detail.startswith(f"the task takes {300 if present else 600} bytes of disk")


@pytest.mark.parametrize(
    ("budget", "changes", "words"),
    [
        (Budget(memory_bytes=1), {}, ""),
        (Budget(memory_bytes=1, downlink_bytes=HEADER_BYTES), {}, ""),
        (
            Budget(memory_bytes=1, downlink_bytes=HEADER_BYTES - 1),
            {},
            "but the device's downlink budget is 1048575 bytes",
        ),
        (Budget(memory_bytes=1, uplink_bytes=HEADER_BYTES - 1), {}, "but the device's uplink budget is 1048575 bytes"),
        (Budget(memory_bytes=1, uplink_bytes=HEADER_BYTES - 1), {"update_codec": Qsgd()}, ""),
    ],
)
def test_weights_and_update_are_checked_against_the_promised_budget(
    budget: Budget, changes: dict[str, Any], words: str
) -> None:
    task = large_task(weight_bytes=2 * HEADER_BYTES, budget=budget, **changes)
    objection = find_objection(task, weigh(task, 10**9), None, 60.0)
    assert (objection.detail if objection is not None else "").endswith(words)
    assert (objection is None) == (not words)
    assert objection is None or objection.reason == "link"


@pytest.mark.parametrize(
    ("downlink_bps", "present", "slow"),
    [(None, (), False), (40_000.0, (), False), (39_000.0, (), True), (20_000.0, ("program",), False), (0.0, (), True)],
)
def test_a_task_that_cannot_be_fetched_in_time_is_refused(
    downlink_bps: float | None, present: tuple[str, ...], slow: bool
) -> None:
    """300,000 bytes in a minute are 40 kbit/s; a link without a signal counts as the slowest."""
    task = large_task(program_bytes=250_000, weight_bytes=50_000)
    objection = find_objection(task, weigh(task, 10**9, *present), Reading(downlink_bps=downlink_bps), 60.0)
    assert (objection is not None) == slow
    assert objection is None or (objection.reason == "link" and "fetching 300000 bytes takes" in objection.detail)


def test_a_refused_task_is_not_fetched_and_the_next_one_is() -> None:
    agent = connected_agent(room_bytes=100)
    agent.hear(announce(1, "train"))
    actions = agent.hear(large_task())
    refusal = find_action(actions, Keep).message
    assert (refusal.reason, refusal.available_bytes) == ("disk", 100)
    assert "Fetch" not in kinds(actions)
    assert kinds(agent.hear(train_task("t2"))).count("Fetch") == 2


def test_the_link_is_that_of_the_last_reading() -> None:
    agent = connected_agent(downlink_bps=16_000.0)
    agent.hear(announce(1))
    agent.hear(announce(1, "train"))
    actions = agent.hear(large_task(program_bytes=10**6))
    assert find_action(actions, Keep).message.reason == "link"


# --- with a disk ---


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _weigh(store: AgentStore, task: Task) -> Weighed:
    return store.weigh(Weigh(task=task, pinned=frozenset(ref.sha256 for ref in task.blobs)))


def test_the_least_recently_used_programs_are_removed_for_a_task(tmp_path: Path) -> None:
    store = AgentStore(tmp_path, disk_limit_bytes=1000)
    old, newer = store.blobs.add(b"o" * 300), store.blobs.add(b"n" * 300)
    store.blobs.path(old)
    task = train_task(
        program=replace(train_task().programs[0], blob=BlobRef.of(b"p" * 100)), weights=BlobRef.of(b"w" * 150)
    )
    assert _weigh(store, task).room_bytes == 1000
    assert [store.blobs.has(ref) for ref in (old, newer)] == [True, False]
    assert _weigh(store, large_task(program_bytes=2000)).room_bytes == 1000
    assert store.blobs.has(old), "a refused task removes nothing"


def test_a_task_that_is_too_large_by_a_byte_removes_nothing(tmp_path: Path) -> None:
    store = AgentStore(tmp_path, disk_limit_bytes=600)
    old = store.blobs.add(b"o" * 300)
    for program_bytes, stays in ((301, True), (300, False)):  # in addition to 300 bytes of weights and updates
        assert _weigh(store, large_task(program_bytes=program_bytes)).room_bytes == 600
        assert store.blobs.has(old) == stays


def test_models_and_the_rest_of_the_folder_count(tmp_path: Path) -> None:
    store = AgentStore(tmp_path, disk_limit_bytes=1000)
    (tmp_path / "models" / "run").mkdir(parents=True)
    (tmp_path / "models" / "run" / "model.onnx").write_bytes(bytes(400))
    assert _weigh(store, train_task()).room_bytes == 600


def test_no_more_than_half_of_the_free_disk_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AgentStore(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10**9, 0, 5000))
    assert _weigh(store, train_task()).room_bytes == 2500


@pytest.mark.parametrize("more_bytes", [0, STATE_BYTES + 1])
def test_a_task_may_need_the_disk_budget_that_the_device_reported(tmp_path: Path, more_bytes: int) -> None:
    """The device reserves space for the growth of its state file; a task that needs more is refused."""
    rig = Rig(tmp_path, disk_limit_bytes=2 * 2**20)
    rig.server.announce(announce())
    rig.until(lambda: bool(rig.server.of(Telemetry)))
    telemetry = rig.server.of(Telemetry)[0]
    assert isinstance(telemetry, Telemetry)
    assert telemetry.disk_budget_bytes is not None
    assert telemetry.disk_budget_bytes == 2 * 2**20 - _folder_bytes(tmp_path / "device") - STATE_BYTES
    rig.server.announce(announce(1, "train"))
    task = rig.server.train_task()
    program = rig.server.blobs.add(bytes(telemetry.disk_budget_bytes + more_bytes - 3 * task.weights[0].size_bytes))
    task = with_submodel(task, program=replace(train_task().programs[0], blob=program))
    assert needed_bytes(task) == telemetry.disk_budget_bytes + more_bytes
    rig.server.assign(task)
    rig.until(lambda: bool(rig.server.of(Refusal)) or "t1" in rig.server.updates)
    assert [message.reason for message in rig.server.of(Refusal)[:1]] == (["disk"] if more_bytes else [])  # type: ignore[union-attr]  # of() filtered them


def test_an_update_that_finds_no_room_is_a_refusal_for_the_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.trainer.gate.clear()
    rig.server.announce(announce(1, "train"))
    rig.server.assign(rig.server.train_task())
    rig.until(lambda: bool(rig.trainer.jobs))
    (tmp_path / "device" / "other").write_bytes(b"what somebody else put there")
    rig.free_bytes = KIB
    rig.trainer.gate.set()
    rig.until(lambda: bool(rig.server.of(Refusal)))
    refusal = rig.server.of(Refusal)[0]
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "disk"


def test_100_gb_are_refused_before_a_byte_is_requested(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.server.announce(announce(1, "train"))
    honest = rig.server.train_task()
    huge = replace(train_task().programs[0], blob=resize_blob("huge", 100 * 10**9))
    rig.server.assign(with_submodel(honest, program=huge))
    rig.until(lambda: bool(rig.server.of(Refusal)))
    (refusal,) = {message for message in rig.server.of(Refusal) if isinstance(message, Refusal)}
    assert refusal.reason == "disk"
    assert refusal.detail.startswith("the task takes 100000")
    assert rig.server.of(ChunkRequest) == []
    assert _folder_bytes(tmp_path / "device" / "blobs") == 0
    rig.server.assign(rig.server.train_task("t2"))
    rig.until(lambda: "t2" in rig.server.updates)


@pytest.mark.slow
def test_the_folder_keeps_within_its_limit_whatever_comes(tmp_path: Path) -> None:
    """Each round has another program; the server acknowledges no updates, so that they must stay."""
    limit_bytes = len(PROGRAM) + 5 * len(WEIGHTS) + 64 * KIB  # two updates wait during the fourth task
    rig = Rig(tmp_path, disk_limit_bytes=limit_bytes)
    programs = []
    for number in (1, 2, 3, 4):
        rig.server.hold = {"update"} if number > 1 else set()
        rig.server.announce(announce(number, "train"))
        task = rig.server.train_task(f"t{number}", number)
        content = PROGRAM + str(number).encode()
        programs.append(rig.server.blobs.add(content))
        rig.server.assign(with_submodel(task, program=replace(train_task().programs[0], blob=programs[-1])))
        rig.until(lambda name=f"t{number}": name in rig.server.updates)  # type: ignore[misc]  # a default binds the name
        assert _folder_bytes(tmp_path / "device") <= limit_bytes
        update_blobs = {update.blob for update in rig.store.load().updates}
        assert len(update_blobs) >= number - 1
        assert all(rig.store.blobs.has(ref) for ref in update_blobs)
    assert not rig.store.blobs.has(programs[0])
    assert rig.store.blobs.has(programs[-1])


def test_pruning_keeps_an_update_without_an_ack() -> None:
    agent = connected_agent()
    task = train_task()
    agent.train(task)
    agent.finish(task)
    actions = agent.hear(announce(2, "train")) + agent.hear(train_task("t2", 2))
    assert blob("update t1").sha256 in find_action(actions, Weigh).pinned
    assert not any(isinstance(action, Prune) and blob("update t1").sha256 not in action.keep for action in actions)
