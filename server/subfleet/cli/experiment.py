"""What `subfleet run` needs besides the run itself: overrides, the run's folder, and what to do next."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from subfleet.emulation.experiments import Experiment, experiment_named
from subfleet.protocol.errors import ConfigError, FileError

if TYPE_CHECKING:
    from subfleet.emulation.run import Outcome

__all__ = ["next_steps", "run_folder", "with_overrides"]


def with_overrides(name: str, *, rounds: int | None, seed: int | None) -> Experiment:
    """The named experiment, with what the command line changes.

    Raises:
        ConfigError: there is no such experiment.
    """
    experiment = experiment_named(name)
    if rounds is not None:
        experiment = dataclasses.replace(experiment, rounds=rounds)
    if seed is not None:
        experiment = dataclasses.replace(experiment, seed=seed)
    return experiment


def run_folder(runs: Path, experiment: str, name: str | None) -> Path:
    """The folder of a run: `runs/<name>`, by default the experiment's name with the first free number.

    Raises:
        ConfigError: a run of that name is over, and would be written over.
        FileError: the folder cannot be made.
    """
    folder = runs / (name or experiment)
    number = 2
    while name is None and folder.exists():
        folder = runs / f"{experiment}-{number}"
        number += 1
    if (folder / "summary.json").exists():
        raise ConfigError(f"the run {folder} is over already; choose another --name, or remove that folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"the folder {folder} cannot be made: {error.strerror}; choose another with --runs") from error
    return folder.resolve()


def next_steps(outcome: "Outcome") -> Iterator[str]:
    """What the run reached, where to look, and the two lines that add a real device."""
    yield ""
    yield f"Test accuracy of the full model: {outcome.accuracy:.4f}"
    for model in outcome.models:
        difference = model["max_abs_diff"]
        known = "an unknown amount" if difference is None else f"{difference:.1e}"
        yield (
            f"  {model['client_id']}: {model['file']}, subnet {model['spec']}, {model['bytes'] / 1000:.0f} kB, "
            f"differs from PyTorch by {known}, accuracy of its own {model['accuracy']:.4f}"
        )
    yield f"Everything is in {outcome.folder}; look at {outcome.report}"
    yield ""
    yield "Add a real device. Start a server here, on a broker that the device can reach, then join from the device:"
    yield "  subfleet serve --config fleet --broker mqtt://BROKER:1883"
    yield "  pip install 'subfleet[edge]' && subfleet-edge join mqtt://BROKER:1883 --data digits:train"
