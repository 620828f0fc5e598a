"""The witness of the emulator: the same fleet with real sessions, encoded messages, folders and a journal on disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from subfleet import tasks
from subfleet.agent.states import AgentSettings
from subfleet.device.meters import ReplayMeter
from subfleet.device_profiles import ReplayedLog
from subfleet.edge_client.session import Device, EdgeSession
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.emulation.batch.agenda import LogicalClock
from subfleet.emulation.batch.run import prepare_run
from subfleet.emulation.batch.trainers import create_trainers
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun, build_profile
from subfleet.export.pool import ExportPool
from subfleet.journal.records import RoundRecord
from subfleet.link.device_link import connect_devices
from subfleet.protocol.errors import RunError
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.topics import Topics
from subfleet.serving.session import Server
from subfleet.transport.base import Transport
from subfleet.transport.counting import CountingTransport
from subfleet.transport.in_memory import Faults, MemoryBroker

MOST_TURNS = 5000


@dataclass(frozen=True, kw_only=True)
class MessageResult:
    rounds: tuple[RoundRecord, ...]
    model: bytes
    logical_seconds: float


class SteppedDevice:
    """A real session that acts when the test says so."""

    def __init__(
        self, client: EmulatedDevice, trainer: Trainer, link: Transport, folder: Path, clock: LogicalClock
    ) -> None:
        store = AgentStore(folder, client.profile.disk_limit_bytes, free_bytes=lambda _: 2**60)
        store.work_folder.mkdir()
        data, held_out = folder.with_suffix(".npz"), folder.with_suffix(".held-out.npz")
        tasks.write_npz(data, client.data)
        if client.test is not None:
            tasks.write_npz(held_out, client.test)
        self.worker = TrainingWorker(
            {trainer.target: trainer},
            blobs=store.blobs,
            work_folder=store.work_folder,
            data=str(data),
            held_out=None if client.test is None else str(held_out),
            threads=client.profile.threads,
        )
        meter = ReplayMeter(ReplayedLog(client.log, client.log_start))
        data_bytes = max(part.summary().data_bytes for part in (client.data, client.test) if part is not None)
        streams = client.data.transform is not None
        settings = AgentSettings(profile=build_profile(client), data_bytes=data_bytes, streams=streams)
        device = Device(store=store, worker=self.worker, meter=meter)
        self.session = EdgeSession(settings, link, Topics(), device, clock=clock)
        self.session.open()

    def step(self) -> None:
        self.session.turn(0.0)
        self.worker.join(60.0)


def play_messages(
    gathered: GatheredRun,
    exports: ExportPool,
    folder: Path,
    *,
    faults: Faults | None = None,
    trainers: Mapping[str, Trainer] | None = None,
) -> MessageResult:
    """Play a fleet turn by turn; while nothing moves, the clock advances in growing steps."""
    clock, notes, step_s = LogicalClock(), _Notes(), 0.001
    broker = MemoryBroker(faults, clock=clock)
    link = CountingTransport(broker.client("server"))
    evaluation = folder / "evaluation.npz"
    tasks.write_npz(evaluation, gathered.evaluation)
    shared = create_trainers({client.runtime for client in gathered.devices})
    server = Server(
        prepare_run(gathered, evaluation),
        connect_devices("main", link, clock=clock),
        notes,
        state_folder=folder / "server",
        exports=exports,
        samples=gathered.evaluation,
        clock=clock,
    )
    devices = [
        SteppedDevice(
            client,
            (trainers or {}).get(client.client_id, shared[client.runtime]),
            broker.client(client.client_id),
            folder / client.client_id,
            clock,
        )
        for client in gathered.devices
    ]
    server.open()
    try:
        for _ in range(MOST_TURNS):
            if server.finished:
                break
            before = link.sent_bytes + link.received_bytes
            for device in devices:
                device.step()
            server.finish()
            server.step(0.0)
            moved = link.sent_bytes + link.received_bytes != before
            step_s = 0.001 if moved else min(2 * step_s, 1.0)
            clock.advance(clock() + step_s)
        if server.state.phase == "failed":
            raise RunError(server.state.failure)
        path = server.result().model_path
        assert server.finished, f"it hangs in {server.state.phase} of round {server.state.round}"
        assert path is not None
        return MessageResult(rounds=tuple(notes.rounds), model=path.read_bytes(), logical_seconds=clock())
    finally:
        server.close()


class _Notes:
    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []

    def say(self, text: str) -> None:
        """Ignored."""

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record.without_measurements())
