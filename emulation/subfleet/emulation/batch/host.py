"""Runs an emulated fleet in this process, and leaves the same folder behind as every other host."""

import threading
from collections.abc import Mapping
from pathlib import Path

from subfleet.emulation.batch.exports import LazyExports
from subfleet.emulation.batch.figures import compute_attack_figures
from subfleet.emulation.batch.hosting import TRAINERS, create_trainers
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import gather_run
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import RunObserver
from subfleet.protocol.errors import RunError, SubfleetError
from subfleet.protocol.jobs import Trainer
from subfleet.reporting.personalised_models import OwnMetric
from subfleet.reporting.run_figures import compute_figures
from subfleet.serving.outcome import Outcome, collect_gallery, write_outcome
from subfleet.serving.session import Server
from subfleet.settings.run import Run


def run_in_batch(
    run: Run, folder: Path, observer: RunObserver, stop: threading.Event, *, exports: LazyExports
) -> Outcome:
    """Run an emulated fleet to the run's end.

    Args:
        run: what to run; every device of its fleet is emulated.
        folder: for the results.
        observer: is told what happens; it may fail, and the run goes on.
        stop: set it to end the run early; a batch has nothing that could be taken up, and is begun anew.
        exports: where programs are written; the caller closes it.

    Raises:
        RunError: the run failed or was stopped, or no round aggregated anything.
        SubfleetError: what the run says of data and devices cannot be had.
    """
    observer = GuardedObserver(observer)
    observer.say(f"Reading the samples and logs of {len(run.fleet.each())} devices")
    experiment = gather_run(run)
    folder.mkdir(parents=True, exist_ok=True)
    tiers = {client.client_id: client.tier for client in experiment.devices}
    trainers = {one.suffix: one for one in create_trainers(set(TRAINERS) & set(run.deploy_targets)).values()}

    def leave(server: Server, evaluation: Path) -> Outcome:
        result, gallery = server.result().unmeasured(), collect_gallery(server)
        return write_outcome(
            folder,
            result,
            observer,
            figures=lambda: compute_figures(gallery, result, tiers) | compute_attack_figures(gallery, experiment),
            trial=lambda files: [_tried(file, trainers, evaluation, observer) for file in files],
        )

    outcome = run_batch(experiment, exports, observer=observer, stop=stop, leave=leave).outcome
    if outcome is None:
        raise RunError("the run left no results")
    return outcome


def _tried(file: Path, trainers: Mapping[str, Trainer], evaluation: Path, observer: RunObserver) -> OwnMetric | None:
    """How good a model file is; None where no runtime of this process can run it."""
    trainer = trainers.get(file.suffix)
    try:
        found = None if trainer is None else trainer.predict(file, str(evaluation))
    except SubfleetError as error:  # a model that cannot be tried is no reason to lose a run
        observer.say(f"{file} cannot be tried: {error}")
        return None
    return None if found is None else OwnMetric(metric=found.headline, value=found.metrics[found.headline])
