"""Devices' own models of a virtual run, kept before its files are gone, each tried by a runtime of this process."""

from pathlib import Path
from typing import Any

from subfleet.emulation.batch.hosting import TRAINERS, shared_trainers
from subfleet.journal.records import RunObserver, RunResult
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.programs import Prediction, Trainer
from subfleet.reporting.own_models import kept_models, tried

__all__ = ["tried_models"]


def tried_models(
    result: RunResult, folder: Path | None, evaluation: Path, observer: RunObserver
) -> tuple[dict[str, Any], ...]:
    """Keep the models that devices were given.

    Args:
        result: of the run, whose files are still there.
        folder: in which they are kept; None keeps none.
        evaluation: samples and labels on which they are tried, .npz.
        observer: is told of those that cannot be.

    Returns:
        A row for each; of equal files one is tried. How good one is stays None where no runtime here can run it.

    Raises:
        FileError: a file cannot be written.
    """
    if folder is None:
        return ()
    models = kept_models(folder, [(model, model.path) for model in result.deployed])
    runtimes = shared_trainers({model["target"] for model in models} & TRAINERS.keys())
    known: dict[str, Prediction | None] = {}
    for model in models:
        if model["sha256"] not in known:
            trainer, file = runtimes.get(model["target"]), folder / model["file"]
            known[model["sha256"]] = None if trainer is None else _prediction(trainer, file, evaluation, observer)
    found = ((model, known[model["sha256"]]) for model in models)
    return tuple(
        model if one is None else tried(model, one.headline, one.metrics[one.headline]) for model, one in found
    )


def _prediction(trainer: Trainer, file: Path, evaluation: Path, observer: RunObserver) -> Prediction | None:
    try:
        return trainer.predict(file, str(evaluation))
    except SubfleetError as error:  # a model that cannot be tried is no reason to lose a run
        observer.say(f"{file} cannot be tried: {error}")
        return None
