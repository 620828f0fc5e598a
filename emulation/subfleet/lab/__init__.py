"""Subfleet from Python: read a run, run it, look at what came of it.

from subfleet.lab import load, run

result = run(load("fedfa", "rounds=3", "host.type=batch"))
print(result.accuracy, result.frame()[["round", "client_id", "architecture", "loss"]])
"""

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subfleet.emulation.hosting import open_host
from subfleet.export.cache import CacheFolder
from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import ClientRow, RoundRecord, RunObserver
from subfleet.observers import open_run_folder
from subfleet.programs.place import open_default_cache
from subfleet.protocol.errors import MissingExtraError
from subfleet.settings.reading import read_run, read_runs
from subfleet.settings.run import Run
from subfleet.settings.run_folder import choose_folder
from subfleet.settings.stored_networks import resolve_model

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["ClientRound", "Result", "Run", "load", "load_all", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRound:
    """One client in one round."""

    round: int
    client: ClientRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run.

    Attributes:
        run: its settings.
        folder: with everything that it left behind; `report.html` is the page to look at.
        accuracy: of the model on the evaluation data, after the last round; `rounds[-1].model_told` says what that is.
            None where accuracy means nothing.
        metrics: everything that is told of it, the metric that it is judged by first.
        rounds: every round, with a row for each client.
        models: one entry per device and model file, where devices were given models of their own.
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
        return tuple(ClientRound(round=one.round, client=row) for one in self.rounds for row in one.clients)

    def frame(self) -> "DataFrame":
        """A row for each client and round, with the round's metrics beside it.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("pandas", "pandas") from error
        metrics = {record.round: record.all_metrics for record in self.rounds}
        rows = ({"round": one.round, **metrics[one.round], **asdict(one.client)} for one in self.clients)
        return pd.DataFrame(rows)


def load(name_or_path: str | Path, *overrides: str) -> Run:
    """Read a run: a TOML file, or one that we ship.

    Args:
        name_or_path: such as "quickstart", a method's name, or "mine.toml".
        overrides: values in place of the file's, such as "rounds=3" or "method.type=fedavg".

    Raises:
        FileError: the file cannot be read.
        ConfigError: something is wrong with it; the text names all of it.
    """
    return read_run(name_or_path, overrides)


def load_all(name_or_path: str | Path, *overrides: str, seeds: tuple[int, ...] = ()) -> tuple[Run, ...]:
    """Read every run of a sweep, or one run with several seeds; raises as `load`."""
    return read_runs(name_or_path, overrides, seeds)


def run(
    described: Run,
    *,
    runs: Path | str = "runs",
    name: str | None = None,
    observer: RunObserver | None = None,
    cache: CacheFolder | None = None,
) -> Result:
    """Run an emulated fleet to its end.

    Args:
        described: what to run; `host.type` says whether devices are processes of their own. Where it takes the model of
            another run, that is over.
        runs: folder in which the run's own folder is made.
        name: of that folder; None takes the run's name with the first free number.
        observer: is told what happens, besides those that the run names.
        cache: where exported programs are kept between runs; None takes the user's.

    Raises:
        SubfleetError: the run cannot be begun, or failed; the text says why and what to do.
    """
    described.emulated_devices()
    described = resolve_model(described, Path(runs))
    folder = choose_folder(Path(runs), described.name, name)
    with (
        open_run_folder(folder, described, observer or Unobserved()) as (folder, everyone),
        open_host(described.host.type, cache or open_default_cache()) as host,
    ):
        outcome = host(described, folder, everyone, threading.Event())
    found = outcome.result
    return Result(
        run=described,
        folder=folder,
        accuracy=found.accuracy,
        metrics=found.rounds[-1].all_metrics if found.rounds else {},
        rounds=found.rounds,
        models=outcome.models,
    )
