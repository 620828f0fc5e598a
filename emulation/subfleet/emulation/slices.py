"""Cuts a data set into one file per client and one for the server's evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from subfleet import tasks
from subfleet.emulation.experiments import Experiment
from subfleet.emulation.partitions import dirichlet_partition, hold_out
from subfleet.protocol.errors import ConfigError

__all__ = ["DATASETS", "Slices", "cut"]

DATASETS: Mapping[str, Callable[[], tasks.Dataset]] = MappingProxyType({"digits": tasks.digits})


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
        MissingExtraError: a package that the data set or the split needs is not installed.
    """
    if experiment.dataset not in DATASETS:
        raise ConfigError(f"there is no data set {experiment.dataset!r}; choose one of: {', '.join(sorted(DATASETS))}")
    dataset = DATASETS[experiment.dataset]()
    train, test = hold_out(dataset.classes(), fraction=experiment.test_fraction, seed=experiment.seed)
    parts = dirichlet_partition(
        dataset.classes()[train], clients=len(experiment.devices), alpha=experiment.alpha, seed=experiment.seed
    )
    folder.mkdir(parents=True, exist_ok=True)
    names = [device.client_id for device in experiment.devices]
    owned = {"test": test, **{name: train[part] for name, part in zip(names, parts, strict=True)}}
    paths = {name: folder / f"{name}.npz" for name in owned}
    for name, indices in owned.items():
        tasks.write_npz(paths[name], tasks.Dataset(inputs=dataset.inputs[indices], labels=dataset.labels[indices]))
    return Slices(test=paths.pop("test"), clients=MappingProxyType(paths))
