"""Accounts an emulated fleet in this process: a run's decisions, bytes and seconds, without training.

Members, logs, clock, budgets, searches and decisions are those of a batch. In place of programs there are estimates of
them, and updates have sizes and no content. So there is no model, no loss and no accuracy, and runs whose decisions
depend on what was trained are refused.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from subfleet.elastic.network import Network
from subfleet.emulation.accounting.numerics import AccountedNumerics
from subfleet.emulation.accounting.work import AccountedBlobs, AccountedWork
from subfleet.emulation.batch.agenda import LogicalClock
from subfleet.emulation.batch.agents import EmulatedAgent
from subfleet.emulation.batch.fleet import EmulatedFleet
from subfleet.emulation.batch.members import list_members
from subfleet.emulation.batch.memory_journal import MemoryJournal
from subfleet.emulation.batch.run import (
    Batch,
    History,
    choose_scratch_folder,
    create_agent,
    create_timing,
    keep_meaningful,
    prepare_run,
)
from subfleet.emulation.gathering import GatheredRun, gather_run
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import Progress, RoundRecord, RunObserver, RunResult
from subfleet.methods.selector import select_at_random
from subfleet.programs.supply import Exports
from subfleet.protocol.errors import ConfigError, RunError
from subfleet.protocol.scratch import make_scratch_folder
from subfleet.protocol.submodel import Architecture
from subfleet.reporting.results import write_results
from subfleet.reporting.run_figures import count_figures
from subfleet.rounds.networks import get_network
from subfleet.serving.outcome import Outcome
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.settings.sections import Evaluations


def run_accounting(
    run: Run, folder: Path, observer: RunObserver, stop: threading.Event, *, exports: Exports
) -> Outcome:
    """Account a run to the end.

    Args:
        run: its settings.
        folder: for the results.
        observer: of the run; its errors do not affect the run.
        stop: set it to stop the run; it cannot be resumed.
        exports: makes the planner's estimates, and no program; it is not closed.

    Raises:
        RunError: the run failed or was stopped, or no round was closed.
        ConfigError: a decision of the run depends on what is trained.
        SubfleetError: the data or devices of the run cannot be read.
    """
    observer = GuardedObserver(observer)
    check_accountable(run)
    observer.say(f"Reading the samples and logs of {len(run.fleet.expand_devices())} devices")
    gathered = gather_run(run)
    folder.mkdir(parents=True, exist_ok=True)
    result = account(gathered, exports, observer=observer, stop=stop)
    if not result.rounds:
        raise RunError("no round of the run was closed; see the reasons in the tables above")
    tiers = {device.client_id: device.tier for device in gathered.devices}
    report = write_results(folder, name=folder.name, result=result, figures=count_figures(result, tiers))
    return Outcome(result=result, folder=folder, report=report)


def check_accountable(run: Run) -> None:
    """Raise ConfigError if a decision of a run depends on what is trained."""
    why = next(_list_dependences(run), None)
    if why is not None:
        raise ConfigError(
            f"method {run.method.TYPE!r} with these settings cannot be accounted: {why}, and nothing is trained; use "
            "--host batch"
        )


def _list_dependences(run: Run) -> Iterator[str]:
    """What a run's decisions depend on that only training tells."""
    roles = run.roles
    if roles.selector.select is not select_at_random:
        yield "it selects clients by their losses or updates"
    if roles.memory.remember is not None or roles.memory.observe is not None:
        yield "it remembers losses or updates"
    if roles.assigner.propose is not None:
        yield "devices score candidates on their data"
    if roles.networks.path_search is not None or roles.training.draws_paths:
        yield "it searches a supernet that is trained"
    if roles.networks.evolve is not None:
        yield "its networks follow from trained ones"
    if run.norms == "calibrated":
        yield "devices measure norms of the trained model"


def account(
    gathered: GatheredRun, exports: Exports, *, observer: RunObserver, stop: threading.Event | None = None
) -> RunResult:
    """Account a run to the end; devices evaluate nothing and get no models.

    Args:
        gathered: the run with its data and devices.
        exports: see `run_accounting`.
        observer: of the run.
        stop: set it to stop the run.

    Raises:
        RunError: the run failed, was stopped, or did not end within its turns.
        SubfleetError: the settings or the data cannot be used.
    """
    stop = stop or threading.Event()
    short = replace(gathered.run, evaluation=Evaluations(last=False), deploy_targets=())
    gathered = replace(gathered, run=short)
    with make_scratch_folder(choose_scratch_folder()) as folder:
        members, blobs = list_members(gathered.devices), AccountedBlobs()

        def find_network(architecture: Architecture) -> Network:
            return get_network(server.context, server.state.lineages, architecture).network

        def create(client_id: str) -> EmulatedAgent:
            member = members[client_id]
            work = AccountedWork(sample_count=len(member.device.data), find_network=find_network)
            timing = create_timing(member, gathered.run)
            return create_agent(member, fleet, work, timing=timing, blobs=blobs)

        fleet = EmulatedFleet(members, create, LogicalClock(), {})
        history = History(_Unlearned(observer), gathered.run)
        server = Server(
            prepare_run(gathered, folder / "unused"),
            lambda _: fleet,
            history,
            state_folder=folder / "server",
            exports=exports,
            samples=gathered.evaluation,
            clock=fleet.clock,
            journal=lambda _, run: MemoryJournal(run.name),
            numerics=AccountedNumerics,
        )
        batch = Batch(server=server, fleet=fleet, history=history, stop=stop)
        server.open()
        try:
            batch.play()
            if server.state.phase == "failed":
                raise RunError(server.state.failure)
            result = keep_meaningful(server.result(), gathered.run)
        finally:
            server.close()
    rounds = tuple(record.without_losses() for record in result.rounds)
    return replace(result, rounds=rounds, model_path=None)


class _Unlearned:
    """An observer of rounds without losses; it passes everything on to another one."""

    def __init__(self, observer: RunObserver) -> None:
        self._observer = GuardedObserver(observer)

    def say(self, text: str) -> None:
        self._observer.say(text)

    def round_finished(self, record: RoundRecord) -> None:
        self._observer.round_finished(record.without_losses())

    def progressed(self, progress: Progress) -> None:
        """See `RunObserver`."""
        self._observer.progressed(progress)
