"""Who gets which samples: partitions of a data set over clients, by flwr-datasets."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ConfigError, MissingExtraError
from subfleet.tasks import Dataset
from subfleet.tasks.dataset import NO_OWNER

__all__ = ["PARTITIONS", "PartitionSettings", "partition"]

Indices = npt.NDArray[np.int64]
_INDEX, _KEY = "index", "key"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSettings:
    """How samples are split over clients.

    Attributes:
        name: one of `PARTITIONS`.
        clients: parts, 1 or more.
        seed: of the draw, 0 or more.
        alpha: of "dirichlet": concentration, above 0; the smaller, the more unequal.
        min_samples: of "dirichlet": the draw is repeated until each client has this many.
        classes_per_client: of "pathological".
        shards_per_client: of "shard": pieces of samples in the order of their class.

    Raises:
        ConfigError: the name is unknown, or a number is out of its range.
    """

    name: str
    clients: int
    seed: int = 0
    alpha: float = 0.5
    min_samples: int = 1
    classes_per_client: int = 2
    shards_per_client: int = 2

    def __post_init__(self) -> None:
        if self.name not in PARTITIONS:
            raise ConfigError(f"there is no partition {self.name!r:.200}; choose one of: {', '.join(PARTITIONS)}")
        for field in ("clients", "classes_per_client", "shards_per_client"):
            if getattr(self, field) < 1:
                raise ConfigError(f"the partition's {field} is {getattr(self, field)}, but must be 1 or more")
        if self.seed < 0 or self.min_samples < 0:
            raise ConfigError(f"seed and min_samples are {self.seed} and {self.min_samples}, but must be 0 or more")
        if not 0 < self.alpha < float("inf"):
            raise ConfigError(f"the partition's alpha is {self.alpha}, but must be a number above 0")


def partition(dataset: Dataset, settings: PartitionSettings) -> tuple[Indices, ...]:
    """Split a data set over clients: each sample goes to exactly one of them, and each client gets one or more.

    Args:
        dataset: with one class for each sample, except for "iid" and "natural".
        settings: how.

    Returns:
        For each client the indices of its samples, in ascending order; the same for the same settings.

    Raises:
        MissingExtraError: flwr-datasets is not installed.
        ConfigError: the data set cannot be split so.
        DataError: samples have no class.
    """
    if len(dataset) < settings.clients:
        raise ConfigError(f"{len(dataset)} samples cannot be split over {settings.clients} clients; use fewer clients")
    return tuple(np.sort(np.asarray(part, np.int64)) for part in PARTITIONS[settings.name](dataset, settings))


def _iid(dataset: Dataset, settings: PartitionSettings) -> list[Indices]:
    """Equal shares of a shuffled data set."""
    order = _shuffled(len(dataset), settings)
    partitioner = _partitioners().IidPartitioner(num_partitions=settings.clients)
    return _parts(partitioner, order, np.zeros(len(order), np.int64), settings)


def _dirichlet(dataset: Dataset, settings: PartitionSettings) -> list[Indices]:
    """Each class is divided in Dirichlet-distributed shares (Hsu et al. 2019)."""
    partitioner = _partitioners().DirichletPartitioner(
        num_partitions=settings.clients,
        partition_by=_KEY,
        alpha=float(settings.alpha),
        min_partition_size=max(settings.min_samples, 1),
        seed=settings.seed,
    )
    return _parts(partitioner, np.arange(len(dataset)), dataset.classes(), settings)


def _pathological(dataset: Dataset, settings: PartitionSettings) -> list[Indices]:
    """Each client has samples of exactly so many classes (McMahan et al. 2017, section 3)."""
    classes = len(np.unique(dataset.classes()))
    if settings.clients < classes:
        raise ConfigError(
            f"{settings.clients} clients leave samples of {classes} classes to nobody; use {classes} clients or more, "
            "or the partition 'shard'"
        )
    order = _shuffled(len(dataset), settings)
    partitioner = _partitioners().PathologicalPartitioner(
        num_partitions=settings.clients,
        partition_by=_KEY,
        num_classes_per_partition=settings.classes_per_client,
        # Every class is the first one of some client, so that every sample is given away.
        class_assignment_mode="first-deterministic",
        seed=settings.seed,
    )
    return _parts(partitioner, order, dataset.classes()[order], settings)


def _shard(dataset: Dataset, settings: PartitionSettings) -> list[Indices]:
    """Samples in the order of their class are cut into equal pieces, which are dealt out (McMahan et al. 2017)."""
    order = _shuffled(len(dataset), settings)
    partitioner = _partitioners().ShardPartitioner(
        num_partitions=settings.clients,
        partition_by=_KEY,
        # Rounded up and with the last piece kept, however short, so that every sample is given away.
        shard_size=-(-len(dataset) // (settings.clients * settings.shards_per_client)),
        keep_incomplete_shard=True,
        seed=settings.seed,
    )
    return _parts(partitioner, order, dataset.classes()[order], settings)


def _natural(dataset: Dataset, settings: PartitionSettings) -> list[Indices]:
    """Each owner's samples stay together; owners are dealt out in a drawn order, and what is nobody's one by one."""
    if dataset.owners is None:
        raise ConfigError("the data set's samples have no owners, so there is no natural partition; choose another one")
    owned = np.flatnonzero(dataset.owners != NO_OWNER)
    owners = len(np.unique(dataset.owners[owned]))
    if owners < settings.clients:
        raise ConfigError(f"{owners} owners cannot be split over {settings.clients} clients; use {owners} or fewer")
    # Groups of one owner each, because NaturalIdPartitioner draws a progress bar.
    partitioner = _partitioners().GroupedNaturalIdPartitioner(partition_by=_KEY, group_size=1, sort_unique_ids=True)
    of_owner = _parts(partitioner, owned, dataset.owners[owned], settings, count=owners)
    nobodys = np.random.default_rng(settings.seed).permutation(np.flatnonzero(dataset.owners == NO_OWNER))
    dealt = _shuffled(owners, settings)
    return [
        np.concatenate(
            [*(of_owner[owner] for owner in dealt[client :: settings.clients]), nobodys[client :: settings.clients]]
        )
        for client in range(settings.clients)
    ]


PARTITIONS: Mapping[str, Callable[[Dataset, PartitionSettings], list[Indices]]] = MappingProxyType(
    {"iid": _iid, "dirichlet": _dirichlet, "pathological": _pathological, "shard": _shard, "natural": _natural}
)


def _partitioners() -> Any:
    try:
        from flwr_datasets import partitioner
    except ImportError as error:
        raise MissingExtraError("flwr-datasets", "emulation") from error
    return partitioner


def _shuffled(count: int, settings: PartitionSettings) -> Indices:
    return np.random.default_rng(settings.seed).permutation(count)


def _parts(
    partitioner: Any, indices: Indices, keys: Indices, settings: PartitionSettings, *, count: int = 0
) -> list[Indices]:
    """The parts that a partitioner of flwr-datasets makes of samples with keys (classes or owners)."""
    from datasets import Dataset as Table

    partitioner.dataset = Table.from_dict({_KEY: keys, _INDEX: indices})
    try:
        with warnings.catch_warnings():
            # They warn whenever they draw again, which is what min_samples asks for, and of what they themselves use.
            warnings.simplefilter("ignore")
            # The slice reads a column at once; as an array it would be read row by row.
            parts = [partitioner.load_partition(part)[_INDEX][:] for part in range(count or settings.clients)]
    except ValueError as error:
        raise ConfigError(
            f"{len(indices)} samples cannot be split over {settings.clients} clients by {settings.name!r} with "
            f"alpha {settings.alpha:g}, {settings.min_samples} samples or more, {settings.classes_per_client} classes "
            f"and {settings.shards_per_client} shards each: use fewer clients or another number ({error})"
        ) from error
    return [np.asarray(part, np.int64) for part in parts]
