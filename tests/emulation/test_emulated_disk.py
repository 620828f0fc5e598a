"""An emulated disk holds what a device's folder with the same limit would hold."""

from dataclasses import replace
from itertools import count

import pytest
from agent.agent_cases import train_task
from hypothesis import given
from hypothesis import strategies as st

from subfleet.agent.actions import Weigh
from subfleet.edge_client.store import AgentStore
from subfleet.emulation.batch.disk import EmulatedDisk
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.disk import needed_bytes
from subfleet.protocol.task import Task
from subfleet.transport.blob_store import BlobStore

PROGRAMS = [bytes([number]) * (100 + 50 * number) for number in range(5)]
WEIGHTS = [b"w" * 40, b"v" * 90]


def make_task(program: bytes, weights: bytes) -> Task:
    task = train_task()
    return train_task(program=replace(task.programs[0], blob=BlobRef.of(program)), weights=BlobRef.of(weights))


@pytest.mark.slow
@given(
    limit_bytes=st.integers(300, 1200),
    drawn=st.lists(st.tuples(st.sampled_from(PROGRAMS), st.sampled_from(WEIGHTS), st.booleans()), max_size=12),
)
def test_it_holds_what_a_real_folder_holds(
    tmp_path_factory: pytest.TempPathFactory, limit_bytes: int, drawn: list[tuple[bytes, bytes, bool]]
) -> None:
    folder, ticks = tmp_path_factory.mktemp("disk"), count(1)
    store, disk = AgentStore(folder, limit_bytes, free_bytes=lambda _: 2**60), EmulatedDisk(limit_bytes)
    store.blobs = BlobStore(store.blob_folder, limit_bytes=lambda: limit_bytes, clock_ns=lambda: next(ticks))
    for program, weights, prunes in drawn:
        task = make_task(program, weights)
        pinned = frozenset(blob.sha256 for blob in task.blobs)
        weighed = store.weigh(Weigh(task=task, pinned=pinned))
        assert disk.weigh(Weigh(task=task, pinned=pinned)) == weighed
        assert disk.measure_budget(pinned) == store.disk_budget_bytes(pinned)
        if needed_bytes(task, weighed.lacking) <= weighed.room_bytes:
            for content in (program, weights):
                assert disk.hold(BlobRef.of(content)) == (BlobRef.of(content).sha256 in weighed.lacking)
                store.blobs.add(content)
        if prunes:
            disk.prune(pinned)
            store.blobs.prune(pinned)
        for content in (*PROGRAMS, *WEIGHTS):
            assert disk.holds(BlobRef.of(content)) == store.blobs.has(BlobRef.of(content))


def test_a_disk_without_a_limit_has_no_budget() -> None:
    disk = EmulatedDisk(None)
    assert disk.measure_budget(frozenset()) is None
