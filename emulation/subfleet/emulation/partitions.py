"""Who gets which samples: partitions of a data set over clients, by flwr-datasets."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ConfigError, MissingExtraError
from subfleet.protocol.silence import imported
from subfleet.settings.samples import Partition, PartitionSettings
from subfleet.tasks import Dataset
from subfleet.tasks.dataset import NO_OWNER

Indices = npt.NDArray[np.int64]
_INDEX, _KEY = "index", "key"
_TENTHS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """What a partition is made by."""

    settings: PartitionSettings
    clients: int
    seed: int


def partition(dataset: Dataset, settings: PartitionSettings, *, clients: int, seed: int) -> tuple[Indices, ...]:
    """Split a data set over clients: each sample goes to exactly one of them, and each client gets one or more.

    Args:
        dataset: with one class or number for each sample, except for "iid" and "natural"; numbers are split as if each
            tenth of them were a class.
        settings: how.
        clients: parts, 1 or more.
        seed: of the draw, 0 or more.

    Returns:
        For each client the indices of its samples, in ascending order; the same for the same settings.

    Raises:
        MissingExtraError: flwr-datasets is not installed.
        ConfigError: the data set cannot be split so.
        DataError: samples have no class.
    """
    if clients < 1 or seed < 0:
        raise ConfigError(f"clients and seed are {clients} and {seed}, but must be 1 or more and 0 or more")
    if len(dataset) < clients:
        raise ConfigError(f"{len(dataset)} samples cannot be split over {clients} clients; use fewer clients")
    split = _Split(settings=settings, clients=clients, seed=seed)
    return tuple(np.sort(np.asarray(part, np.int64)) for part in _PARTITIONS[settings.name](dataset, split))


def _iid(dataset: Dataset, split: _Split) -> list[Indices]:
    """Equal shares of a shuffled data set."""
    order = _shuffled(len(dataset), split)
    partitioner = _partitioners().IidPartitioner(num_partitions=split.clients)
    return _parts(partitioner, order, np.zeros(len(order), np.int64), split)


def _dirichlet(dataset: Dataset, split: _Split) -> list[Indices]:
    """Each class is divided in Dirichlet-distributed shares (Hsu et al. 2019)."""
    partitioner = _partitioners().DirichletPartitioner(
        num_partitions=split.clients,
        partition_by=_KEY,
        alpha=float(split.settings.alpha),
        min_partition_size=max(split.settings.min_samples, 1),
        seed=split.seed,
    )
    return _parts(partitioner, np.arange(len(dataset)), _classes(dataset), split)


def _pathological(dataset: Dataset, split: _Split) -> list[Indices]:
    """Each client has samples of exactly so many classes (McMahan et al. 2017, section 3)."""
    classes = len(np.unique(_classes(dataset)))
    if split.clients < classes:
        raise ConfigError(
            f"{split.clients} clients leave samples of {classes} classes to nobody; use {classes} clients or more, "
            "or the partition 'shard'"
        )
    order = _shuffled(len(dataset), split)
    partitioner = _partitioners().PathologicalPartitioner(
        num_partitions=split.clients,
        partition_by=_KEY,
        num_classes_per_partition=split.settings.classes_per_client,
        # Every class is the first one of some client, so that every sample is given away.
        class_assignment_mode="first-deterministic",
        seed=split.seed,
    )
    return _parts(partitioner, order, _classes(dataset)[order], split)


def _shard(dataset: Dataset, split: _Split) -> list[Indices]:
    """Samples in the order of their class are cut into equal pieces, which are dealt out (McMahan et al. 2017)."""
    order = _shuffled(len(dataset), split)
    partitioner = _partitioners().ShardPartitioner(
        num_partitions=split.clients,
        partition_by=_KEY,
        # Rounded up and with the last piece kept, however short, so that every sample is given away.
        shard_size=-(-len(dataset) // (split.clients * split.settings.shards_per_client)),
        keep_incomplete_shard=True,
        seed=split.seed,
    )
    return _parts(partitioner, order, _classes(dataset)[order], split)


def _classes(dataset: Dataset) -> Indices:
    """The class of each sample; of numbers the tenth in which each lies, from the smallest."""
    labels = dataset.labels
    if labels.dtype == np.int64 or labels.size != len(labels):
        return dataset.classes()
    numbers = labels.reshape(-1)
    borders = np.quantile(numbers, np.arange(1, _TENTHS) / _TENTHS)
    return np.searchsorted(borders, numbers, side="right").astype(np.int64)


def _natural(dataset: Dataset, split: _Split) -> list[Indices]:
    """Each owner's samples stay together; owners are dealt out in a drawn order, and what is nobody's one by one."""
    if dataset.owners is None:
        raise ConfigError("the data set's samples have no owners, so there is no natural partition; choose another one")
    owned = np.flatnonzero(dataset.owners != NO_OWNER)
    owners = len(np.unique(dataset.owners[owned]))
    if owners < split.clients:
        raise ConfigError(f"{owners} owners cannot be split over {split.clients} clients; use {owners} or fewer")
    # Groups of one owner each, because NaturalIdPartitioner draws a progress bar.
    partitioner = _partitioners().GroupedNaturalIdPartitioner(partition_by=_KEY, group_size=1, sort_unique_ids=True)
    of_owner = _parts(partitioner, owned, dataset.owners[owned], split, count=owners)
    nobodys = np.random.default_rng(split.seed).permutation(np.flatnonzero(dataset.owners == NO_OWNER))
    dealt = _shuffled(owners, split)
    return [
        np.concatenate(
            [*(of_owner[owner] for owner in dealt[client :: split.clients]), nobodys[client :: split.clients]]
        )
        for client in range(split.clients)
    ]


_PARTITIONS: Mapping[Partition, Callable[[Dataset, _Split], list[Indices]]] = MappingProxyType(
    {"iid": _iid, "dirichlet": _dirichlet, "pathological": _pathological, "shard": _shard, "natural": _natural}
)


def _partitioners() -> Any:
    try:
        return imported("flwr_datasets.partitioner")
    except ImportError as error:
        raise MissingExtraError("flwr-datasets", "emulation") from error


def _shuffled(count: int, split: _Split) -> Indices:
    return np.random.default_rng(split.seed).permutation(count)


def _parts(partitioner: Any, indices: Indices, keys: Indices, split: _Split, *, count: int = 0) -> list[Indices]:
    """The parts that a partitioner of flwr-datasets makes of samples with keys (classes or owners)."""
    partitioner.dataset = imported("datasets").Dataset.from_dict({_KEY: keys, _INDEX: indices})
    try:
        with warnings.catch_warnings():
            # They warn whenever they draw again, which is what min_samples asks for, and of what they themselves use.
            warnings.simplefilter("ignore")
            # The slice reads a column at once; as an array it would be read row by row.
            parts = [partitioner.load_partition(part)[_INDEX][:] for part in range(count or split.clients)]
    except ValueError as error:
        chosen = split.settings
        raise ConfigError(
            f"{len(indices)} samples cannot be split over {split.clients} clients by {chosen.name!r} with alpha "
            f"{chosen.alpha:g}, {chosen.min_samples} samples or more, {chosen.classes_per_client} classes and "
            f"{chosen.shards_per_client} shards each: use fewer clients or another number ({error})"
        ) from error
    return [np.asarray(part, np.int64) for part in parts]
