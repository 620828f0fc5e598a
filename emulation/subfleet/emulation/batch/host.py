"""Runs an emulated fleet in this process, and leaves the same folder behind as client processes do."""

import threading
from pathlib import Path

from subfleet.emulation.batch.exports import LazyExports
from subfleet.emulation.batch.figures import whole_run
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import gathered
from subfleet.emulation.outcome import Outcome
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import RunObserver
from subfleet.protocol.errors import RunError
from subfleet.reporting.results import write_results
from subfleet.settings.kept import MODEL, SUPERNET
from subfleet.settings.run import Run

__all__ = ["run_in_batch"]


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
        RunError: the run failed or was stopped, or no round folded anything.
        SubfleetError: what the run says of data and devices cannot be had.
    """
    observer = GuardedObserver(observer)
    observer.say(f"Reading the samples and logs of {len(run.fleet.each())} devices")
    experiment = gathered(run)
    folder.mkdir(parents=True, exist_ok=True)
    result = run_batch(experiment, exports, observer=observer, stop=stop, keep=folder)
    if not result.model:
        raise RunError(
            "no round of the run folded an update, so there is no model; see the reasons in the tables above"
        )
    (folder / MODEL).write_bytes(result.model)
    if result.supernet:
        (folder / SUPERNET).write_bytes(result.supernet)
    extra = {"models": list(result.models), "figures": whole_run(experiment, result)}
    report = write_results(folder, name=folder.name, result=result.result, extra=extra)
    return Outcome(result=result.result, folder=folder, report=report, models=result.models)
