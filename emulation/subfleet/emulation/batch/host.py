"""Runs an emulated fleet in this process, and writes the same results as every other host."""

import threading
from collections.abc import Mapping
from pathlib import Path

from subfleet.emulation.batch.figures import compute_attack_figures
from subfleet.emulation.batch.run import keep_meaningful, run_batch
from subfleet.emulation.batch.trainers import TRAINERS, create_trainers
from subfleet.emulation.gathering import gather_run
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import RunObserver
from subfleet.protocol.errors import RunError, SubfleetError
from subfleet.protocol.jobs import Trainer
from subfleet.reporting.results import OwnMetric
from subfleet.reporting.run_figures import compute_figures
from subfleet.serving.outcome import Outcome, collect_gallery, write_outcome
from subfleet.serving.session import Server
from subfleet.settings.run import Run

STATE = "batch"
"""The folder of what a resumed batch needs, in the folder of the run."""


def run_in_batch(
    run: Run, folder: Path, observer: RunObserver, stop: threading.Event, *, exports: ExportPool
) -> Outcome:
    """Run an emulated fleet to the end.

    Args:
        run: its settings.
        folder: for the results; an interrupted run in it is resumed after its last round.
        observer: of the run; its errors do not affect the run.
        stop: set it to stop the run.
        exports: the exporter; it is not closed.

    Raises:
        RunError: the run failed or was stopped, or no round was aggregated.
        SubfleetError: the data or devices of the run cannot be read.
    """
    observer = GuardedObserver(observer)
    observer.say(f"Reading the samples and logs of {len(run.fleet.expand_devices())} devices")
    gathered = gather_run(run)
    folder.mkdir(parents=True, exist_ok=True)
    tiers = {client.client_id: client.tier for client in gathered.devices}
    runnable = create_trainers(set(TRAINERS) & set(run.deploy_targets))
    trainers = {trainer.suffix: trainer for trainer in runnable.values()}

    def write(server: Server, evaluation: Path) -> Outcome:
        result, gallery = keep_meaningful(server.result(), run), collect_gallery(server)
        return write_outcome(
            folder,
            result,
            observer,
            figures=lambda: compute_figures(gallery, result, tiers) | compute_attack_figures(gallery, gathered),
            trial=lambda files: [_measure(file, trainers, evaluation, observer) for file in files],
        )

    outcome = run_batch(gathered, exports, observer=observer, stop=stop, finish=write, state=folder / STATE).outcome
    if outcome is None:
        raise RunError("the run left no results")
    return outcome


def _measure(file: Path, trainers: Mapping[str, Trainer], evaluation: Path, observer: RunObserver) -> OwnMetric | None:
    """The headline metric of a model file; None if this process cannot run it."""
    trainer = trainers.get(file.suffix)
    try:
        prediction = None if trainer is None else trainer.predict(file, str(evaluation))
    except SubfleetError as error:  # a model that cannot be run must not lose the results
        observer.say(f"{file} cannot be evaluated: {error}")
        return None
    if prediction is None:
        return None
    return OwnMetric(metric=prediction.headline, value=prediction.metrics[prediction.headline])
