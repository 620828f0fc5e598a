"""Who gets which samples: partitions of a data set over clients, by flwr-datasets."""

import warnings

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ConfigError, MissingExtraError

__all__ = ["dirichlet_partition", "hold_out"]

Indices = npt.NDArray[np.int64]


def hold_out(labels: npt.NDArray[np.int64], *, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Split into training and test indices, with the same share of every class in both.

    Args:
        labels: class of each sample.
        fraction: share of each class that goes to the test set, between 0 and 1.
        seed: of the draw.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"the held-out fraction is {fraction}, but must be above 0 and below 1")
    generator = np.random.default_rng(seed)
    test: list[Indices] = []
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        test.append(members[: round(fraction * len(members))])
    test_indices = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), test_indices), test_indices


def dirichlet_partition(
    labels: npt.NDArray[np.int64], *, clients: int, alpha: float, seed: int, min_samples: int = 40
) -> tuple[Indices, ...]:
    """Split samples over clients with Dirichlet-distributed class shares: the smaller alpha, the more unequal.

    Args:
        labels: class of each sample.
        clients: number of parts, 2 or more.
        alpha: concentration, above 0.
        seed: of the draw.
        min_samples: the draw is repeated until each client has this many.

    Raises:
        MissingExtraError: flwr-datasets is not installed.
        ConfigError: no draw gives every client min_samples.
    """
    try:
        from datasets import Dataset
        from flwr_datasets.partitioner import DirichletPartitioner
    except ImportError as error:
        raise MissingExtraError("flwr-datasets", "emulation") from error
    partitioner = DirichletPartitioner(
        num_partitions=clients, partition_by="label", alpha=alpha, min_partition_size=min_samples, seed=seed
    )
    partitioner.dataset = Dataset.from_dict({"label": labels.tolist(), "index": list(range(len(labels)))})
    try:
        with warnings.catch_warnings():
            # It warns whenever it draws again; drawing again is what min_samples asks for.
            warnings.simplefilter("ignore", UserWarning)
            parts = [partitioner.load_partition(client)["index"] for client in range(clients)]
    except ValueError as error:
        raise ConfigError(
            f"{len(labels)} samples cannot be split over {clients} clients with {min_samples} or more each: "
            "use fewer clients or a larger alpha"
        ) from error
    return tuple(np.sort(np.asarray(part, dtype=np.int64)) for part in parts)
