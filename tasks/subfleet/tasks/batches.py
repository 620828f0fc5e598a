"""The order of samples: a function of (seed, round, client, epoch) and of nothing else.

The order is a sort of raw PCG64 output, because NumPy promises that stream for ever; it may change what
`Generator.permutation` draws from one version to the next.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["batch_order", "iter_batches"]

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.float32]


def batch_order(count: int, *, seed: int, round_number: int, client_id: str, epoch: int) -> Indices:
    """The order in which a client sees its `count` samples in one epoch: each index once."""
    # The client id stands last, so that no two different tuples make the same text.
    identity = f"subfleet batch order 1/{seed}/{round_number}/{epoch}/{client_id}".encode()
    entropy = int.from_bytes(hashlib.sha256(identity).digest(), "little")
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def iter_batches(
    count: int, batch_size: int, *, seed: int, round_number: int, client_id: str, epoch: int
) -> Iterator[tuple[Indices, Mask]]:
    """Batches of one epoch, each of exactly `batch_size` indices.

    Yields:
        Indices of the samples, and a mask that is 1 for a real sample. The last batch is filled up with repetitions of
        its first sample, whose mask is 0: real values, so that padding can cause no overflow that a real sample cannot.
    """
    order = batch_order(count, seed=seed, round_number=round_number, client_id=client_id, epoch=epoch)
    for start in range(0, count, batch_size):
        real = order[start : start + batch_size]
        mask = np.zeros(batch_size, np.float32)
        mask[: len(real)] = 1
        yield np.pad(real, (0, batch_size - len(real)), constant_values=real[0]), mask
