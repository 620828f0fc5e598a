"""Writes the results of a run into its folder: its model, the devices' models, tables and the report."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subfleet.journal.records import DeployedModel, RunObserver, RunResult
from subfleet.methods.aggregator import Participant
from subfleet.protocol.errors import RunError, SubfleetError, explain_os_errors
from subfleet.reporting.results import OwnMetric, copy_models, measure_models, write_results
from subfleet.reporting.run_figures import Gallery
from subfleet.rounds.networks import find_standing
from subfleet.serving.session import Server
from subfleet.settings.run_folder import MODEL, SUPERNET

Trial = Callable[[Sequence[Path]], Sequence[OwnMetric | None]]
"""Measures the metric of each model file; None for a file that cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a run.

    Attributes:
        result: of the run; its files may have been removed.
        folder: contains `run.json`, `summary.json`, `rounds.csv`, `clients.csv`, `evaluations.csv`, `report.html`, the
            model, and the devices' models.
        report: path of the report.
        models: a row for each device and model file.
    """

    result: RunResult
    folder: Path
    report: Path
    models: tuple[dict[str, Any], ...] = ()


def write_outcome(
    folder: Path,
    result: RunResult,
    observer: RunObserver,
    *,
    figures: Callable[[], Mapping[str, Any]],
    trial: Trial = lambda files: [None] * len(files),
    file_of: Callable[[DeployedModel], Path] = lambda model: model.path,
) -> Outcome:
    """Write the results of a run into its folder.

    Args:
        folder: of the run.
        result: of the run.
        observer: of the run.
        figures: computes the figures of the whole run, see `compute_figures`.
        trial: measures devices' models; by default none is measured.
        file_of: path of a device's model; by default the server's copy.

    Raises:
        RunError: no round was aggregated, or a device's model is missing or cannot be run; in the latter case the other
            results are written.
        FileError: the folder cannot be written.
    """
    if result.model_path is None:
        raise RunError(
            "no round of the run aggregated an update, so there is no model; see the reasons in the tables above"
        )
    with explain_os_errors(f"the model cannot be written to {folder}", "make room for it"):
        shutil.copyfile(result.model_path, folder / MODEL)
        if result.supernet_path is not None:
            shutil.copyfile(result.supernet_path, folder / SUPERNET)
    run_figures = figures()
    if result.deployed:
        observer.say("Keeping each device's own model")
    try:
        rows = copy_models(folder, [(model, file_of(model)) for model in result.deployed])
        models = measure_models(folder, rows, trial)
    except SubfleetError:
        # A model that cannot be run must not lose the results.
        write_results(folder, name=folder.name, result=result, figures=run_figures)
        raise
    report = write_results(folder, name=folder.name, result=result, models=models, figures=run_figures)
    return Outcome(result=result, folder=folder, report=report, models=models)


def collect_gallery(server: Server) -> Gallery:
    """The current models of all clients."""
    return Gallery(server.context, server.model, server.samples, dict(find_owners(server)))


def find_owners(server: Server) -> Iterator[tuple[str, Participant]]:
    """The clients that were aggregated at least once, each with its current submodel."""
    for name, client in sorted(server.state.last.items()):
        owner = find_standing(server.context, server.state, client)
        if owner is not None:
            yield name, owner
