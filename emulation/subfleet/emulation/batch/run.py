"""Runs an emulated fleet in one process: server and clients act in turns, by a logical clock.

The decisions of server and agents and the programs are those of a real fleet. There is no transport, the journal is in
memory, and clients share loaded programs. Transfers and training take as long as the devices' logs and profiles say,
see `timing`. Nothing waits: when nobody has anything to do, the clock goes on to the next event, in steps of a second
in which the server looks at its deadlines.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from subfleet import tasks
from subfleet.device.meters import ReplayMeter
from subfleet.device.timing import NoTime, ReplayedTiming, Timing
from subfleet.emulation.batch.agenda import LogicalClock
from subfleet.emulation.batch.agents import Blobs, EmulatedAgent
from subfleet.emulation.batch.computing import open_computing
from subfleet.emulation.batch.disk import EmulatedDisk
from subfleet.emulation.batch.fleet import EmulatedFleet, Interference
from subfleet.emulation.batch.members import Member, list_members
from subfleet.emulation.batch.memory_journal import MemoryJournal
from subfleet.emulation.batch.resuming import AgentRecord, link_scratch, open_round_journal, read_fleet
from subfleet.emulation.batch.work import ClientWork
from subfleet.emulation.gathering import GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.guarding import GuardedObserver, Unobserved
from subfleet.journal.records import Progress, RoundRecord, RunObserver, RunResult
from subfleet.methods.aggregator import Participant
from subfleet.programs.supply import Exports
from subfleet.protocol.errors import RunError
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.scratch import list_scratch_folders, make_scratch_folder
from subfleet.rounds.state import ClientState
from subfleet.serving.deployment import StoppedError
from subfleet.serving.outcome import Outcome, find_owners
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings

STEP_S = 1.0
"""The longest step of the clock, by which the server may notice a deadline too late."""
EVALUATION = "evaluation.npz"
"""The file of the evaluation data in the folder of a run."""
_ENDLESS_S = 1e9
"""Clients of a batch send no heartbeats: they are there until they say otherwise, and never forgotten."""
_LEAST_FREE_BYTES = 4 * 2**30  # containers often have 64 MiB, and a fleet of 50 needs hundreds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The result of a batch run.

    Attributes:
        rounds: every round, with a row for each client. Memory is not measured, because devices share a process; times
            are those of the logical clock.
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
    state: Path | None = None,
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
        state: folder for what a later call needs to resume the run after its last round; None keeps nothing.

    Raises:
        RunError: the run failed, was stopped, or did not end within its turns.
        SubfleetError: the settings or the data cannot be used.
    """
    stop = stop or threading.Event()
    with (
        make_scratch_folder(choose_scratch_folder()) as folder,
        open_computing(gathered, exports, folder, trainers or {}, stop.is_set) as computing,
        nullcontext() if state is None else link_scratch(state, folder),
    ):
        members, known = list_members(gathered.devices), read_fleet(state)

        def create(client_id: str) -> EmulatedAgent:
            member = members[client_id]
            work = computing.create_work(member.device, server.blobs)
            timing = create_timing(member, gathered.run)
            return create_agent(
                member, fleet, work, timing=timing, blobs=server.blobs, record=known.agents.get(client_id)
            )

        fleet = EmulatedFleet(members, create, LogicalClock(known.clock_s), interference or {})

        history = History(observer or Unobserved(), gathered.run)
        server = _create_server(gathered, computing.exports, fleet, history, folder, state)
        batch = Batch(server=server, fleet=fleet, history=history, stop=stop, state=state)
        server.open()
        try:
            result = _build_result(batch, batch.play())
            return result if finish is None else replace(result, outcome=finish(server, folder / EVALUATION))
        finally:
            server.close()


def _create_server(
    gathered: GatheredRun,
    exports: Exports,
    fleet: EmulatedFleet,
    observer: RunObserver,
    folder: Path,
    state: Path | None,
) -> Server:
    evaluation = folder / EVALUATION
    tasks.write_npz(evaluation, gathered.evaluation)
    return Server(
        prepare_run(gathered, evaluation),
        lambda _: fleet,
        observer,
        state_folder=state or folder / "server",
        exports=exports,
        samples=gathered.evaluation,
        clock=fleet.clock,
        # The file of the evaluation data has another name each time, which the settings of the run must not have.
        journal=lambda place, run: (
            MemoryJournal(run.name) if state is None else open_round_journal(place, gathered.run)
        ),
    )


def create_agent(
    member: Member,
    fleet: EmulatedFleet,
    work: ClientWork,
    *,
    timing: Timing,
    blobs: Blobs,
    record: AgentRecord | None = None,
) -> EmulatedAgent:
    """The agent of a member, as part of a fleet; see `EmulatedAgent`."""
    agent = EmulatedAgent(
        settings=member.settings,
        work=work,
        disk=EmulatedDisk(member.device.profile.disk_limit_bytes, () if record is None else record.held_bytes),
        meter=ReplayMeter(member.log, fleet.clock),
        timing=timing,
        blobs=blobs,
        clock=fleet.clock,
        agenda=fleet.agenda,
        say=partial(fleet.hear, member.device.client_id),
        count=partial(fleet.traffic.count, member.device.client_id, "sent"),
    )
    if record is not None:
        agent.restart(record)
    return agent


def create_timing(member: Member, run: Run) -> Timing:
    """How long a member's transfers and work take."""
    if run.host.durations == "none":
        return NoTime()
    client = member.device
    return ReplayedTiming(
        log=member.log,
        macs_per_s=client.profile.macs_per_s,
        sample_count=len(client.data),
        held_out_count=0 if client.test is None else len(client.test),
    )


def prepare_run(gathered: GatheredRun, evaluation: Path) -> Run:
    """The run for the server: evaluation data in a file, outliers as for this fleet, and clients without heartbeats."""
    run = gathered.run
    settings = DataSettings(
        test=str(evaluation),
        classes=run.data.classes,
        validation_samples=run.data.validation_samples,
        transform=run.data.transform,
        check=run.data.check,
    )
    attacked = any(client.attack is not None for client in gathered.devices)
    deadlines = replace(run.deadlines, lease_s=_ENDLESS_S, forget_s=_ENDLESS_S)
    return replace(run, data=settings, outliers=run.outliers.for_emulation(attacked=attacked), deadlines=deadlines)


def choose_scratch_folder() -> Path:
    """The folder for the files of a run: in memory if enough is free, because no file has to outlive the process."""
    in_memory, on_disk = list_scratch_folders()
    fits = in_memory.is_dir() and shutil.disk_usage(in_memory).free >= _LEAST_FREE_BYTES
    return in_memory if fits else on_disk


class History:
    """Records trained submodels; it is the server's observer, and passes everything on to another one."""

    def __init__(self, observer: RunObserver, run: Run) -> None:
        self._observer = GuardedObserver(observer)
        self._timed = run.host.durations == "modelled"
        self.trained: dict[str, dict[int, Participant]] = {}

    def note(self, clients: Mapping[str, ClientState]) -> None:
        """Record the submodels with which clients were aggregated last."""
        for name, client in clients.items():
            if client.task is None or client.task.round in self.trained.get(name, {}):
                continue
            if client.participant is not None:
                self.trained.setdefault(name, {})[client.task.round] = client.participant

    def say(self, text: str) -> None:
        """See `RunObserver`."""
        self._observer.say(text)

    def round_finished(self, record: RoundRecord) -> None:
        """See `RunObserver`."""
        self._observer.round_finished(record.without_peaks() if self._timed else record.without_measurements())

    def evaluated(self, record: EvaluationRecord) -> None:
        """See `RunObserver`."""
        self._observer.evaluated(record if self._timed else record.without_measurements())

    def progressed(self, progress: Progress) -> None:
        """See `RunObserver`."""
        self._observer.progressed(progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The server and the clients of a run."""

    server: Server
    fleet: EmulatedFleet
    history: History
    stop: threading.Event
    state: Path | None = None

    def play(self) -> int:
        """Let server and clients act in turns until the run is finished; returns the number of turns."""
        run = self.server.context.config
        most_turns = run.host.turns_per_round * (run.total_rounds + 1)
        for turn in range(most_turns):
            if self.server.finished:
                return turn
            if self.stop.is_set():
                raise StoppedError(
                    "the run was stopped before its end; the same command, with its name, goes on after the last round"
                )
            if not self._turn():
                self.fleet.clock.advance(min(self.fleet.clock() + STEP_S, self.fleet.agenda.next_s))
        state = self.server.state
        waits_for = f" and waits for {state.failed_attempts.waits_for}" if state.failed_attempts.waits_for else ""
        raise RunError(
            f"the run did not end within {most_turns} turns: it is in phase {state.phase!r} of round "
            f"{state.round} after {self.fleet.clock():.0f} logical seconds{waits_for}; raise "
            "host.turns_per_round or shorten the deadlines"
        )

    def _turn(self) -> bool:
        """Let everyone act once; returns whether there is more to do at this time."""
        moved = self.fleet.act()
        self.server.finish()
        aggregated = self.server.state.aggregated_round
        self.server.step(0.0)
        if self.server.state.aggregated_round != aggregated:
            self.history.note(self.server.state.last)
            if self.state is not None:
                self.fleet.record.write(self.state)
        # Work in other threads takes no logical time, so the clock waits until it has ended.
        return moved or self.fleet.busy or self.server.busy or self.server.working


def keep_meaningful(result: RunResult, run: Run) -> RunResult:
    """The result without measurements that mean nothing: memory, and seconds if nothing takes time."""
    return result.without_peaks() if run.host.durations == "modelled" else result.without_measurements()


def _build_result(batch: Batch, turns: int) -> BatchResult:
    server, history = batch.server, batch.history
    if server.state.phase == "failed":
        raise RunError(server.state.failure)
    result = server.result()
    kept = keep_meaningful(replace(result, model_path=None, supernet_path=None), server.context.config)
    path = result.model_path
    return BatchResult(
        rounds=kept.rounds,
        model=path.read_bytes() if path is not None else b"",
        supernet=result.supernet_path.read_bytes() if result.supernet_path is not None else b"",
        trained=MappingProxyType(dict(sorted(history.trained.items()))),
        own=MappingProxyType(dict(find_owners(server))),
        turns=turns,
        logical_seconds=batch.fleet.clock(),
        result=kept,
    )
