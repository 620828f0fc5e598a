"""Cuts a data set into one file per client and one for the server's evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from subfleet import tasks
from subfleet.emulation.experiments import Experiment
from subfleet.emulation.partitions import PartitionSettings, partition
from subfleet.tasks.catalogue import task_named

__all__ = ["Slices", "cut"]

_MIN_SAMPLES = 40
"""Of each client: enough for a few batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Where the pieces of a data set are.

    Attributes:
        test: the server's held-out samples.
        clients: each client's own samples.
    """

    test: Path
    clients: Mapping[str, Path]


def cut(experiment: Experiment, folder: Path) -> Slices:
    """Write the experiment's pieces into a folder. The same experiment always gives the same pieces.

    Raises:
        ConfigError: the data set is unknown, or cannot be split so.
        DataError: the data set is damaged.
        FileError: a file of the data set is missing, or a piece cannot be written.
        TransportError: the data set has to be downloaded, and its address cannot be reached.
        MissingExtraError: a package that the data set or the split needs is not installed.
    """
    parts = task_named(experiment.dataset).load()
    settings = PartitionSettings(
        name="dirichlet",
        clients=len(experiment.devices),
        seed=experiment.seed,
        alpha=experiment.alpha,
        min_samples=_MIN_SAMPLES,
    )
    folder.mkdir(parents=True, exist_ok=True)
    names = [device.client_id for device in experiment.devices]
    pieces = {
        name: parts.train.take(indices) for name, indices in zip(names, partition(parts.train, settings), strict=True)
    }
    paths = {name: folder / f"{name}.npz" for name in ("test", *pieces)}
    for name, piece in {"test": parts.test, **pieces}.items():
        tasks.write_npz(paths[name], piece)
    return Slices(test=paths.pop("test"), clients=MappingProxyType(paths))
