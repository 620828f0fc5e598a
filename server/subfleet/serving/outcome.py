"""What a run leaves in its folder, the same whichever host ran it: its model, devices' own models, results, a page."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subfleet.journal.records import DeployedModel, RunObserver, RunResult
from subfleet.methods.aggregator import Participant
from subfleet.protocol.errors import FileError, RunError, SubfleetError
from subfleet.reporting.personalised_models import OwnMetric, kept_models, tried_models
from subfleet.reporting.results import write_results
from subfleet.reporting.run_figures import Gallery
from subfleet.rounds.networks import find_standing
from subfleet.serving.session import Server
from subfleet.settings.run_folder import MODEL, SUPERNET

__all__ = ["Outcome", "gallery_of", "leave_results", "owners_of"]

Trial = Callable[[Sequence[Path]], Sequence[OwnMetric | None]]
"""Runs model files, and tells how good each is; None where nothing here can run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run left behind.

    Attributes:
        result: how the run ended; files that its server had may be gone.
        folder: with run.json, summary.json, rounds.csv, clients.csv, evaluations.csv, report.html, the model, and
            devices' own models.
        report: the page to look at.
        models: one entry per device and model file: its submodel, its difference from PyTorch, its own accuracy.
    """

    result: RunResult
    folder: Path
    report: Path
    models: tuple[dict[str, Any], ...] = ()


def leave_results(
    folder: Path,
    result: RunResult,
    observer: RunObserver,
    *,
    figures: Callable[[], Mapping[str, Any]],
    trial: Trial = lambda files: [None] * len(files),
    file_of: Callable[[DeployedModel], Path] = lambda model: model.path,
) -> Outcome:
    """Leave the results of a run in its folder.

    Args:
        folder: of the run.
        result: how it ended.
        observer: is told what happens.
        figures: of the run as a whole, see `run_figures`.
        trial: of devices' own models; by default none is tried.
        file_of: where a device's own model is; by default where the server has it.

    Raises:
        RunError: no round was aggregated; or a device's own model cannot be had or tried, and then the results are in
            the folder all the same, but for these models.
        FileError: the folder cannot be written.
    """
    if result.model_path is None:
        raise RunError(
            "no round of the run aggregated an update, so there is no model; see the reasons in the tables above"
        )
    try:
        shutil.copyfile(result.model_path, folder / MODEL)
        if result.supernet_path is not None:
            shutil.copyfile(result.supernet_path, folder / SUPERNET)
    except OSError as error:
        raise FileError(f"the model cannot be written to {folder}: {error.strerror}; make room for it") from error
    told = figures()
    if result.deployed:
        observer.say("Keeping each device's own model")
    try:
        kept = kept_models(folder, [(model, file_of(model)) for model in result.deployed])
        models = tried_models(folder, kept, trial)
    except SubfleetError:
        # A model that cannot be shown is no reason to lose a run.
        write_results(folder, name=folder.name, result=result, figures=told)
        raise
    report = write_results(folder, name=folder.name, result=result, models=models, figures=told)
    return Outcome(result=result, folder=folder, report=report, models=models)


def gallery_of(server: Server) -> Gallery:
    """The models that the clients of a server's run have now."""
    return Gallery.of(server.context, server.model, server.samples, dict(owners_of(server)))


def owners_of(server: Server) -> Iterator[tuple[str, Participant]]:
    """The clients that were ever aggregated, each with the submodel that is its own now."""
    for name, client in sorted(server.state.last.items()):
        owner = find_standing(server.context, server.state, client)
        if owner is not None:
            yield name, owner
