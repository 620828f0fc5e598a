"""Runs an emulated fleet in one process: server and clients act in turns, and work takes no time of the clock.

The decisions of server and agents and the programs are those of a real fleet. There is no transport, the journal is in
memory, the clock is logical, and clients share loaded programs. Nothing waits: while no message is sent, the clock
advances in growing steps.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from subfleet import tasks
from subfleet.agent.states import AgentSettings
from subfleet.device.meters import ReplayMeter
from subfleet.device_profiles import ReplayedLog
from subfleet.edge_client.task_work import TaskWork
from subfleet.emulation.batch.agents import EmulatedAgent
from subfleet.emulation.batch.disk import EmulatedDisk
from subfleet.emulation.batch.fleet import EmulatedFleet, Interference
from subfleet.emulation.batch.memory_journal import MemoryJournal
from subfleet.emulation.batch.trainers import AttackingTrainer, create_trainers
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun, build_profile
from subfleet.export.pool import ExportPool
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.guarding import GuardedObserver, Unobserved
from subfleet.journal.records import Progress, RoundRecord, RunObserver, RunResult
from subfleet.methods.aggregator import Participant
from subfleet.protocol.errors import RunError
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.scratch import list_scratch_folders, make_scratch_folder
from subfleet.rounds.state import ClientState
from subfleet.serving.deployment import StoppedError
from subfleet.serving.outcome import Outcome, find_owners
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.transport.blob_store import BlobStore

LEAST_STEP_S = 0.001
"""Logical seconds of a turn in which a message was sent or received."""
MOST_STEP_S = 1.0
"""The longest step of the clock: clients must send within their lease."""
_LEAST_FREE_BYTES = 4 * 2**30  # containers often have 64 MiB, and a fleet of 50 needs hundreds


class LogicalClock:
    """A clock that only `advance` moves."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        """Seconds since the start."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The result of a batch run.

    Attributes:
        rounds: every round, with a row for each client. Memory and time are not measured, because devices share a
            process and the clock is logical.
        model: the last checkpoint, a safetensors container of the whole model; empty if no round was aggregated.
        supernet: the last checkpoint before the supernet was searched; empty if there was no search.
        trained: by client id and round, the client with the submodel of its aggregated update.
        own: by client id, the client with its final submodel, for clients that were aggregated at least once; if its
            network was retired, with the submodel that the method has in its place.
        turns: number of turns of server and clients.
        logical_seconds: length of the run by the logical clock.
        result: of the server; its files have been removed.
        outcome: the return value of `finish`, if it was given.
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


def run_batch(  # noqa: PLR0913 - replaceable parts of a run
    gathered: GatheredRun,
    exports: ExportPool,
    *,
    observer: RunObserver | None = None,
    stop: threading.Event | None = None,
    trainers: Mapping[str, Trainer] | None = None,
    interference: Mapping[str, Interference] | None = None,
    finish: Callable[[Server, Path], Outcome] | None = None,
) -> BatchResult:
    """Run an emulated fleet to the end. The same run gives the same bits.

    Args:
        gathered: the run with its data and devices.
        exports: the exporter; it is not closed.
        observer: of the run.
        stop: set it to stop the run.
        trainers: by client id, trainers that replace the usual ones.
        interference: by client id, what changes the client's messages.
        finish: called at the end of the run, while the files of the server exist, with the server and the file of the
            evaluation data.

    Raises:
        RunError: the run failed, was stopped, or did not end within its turns.
        SubfleetError: the settings or the data cannot be used.
    """
    shared = create_trainers({client.runtime for client in gathered.devices})
    stop = stop or threading.Event()
    with make_scratch_folder(_choose_scratch_folder()) as folder:
        clock = LogicalClock()
        evaluation = folder / "evaluation.npz"
        tasks.write_npz(evaluation, gathered.evaluation)
        fleet, history = EmulatedFleet(clock, interference or {}), _History(observer or Unobserved())

        def connect(blobs: BlobStore) -> EmulatedFleet:
            for client in gathered.devices:
                trainer = _choose_trainer(client, {**shared, **(trainers or {})})
                fleet.add(_create_agent(client, trainer, fleet, blobs, folder, stop.is_set))
            return fleet

        server = Server(
            prepare_run(gathered, evaluation),
            connect,
            history,
            state_folder=folder / "server",
            exports=exports,
            samples=gathered.evaluation,
            clock=clock,
            journal=lambda _, run: MemoryJournal(run.name),
        )
        batch = _Batch(server=server, fleet=fleet, history=history, clock=clock, stop=stop)
        server.open()
        try:
            turns = batch.play(gathered.run.host.turns_per_round * (gathered.run.total_rounds + 1))
            result = _build_result(batch, turns)
            return result if finish is None else replace(result, outcome=finish(server, evaluation))
        finally:
            server.close()


def _create_agent(
    client: EmulatedDevice,
    trainer: Trainer,
    fleet: EmulatedFleet,
    blobs: BlobStore,
    folder: Path,
    stopped: Callable[[], bool],
) -> EmulatedAgent:
    name, profile = client.client_id, build_profile(client)
    data, held_out = folder / f"{name}.npz", folder / f"{name}.held-out.npz"
    tasks.write_npz(data, client.data)
    if client.test is not None:
        tasks.write_npz(held_out, client.test)
    data_bytes = max(part.summary().data_bytes for part in (client.data, client.test) if part is not None)
    return EmulatedAgent(
        settings=AgentSettings(profile=profile, data_bytes=data_bytes, streams=client.data.transform is not None),
        work=TaskWork(
            trainers={trainer.target: trainer},
            blob_path=blobs.path,
            work_folder=folder,
            data=str(data),
            held_out=None if client.test is None else str(held_out),
            threads=client.profile.threads,
        ),
        disk=EmulatedDisk(client.profile.disk_limit_bytes),
        meter=ReplayMeter(ReplayedLog(client.log), lambda _down, _up: None),
        blobs=blobs,
        say=partial(fleet.hear, name),
        count=partial(fleet.traffic.count, name, "sent"),
        stopped=stopped,
    )


def prepare_run(gathered: GatheredRun, evaluation: Path) -> Run:
    """The run for the server: with evaluation data in a file, and settings of outliers for this fleet."""
    run = gathered.run
    settings = DataSettings(
        test=str(evaluation),
        classes=run.data.classes,
        validation_samples=run.data.validation_samples,
        transform=run.data.transform,
        check=run.data.check,
    )
    attacked = any(client.attack is not None for client in gathered.devices)
    return replace(run, data=settings, outliers=run.outliers.for_emulation(attacked=attacked))


def _choose_trainer(client: EmulatedDevice, trainers: Mapping[str, Trainer]) -> Trainer:
    """The client's own trainer, or that of its runtime; an attacker's is wrapped."""
    trainer = trainers.get(client.client_id) or trainers[client.runtime]
    return trainer if client.attack is None else AttackingTrainer(trainer, client.attack)


def _choose_scratch_folder() -> Path:
    """The folder for the files of a run: in memory if enough is free, because no file has to outlive the process."""
    in_memory, on_disk = list_scratch_folders()
    fits = in_memory.is_dir() and shutil.disk_usage(in_memory).free >= _LEAST_FREE_BYTES
    return in_memory if fits else on_disk


class _History:
    """Records rounds and trained submodels; it is the server's observer, and passes everything on to another one."""

    def __init__(self, observer: RunObserver) -> None:
        self._observer = GuardedObserver(observer)
        self.rounds: list[RoundRecord] = []
        self.trained: dict[str, dict[int, Participant]] = {}

    def note(self, clients: Mapping[str, ClientState]) -> None:
        """Record the submodels with which clients were aggregated last."""
        for name, client in clients.items():
            if client.task is not None and client.participant is not None:
                self.trained.setdefault(name, {})[client.task.round] = client.participant

    def say(self, text: str) -> None:
        self._observer.say(text)

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record.without_measurements())
        self._observer.round_finished(self.rounds[-1])

    def evaluated(self, record: EvaluationRecord) -> None:
        """See `RunObserver`."""
        self._observer.evaluated(record.without_measurements())

    def progressed(self, progress: Progress) -> None:
        """See `RunObserver`."""
        self._observer.progressed(progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The server and the clients of a run."""

    server: Server
    fleet: EmulatedFleet
    history: _History
    clock: LogicalClock
    stop: threading.Event

    def play(self, most_turns: int) -> int:
        """Let server and clients act in turns until the run is finished; returns the number of turns."""
        step_s = LEAST_STEP_S
        for turn in range(most_turns):
            if self.server.finished:
                return turn
            if self.stop.is_set():
                raise StoppedError("the run was stopped before its end; a batch cannot be resumed, start it again")
            moved = self._turn()
            step_s = LEAST_STEP_S if moved else min(2 * step_s, MOST_STEP_S)
            self.clock.advance(step_s)
        state = self.server.state
        waits_for = f" and waits for {state.failed_attempts.waits_for}" if state.failed_attempts.waits_for else ""
        raise RunError(
            f"the run did not end within {most_turns} turns: it is in phase {state.phase!r} of round "
            f"{state.round} after {self.clock():.0f} logical seconds{waits_for}; raise "
            "host.turns_per_round or shorten the deadlines"
        )

    def _turn(self) -> bool:
        """Let everyone act once; returns whether the server sent or received anything."""
        moved = self.fleet.act()
        self.server.finish()
        aggregated = self.server.state.aggregated_round
        self.server.step(0.0)
        if self.server.state.aggregated_round != aggregated:
            self.history.note(self.server.state.last)
        return moved or self.fleet.busy


def _build_result(batch: _Batch, turns: int) -> BatchResult:
    server, history = batch.server, batch.history
    if server.state.phase == "failed":
        raise RunError(server.state.failure)
    result = server.result()
    path = result.model_path
    return BatchResult(
        rounds=tuple(history.rounds),
        model=path.read_bytes() if path is not None else b"",
        supernet=result.supernet_path.read_bytes() if result.supernet_path is not None else b"",
        trained=MappingProxyType(dict(sorted(history.trained.items()))),
        own=MappingProxyType(dict(find_owners(server))),
        turns=turns,
        logical_seconds=batch.clock(),
        result=replace(result, model_path=None, supernet_path=None).without_measurements(),
    )
