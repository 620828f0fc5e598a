"""Partitions of a data set over clients, by flwr-datasets."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ConfigError, MissingExtraError
from subfleet.protocol.silence import import_silently
from subfleet.settings.samples import Partition, PartitionSettings
from subfleet.tasks import Dataset
from subfleet.tasks.dataset import NO_OWNER

Indices = npt.NDArray[np.int64]
_INDEX, _KEY = "index", "key"
_QUANTILES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """The settings, the number of parts and the seed of a partition."""

    settings: PartitionSettings
    clients: int
    seed: int


def partition(dataset: Dataset, settings: PartitionSettings, *, clients: int, seed: int) -> tuple[Indices, ...]:
    """Partition a data set: each sample goes to exactly one client, and each client gets at least one sample.

    Args:
        dataset: with one class or number for each sample, except for "iid" and "natural"; each decile of numbers is
            treated as a class.
        settings: of the partition.
        clients: number of clients, at least 1.
        seed: at least 0.

    Returns:
        The indices of each client's samples in ascending order; the same for the same arguments.

    Raises:
        MissingExtraError: flwr-datasets is not installed.
        ConfigError: the data set cannot be partitioned with these settings.
        DataError: samples have no class.
    """
    if clients < 1 or seed < 0:
        raise ConfigError(f"clients and seed are {clients} and {seed}, but must be 1 or more and 0 or more")
    if len(dataset) < clients:
        raise ConfigError(f"{len(dataset)} samples cannot be split over {clients} clients; use fewer clients")
    split = _Split(settings=settings, clients=clients, seed=seed)
    return tuple(np.sort(np.asarray(part, np.int64)) for part in _PARTITIONS[settings.name](dataset, split))


def _split_evenly(dataset: Dataset, split: _Split) -> list[Indices]:
    """Equal parts of a shuffled data set."""
    order = _shuffle(len(dataset), split)
    partitioner = _import().IidPartitioner(num_partitions=split.clients)
    return _load_parts(partitioner, order, np.zeros(len(order), np.int64), split)


def _split_by_dirichlet(dataset: Dataset, split: _Split) -> list[Indices]:
    """Each class is divided into Dirichlet-distributed fractions (Hsu et al. 2019)."""
    partitioner = _import().DirichletPartitioner(
        num_partitions=split.clients,
        partition_by=_KEY,
        alpha=float(split.settings.alpha),
        min_partition_size=max(split.settings.min_samples, 1),
        seed=split.seed,
    )
    return _load_parts(partitioner, np.arange(len(dataset)), _find_classes(dataset), split)


def _split_by_class(dataset: Dataset, split: _Split) -> list[Indices]:
    """Each client has samples of `classes_per_client` classes (McMahan et al. 2017, section 3)."""
    classes = len(np.unique(_find_classes(dataset)))
    if split.clients < classes:
        raise ConfigError(
            f"{split.clients} clients are too few for a pathological partition of {classes} classes; use {classes} "
            "clients or more, or the partition 'shard'"
        )
    order = _shuffle(len(dataset), split)
    partitioner = _import().PathologicalPartitioner(
        num_partitions=split.clients,
        partition_by=_KEY,
        num_classes_per_partition=split.settings.classes_per_client,
        # Every class is the first one of some client, so every sample is assigned.
        class_assignment_mode="first-deterministic",
        seed=split.seed,
    )
    return _load_parts(partitioner, order, _find_classes(dataset)[order], split)


def _split_by_shards(dataset: Dataset, split: _Split) -> list[Indices]:
    """Samples sorted by class are cut into equal shards, which are dealt to clients (McMahan et al. 2017)."""
    order = _shuffle(len(dataset), split)
    partitioner = _import().ShardPartitioner(
        num_partitions=split.clients,
        partition_by=_KEY,
        # Rounded up, and an incomplete last shard is kept, so every sample is assigned.
        shard_size=-(-len(dataset) // (split.clients * split.settings.shards_per_client)),
        keep_incomplete_shard=True,
        seed=split.seed,
    )
    return _load_parts(partitioner, order, _find_classes(dataset)[order], split)


def _find_classes(dataset: Dataset) -> Indices:
    """The class of each sample; for numbers, the decile."""
    labels = dataset.labels
    if labels.dtype == np.int64 or labels.size != len(labels):
        return dataset.classes()
    numbers = labels.reshape(-1)
    borders = np.quantile(numbers, np.arange(1, _QUANTILES) / _QUANTILES)
    return np.searchsorted(borders, numbers, side="right").astype(np.int64)


def _split_by_owner(dataset: Dataset, split: _Split) -> list[Indices]:
    """Samples of one owner stay together. Owners are dealt in random order, and samples without owner one by one."""
    if dataset.owners is None:
        raise ConfigError("the samples have no owners, so there is no natural partition; choose another one")
    owned = np.flatnonzero(dataset.owners != NO_OWNER)
    owners = len(np.unique(dataset.owners[owned]))
    if owners < split.clients:
        raise ConfigError(
            f"{owners} owners cannot be split over {split.clients} clients; use {owners} clients or fewer"
        )
    # Groups of one owner each, because NaturalIdPartitioner draws a progress bar.
    partitioner = _import().GroupedNaturalIdPartitioner(partition_by=_KEY, group_size=1, sort_unique_ids=True)
    by_owner = _load_parts(partitioner, owned, dataset.owners[owned], split, count=owners)
    unowned = np.random.default_rng(split.seed).permutation(np.flatnonzero(dataset.owners == NO_OWNER))
    order = _shuffle(owners, split)
    return [
        np.concatenate(
            [*(by_owner[owner] for owner in order[client :: split.clients]), unowned[client :: split.clients]]
        )
        for client in range(split.clients)
    ]


_PARTITIONS: Mapping[Partition, Callable[[Dataset, _Split], list[Indices]]] = MappingProxyType(
    {
        "iid": _split_evenly,
        "dirichlet": _split_by_dirichlet,
        "pathological": _split_by_class,
        "shard": _split_by_shards,
        "natural": _split_by_owner,
    }
)


def _import() -> Any:
    try:
        return import_silently("flwr_datasets.partitioner")
    except ImportError as error:
        raise MissingExtraError("flwr-datasets", "emulation") from error


def _shuffle(count: int, split: _Split) -> Indices:
    return np.random.default_rng(split.seed).permutation(count)


def _load_parts(partitioner: Any, indices: Indices, keys: Indices, split: _Split, *, count: int = 0) -> list[Indices]:
    """The parts that a partitioner of flwr-datasets makes of samples with keys: classes or owners."""
    partitioner.dataset = import_silently("datasets").Dataset.from_dict({_KEY: keys, _INDEX: indices})
    try:
        with warnings.catch_warnings():
            # It warns whenever it draws again to reach min_samples, and about packages that it uses.
            warnings.simplefilter("ignore")
            # The slice reads the whole column at once; converting it to an array would read it row by row.
            parts = [partitioner.load_partition(part)[_INDEX][:] for part in range(count or split.clients)]
    except ValueError as error:
        settings = split.settings
        raise ConfigError(
            f"{len(indices)} samples cannot be split over {split.clients} clients by {settings.name!r} with alpha "
            f"{settings.alpha:g}, min_samples {settings.min_samples}, classes_per_client "
            f"{settings.classes_per_client} and shards_per_client {settings.shards_per_client}; use fewer clients or "
            f"change one of these ({error})"
        ) from error
    return [np.asarray(part, np.int64) for part in parts]
