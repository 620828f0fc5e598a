"""Subfleet from Python: load a run, run it, and look at its result.

from subfleet.lab import load, run

result = run(load("fedfa", "rounds=3", "host.type=batch"))
print(result.accuracy, result.frame()[["round", "client_id", "architecture", "loss"]])
"""

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subfleet.emulation.hosting import open_host
from subfleet.export.cache import CacheFolder, open_default_cache
from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import ClientRow, RoundRecord, RunObserver
from subfleet.observers import open_run_folder
from subfleet.protocol.errors import ConfigError, MissingExtraError
from subfleet.settings.reading import read_run, read_runs
from subfleet.settings.run import Run
from subfleet.settings.run_folder import choose_folder
from subfleet.settings.sections import FirstWeights
from subfleet.settings.stored_networks import resolve_model

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import Tensor, nn

    from subfleet.elastic.recording.losses import LossFunction

__all__ = ["ClientRound", "Result", "Run", "load", "load_all", "merge_adapters", "run"]

FIRST_WEIGHTS = "first_weights.safetensors"
"""The weights of a module that a run began with, in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRound:
    """One client in one round."""

    round: int
    client: ClientRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run.

    Attributes:
        run: its settings.
        folder: contains all results, among them `report.html`.
        accuracy: of the model on the evaluation data, after the last round; see `rounds[-1].model_description`.
            None if the task has no accuracy.
        metrics: of the model after the last round, the headline metric first.
        rounds: every round, with a row for each client.
        models: an entry for each device and model file, if models were deployed.
    """

    run: Run
    folder: Path
    accuracy: float | None
    metrics: Mapping[str, float]
    rounds: tuple[RoundRecord, ...]
    models: tuple[dict[str, Any], ...]

    @property
    def model(self) -> Path:
        """The whole model after the last round, a safetensors file."""
        return self.folder / "model.safetensors"

    @property
    def clients(self) -> tuple[ClientRound, ...]:
        """Every client in every round."""
        return tuple(ClientRound(round=record.round, client=row) for record in self.rounds for row in record.clients)

    def frame(self) -> "DataFrame":
        """A row for each client and round, with the metrics of the round.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("pandas", "pandas") from error
        metrics = {record.round: record.all_metrics for record in self.rounds}
        rows = ({"round": row.round, **metrics[row.round], **asdict(row.client)} for row in self.clients)
        return pd.DataFrame(rows)


def load(name_or_path: str | Path, *overrides: str) -> Run:
    """Read a run from a TOML file, or an included run by name.

    Args:
        name_or_path: such as "quickstart", a method's name, or "mine.toml".
        overrides: values that replace those of the file, such as "rounds=3" or "method.type=fedavg".

    Raises:
        FileError: the file cannot be read.
        ConfigError: the settings are invalid; the message lists every problem.
    """
    return read_run(name_or_path, overrides)


def load_all(name_or_path: str | Path, *overrides: str, seeds: tuple[int, ...] = ()) -> tuple[Run, ...]:
    """Read all runs of a sweep, or a run once for each seed; raises the errors of `load`."""
    return read_runs(name_or_path, overrides, seeds)


def run(  # noqa: PLR0913 - independent settings
    described: Run,
    *,
    model: "nn.Module | None" = None,
    loss: "LossFunction | None" = None,
    runs: Path | str = "runs",
    name: str | None = None,
    observer: RunObserver | None = None,
    cache: CacheFolder | None = None,
) -> Result:
    """Run an emulated fleet to the end.

    Args:
        described: the run; `host.type` selects client processes or one process. If it takes the model of another run,
            that run must be finished.
        model: a PyTorch module that takes the place of the run's model, and stays unchanged; the run begins with its
            weights. Its inputs have the shape of `described.model.input_shape`.
        loss: of the module: a function of outputs and labels that returns the loss of each label; None takes that of
            the run's objective.
        runs: folder in which the folder of the run is created.
        name: of the run's folder; None takes the run's name with the first free number.
        observer: of the run, in addition to those that the run names.
        cache: of exported programs; None takes the user's.

    Raises:
        SubfleetError: the run cannot start, or it failed.
    """
    described.emulated_devices()
    folder = choose_folder(Path(runs), described.name, name)
    weights = None
    if loss is not None and model is None:
        raise ConfigError("a loss is given without a model; give both, or name the loss in the file as model.loss")
    if model is None:
        described = resolve_model(described, Path(runs))
    else:
        described, weights = _take_module(described, model, loss, folder / FIRST_WEIGHTS)
    with (
        open_run_folder(folder, described, observer or Unobserved()) as (folder, observers),
        open_host(described.host.type, cache or open_default_cache()) as host,
    ):
        if weights is not None:
            (folder / FIRST_WEIGHTS).write_bytes(weights)
        outcome = host(described, folder, observers, threading.Event())
    result = outcome.result
    return Result(
        run=described,
        folder=folder,
        accuracy=result.accuracy,
        metrics=result.rounds[-1].all_metrics if result.rounds else {},
        rounds=result.rounds,
        models=outcome.models,
    )


def merge_adapters(weights: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Add the adapters of `[model.lora]` to the weights of their layers.

    Args:
        weights: by name, such as those of `Result.model`.

    Returns:
        The weights under the names of the module without adapters.
    """
    from subfleet.elastic.recording.adapters import merge_adapters

    return merge_adapters(weights)


def _take_module(described: Run, model: "nn.Module", loss: "LossFunction | None", path: Path) -> tuple[Run, bytes]:
    """The run with a recorded module, and the module's weights as the content of a file with this path."""
    from safetensors.torch import save

    from subfleet.elastic.building import network_of
    from subfleet.elastic.recording.loading import record_network

    symbols = network_of(described.model).symbols
    family = record_network(model, described.model.input_shape, symbols=symbols, loss=loss)
    state = model.state_dict()
    content = save({name: state[name].clone() for name in network_of(family).tensors})
    weights = FirstWeights(file=str(path.resolve()), sha256=hashlib.sha256(content).hexdigest())
    try:
        return replace(described, model=family, model_of=None, first_weights=weights), content
    except ValueError as error:
        raise ConfigError(f"run {described.name!r} cannot take the module: {error}") from error
