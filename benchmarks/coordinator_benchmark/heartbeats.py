"""The cost of a heartbeat in fleets of different sizes: in the coordinator, in the whole server, and in memory."""

import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from coordinator_benchmark.fleet import make_presence, make_profile
from subfleet.export.requests import AnyRequest
from subfleet.journal.records import RoundRecord
from subfleet.link.device_link import connect_devices
from subfleet.protocol.messages import encode
from subfleet.protocol.topics import Topics
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import FleetMember, LiveState
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.signals import Tick
from subfleet.rounds.state import RunState
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.transport.in_memory import MemoryBroker

__all__ = ["measure_bytes_per_member", "measure_heartbeat_us", "measure_server_heartbeat_us"]

_BEATS, _TRIES = 2000, 7


def _create_fleet(context: RunContext, count: int) -> RunState:
    names = [f"client{number}" for number in range(count)]
    members = {name: FleetMember(session_id=f"{name}-1", heard_s=1.0, noted_s=1.0) for name in names}
    return RunState(
        profiles=PersistentMap({name: make_profile(context, name) for name in names}),
        live=LiveState(members=PersistentMap(members)),
    )


def measure_heartbeat_us(context: RunContext, count: int, *, spoil: bool) -> float:
    """The coordinator's CPU time for one heartbeat in microseconds, the median of several tries.

    Args:
        context: context of a run that waits for more members than there are.
        count: number of members.
        spoil: whether to copy all members with each heartbeat.
    """
    state, _ = step(context, _create_fleet(context, count), Tick(), 1.0)
    beats = [make_presence(f"client{7 * number % count}") for number in range(_BEATS if not spoil else 50)]
    costs_us = []
    for _ in range(_TRIES):
        started_s = time.thread_time()
        for beat in beats:
            state, _ = step(context, state, beat, 2.0)
            if spoil:
                live = replace(state.live, members=PersistentMap({**state.live.members}))
                state = replace(state, live=live)
        costs_us.append(1e6 * (time.thread_time() - started_s) / len(beats))
    return median(costs_us)


def measure_bytes_per_member(context: RunContext, count: int) -> float:
    """Memory of the state per member, profiles included."""
    tracemalloc.start()
    fleet = _create_fleet(context, count)
    fleet_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return fleet_bytes / len(fleet.profiles)


class _Nothing:
    """An exporter that never answers and an observer that ignores all reports."""

    def submit(
        self, request: AnyRequest, *, weights_path: Path | None = None, samples_from: str = ""
    ) -> "Future[Path]":
        """See `Exports`."""
        return Future()

    def say(self, text: str) -> None:
        """See `RunObserver`."""

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver`."""


@contextmanager
def _open_server(config: Run, folder: Path, broker: MemoryBroker) -> Iterator[Server]:
    nothing = _Nothing()
    connect = connect_devices(config.fleet.name, broker.client("server"), clock=lambda: 1.0)
    server = Server(config, connect, nothing, state_folder=folder, exports=nothing, clock=lambda: 1.0)
    server.open()
    try:
        yield server
    finally:
        server.close()


def measure_server_heartbeat_us(config: Run, context: RunContext, count: int, folder: Path) -> float:
    """The whole server's CPU time for one heartbeat in microseconds, including decoding and the journal.

    Args:
        config: configuration of a run that waits for more members than there are.
        context: context of this run.
        count: number of members.
        folder: folder for its state.
    """
    broker, topics = MemoryBroker(clock=lambda: 1.0), Topics()
    names = [f"client{number}" for number in range(count)]
    device = broker.client("devices")
    device.open(())
    with _open_server(config, folder, broker) as server:

        def send(kind: str, name: str, payload: bytes) -> None:
            device.publish(topics.uplink(name, kind), payload)

        for name in names:
            send("presence", name, encode(make_presence(name)))
            send("profile", name, encode(make_profile(context, name)))
            if len(server.state.live.members) % 100 == 0:
                server.step(0.0)
        while len(server.state.profiles) < count:
            server.step(0.0)
        costs_us = []
        for _ in range(_TRIES):
            for number in range(_BEATS):
                name = names[7 * number % count]
                send("presence", name, encode(make_presence(name)))
            # A step takes up to 257 deliveries and one tick, which looks at the whole fleet and is no heartbeat's.
            steps = -(-_BEATS // 257)
            started_s = time.thread_time()
            for _ in range(steps):
                server.step(0.0)
            busy_s = time.thread_time() - started_s
            started_s = time.thread_time()
            for _ in range(steps):
                server.step(0.0)
            costs_us.append(1e6 * (busy_s - (time.thread_time() - started_s)) / _BEATS)
    return median(costs_us)
