"""Runs a virtual fleet: server and clients in turns, in one process, under a clock that stands while they work.

Everything is what a real fleet runs: the server's session, the agents' sessions, the trainers' programs. Only the
transport is in memory, the clock is logical, and the clients share loaded programs. Nothing waits: where nothing moves,
the clock goes on, ever faster, to the next time at which somebody acts.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from subfleet import tasks
from subfleet.agent.states import AgentSettings
from subfleet.device.meters import ReplayMeter
from subfleet.device_profiles import ReplayedLog
from subfleet.edge_client.session import Device, EdgeSession
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.emulation.batch.attacking import AttackingTrainer
from subfleet.emulation.batch.exports import LazyExports
from subfleet.emulation.batch.hosting import create_trainers
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun, build_profile
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.guarding import GuardedObserver, Unobserved
from subfleet.journal.records import Progress, RoundRecord, RunObserver, RunResult
from subfleet.methods.aggregator import Participant
from subfleet.protocol.errors import RunError
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.scratch import list_scratch_folders, make_scratch_folder
from subfleet.protocol.topics import Topics
from subfleet.rounds.state import ClientState
from subfleet.serving.deployment import StoppedError
from subfleet.serving.outcome import Outcome, find_owners
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.transport.base import Transport
from subfleet.transport.counting import CountingTransport
from subfleet.transport.in_memory import MemoryBroker

LEAST_STEP_S = 0.001
"""Logical seconds of a turn in which something was sent or came."""
MOST_STEP_S = 1.0
"""The clock never leaps further: a client that is there must be heard of within its lease."""
TRAINING_LIMIT_S = 600.0
"""Real seconds that one training may take."""
_ENDLESS_BYTES = 2**60
_LEAST_ROOM_BYTES = 4 * 2**30  # containers often have 64 MiB there, and a fleet of 50 takes some hundreds


class LogicalClock:
    """Seconds that pass when `advance` says so."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        """Seconds since the start."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a virtual run left behind.

    Attributes:
        rounds: every round, with a row per client. Nobody has measured memory and time: devices share a process, and
            its clock is logical.
        model: the last checkpoint, a safetensors container of the whole model; empty where no round aggregated
            anything.
        supernet: the last checkpoint of a supernet that was searched; empty where there was none.
        trained: by client id, the client with each submodel that it was aggregated with, a round number to each.
        own: by client id, the client with the submodel that is its own in the end, for those that were ever aggregated:
            of a network that has retired it is what the method has in its place.
        turns: how often every party acted.
        logical_seconds: how long the run took by its own clock.
        result: the same in the words of a server; its files are gone.
        outcome: the results that were left, where that was asked for.
    """

    rounds: tuple[RoundRecord, ...]
    model: bytes
    supernet: bytes
    trained: Mapping[str, Mapping[int, Participant]]
    own: Mapping[str, Participant]
    turns: int
    logical_seconds: float
    result: RunResult
    outcome: Outcome | None = None


def run_batch(  # noqa: PLR0913 - what may take the place of a part, beside the run
    gathered: GatheredRun,
    exports: LazyExports,
    *,
    observer: RunObserver | None = None,
    stop: threading.Event | None = None,
    trainers: Mapping[str, Trainer] | None = None,
    links: Mapping[str, Callable[[Transport], Transport]] | None = None,
    leave: Callable[[Server, Path], Outcome] | None = None,
) -> BatchResult:
    """Run a virtual fleet to its end. The same experiment gives the same bits.

    Args:
        gathered: what to run.
        exports: the exporter; several runs may use it one after the other.
        observer: is told what happens; None tells nobody.
        stop: set it to end the run early.
        trainers: in place of the real one, by client id.
        links: what wraps a client's transport and may change what passes through it, by client id.
        leave: leaves the results of a server while its files are there; it is given the file of the evaluation data.

    Raises:
        RunError: the run failed, or did not end within its turns; the text says where it stood.
        SubfleetError: the configuration or the data cannot be used.
    """
    shared = create_trainers({client.runtime for client in gathered.devices})
    with make_scratch_folder(_choose_scratch_folder()) as folder:
        clock = LogicalClock()
        broker = MemoryBroker(gathered.faults, clock=clock)
        evaluation = folder / "evaluation.npz"
        tasks.write_npz(evaluation, gathered.evaluation)
        link, notes = CountingTransport(broker.client("server")), _Notes(observer or Unobserved())
        state, described = folder / "server", _served(gathered, evaluation)
        server = Server(
            described, link, notes, state_folder=state, exports=exports, clock=clock, samples=gathered.evaluation
        )
        topics = Topics(gathered.run.fleet.name)
        able = {**shared, **(trainers or {})}
        devices = [
            _BatchDevice(one, _choose_trainer(one, able), _make_link(one, broker, links or {}), topics, folder, clock)
            for one in gathered.devices
        ]
        stage = _Stage(
            server=server,
            devices=devices,
            link=link,
            notes=notes,
            clock=clock,
            stop=stop or threading.Event(),
        )
        server.open()
        try:
            turns = stage.play(gathered.run.host.turns_per_round * (gathered.run.total_rounds + 1))
            result = _result(stage, turns)
            return result if leave is None else replace(result, outcome=leave(server, evaluation))
        finally:
            server.close()


def _served(gathered: GatheredRun, evaluation: Path) -> Run:
    """The run as its server is given it: with evaluation data in a file, and as it treats this fleet's outliers."""
    run = gathered.run
    settings = DataSettings(
        test=str(evaluation),
        classes=run.data.classes,
        validation_samples=run.data.validation_samples,
        transform=run.data.transform,
        check=run.data.check,
    )
    attacked = any(client.attack is not None for client in gathered.devices)
    return replace(run, data=settings, outliers=run.outliers.emulated(attacked=attacked))


def _choose_trainer(client: EmulatedDevice, trainers: Mapping[str, Trainer]) -> Trainer:
    """The client's own trainer or its runtime's, as the client uses it."""
    trainer = trainers.get(client.client_id) or trainers[client.runtime]
    return trainer if client.attack is None else AttackingTrainer(trainer, client.attack)


def _make_link(
    client: EmulatedDevice, broker: MemoryBroker, links: Mapping[str, Callable[[Transport], Transport]]
) -> Transport:
    """The client's transport, in whatever wraps it."""
    plain = broker.client(client.client_id)
    wrap = links.get(client.client_id)
    return plain if wrap is None else wrap(plain)


def _choose_scratch_folder() -> Path:
    """Where a run's files lie: in memory where there is room, as nothing of them must outlive the process."""
    in_memory, on_disk = list_scratch_folders()
    roomy = in_memory.is_dir() and shutil.disk_usage(in_memory).free >= _LEAST_ROOM_BYTES
    return in_memory if roomy else on_disk


class _Notes:
    """The server's observer."""

    def __init__(self, observer: RunObserver) -> None:
        self._observer = GuardedObserver(observer)
        self.rounds: list[RoundRecord] = []
        self.trained: dict[str, dict[int, Participant]] = {}

    def note(self, clients: Mapping[str, ClientState]) -> None:
        """Remember what each client was aggregated with last."""
        for name, client in clients.items():
            if client.task is not None and client.participant is not None:
                self.trained.setdefault(name, {})[client.task.round] = client.participant

    def say(self, text: str) -> None:
        self._observer.say(text)

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record.unmeasured())
        self._observer.round_finished(self.rounds[-1])

    def evaluated(self, record: EvaluationRecord) -> None:
        """Devices have evaluated the model."""
        self._observer.evaluated(record.unmeasured())

    def progressed(self, progress: Progress) -> None:
        """How far a round is."""
        self._observer.progressed(progress)


class _BatchDevice:
    """A client: its agent's session, with a worker whose training takes no logical time."""

    def __init__(
        self,
        client: EmulatedDevice,
        trainer: Trainer,
        link: Transport,
        topics: Topics,
        folder: Path,
        clock: LogicalClock,
    ) -> None:
        home = folder / "devices" / client.client_id
        data = folder / f"{client.client_id}.npz"
        tasks.write_npz(data, client.data)
        held_out = folder / f"{client.client_id}.held-out.npz"
        if client.test is not None:
            tasks.write_npz(held_out, client.test)
        # What is free on this machine's disk says nothing of the device, and must not take part in what a run comes to.
        store = AgentStore(home, client.profile.disk_limit_bytes, free_bytes=lambda _: _ENDLESS_BYTES)
        store.work_folder.mkdir(exist_ok=True)
        self._worker = TrainingWorker(
            {trainer.target: trainer},
            blobs=store.blobs,
            work_folder=store.work_folder,
            data=str(data),
            held_out=None if client.test is None else str(held_out),
            threads=client.profile.threads,
        )
        meter = ReplayMeter(ReplayedLog(client.log), lambda _down, _up: None)
        data_bytes = max(one.summary().data_bytes for one in (client.data, client.test) if one is not None)
        streams = client.data.transform is not None
        settings = AgentSettings(profile=build_profile(client), data_bytes=data_bytes, streams=streams)
        device = Device(store=store, worker=self._worker, meter=meter)
        self._session = EdgeSession(settings, link, topics, device, clock=clock)
        self._session.open()

    def turn(self) -> None:
        """Act once; a training that begins is awaited, so that the next turn finds its outcome.

        Raises:
            RunError: it did not end in time.
        """
        self._session.turn(0.0)
        started_s = time.monotonic()
        self._worker.join(TRAINING_LIMIT_S)
        if time.monotonic() - started_s >= TRAINING_LIMIT_S:
            raise RunError(f"a training took more than {TRAINING_LIMIT_S:g} s; use fewer samples or a smaller model")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Everybody who acts in a run."""

    server: Server
    devices: Sequence[_BatchDevice]
    link: CountingTransport
    notes: _Notes
    clock: LogicalClock
    stop: threading.Event

    def play(self, most_turns: int) -> int:
        """Let everybody act in turns until the run is over; returns the number of turns."""
        step_s = LEAST_STEP_S
        for turn in range(most_turns):
            if self.server.finished:
                return turn
            if self.stop.is_set():
                raise StoppedError("the run was stopped before its end; a batch cannot be taken up, start it again")
            moved = self._turn()
            step_s = LEAST_STEP_S if moved else min(2 * step_s, MOST_STEP_S)
            self.clock.advance(step_s)
        state = self.server.state
        waits_for = f" and waits for {state.failed_attempts.waits_for}" if state.failed_attempts.waits_for else ""
        raise RunError(
            f"the run did not end within {most_turns} turns: it stands in phase {state.phase!r} of round "
            f"{state.round} after {self.clock():.0f} logical seconds{waits_for}; allow more turns or shorten the "
            "deadlines"
        )

    def _turn(self) -> bool:
        """Everybody acts once; whether anything was sent or came."""
        before = self.link.sent_bytes + self.link.received_bytes
        for device in self.devices:
            device.turn()
        self.server.finish()
        aggregated = self.server.state.aggregated_round
        self.server.step(0.0)
        if self.server.state.aggregated_round != aggregated:
            self.notes.note(self.server.state.last)
        return self.link.sent_bytes + self.link.received_bytes != before


def _result(stage: _Stage, turns: int) -> BatchResult:
    server, notes = stage.server, stage.notes
    if server.state.phase == "failed":
        raise RunError(server.state.failure)
    result = server.result()
    path = result.model_path
    return BatchResult(
        rounds=tuple(notes.rounds),
        model=path.read_bytes() if path is not None else b"",
        supernet=result.supernet_path.read_bytes() if result.supernet_path is not None else b"",
        trained=MappingProxyType(dict(sorted(notes.trained.items()))),
        own=MappingProxyType(dict(find_owners(server))),
        turns=turns,
        logical_seconds=stage.clock(),
        result=replace(result, model_path=None, supernet_path=None).unmeasured(),
    )
