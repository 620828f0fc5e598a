"""The order of samples and the randomness of steps, as pure functions of (seed, round, client, epoch).

The order comes from sorting raw PCG64 output, because NumPy guarantees that stream across versions, unlike
`Generator.permutation`.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.float32]

_DRAWN_AT_ONCE = 2**14


def batch_order(count: int, *, seed: int, round_number: int, client_id: str, epoch: int) -> Indices:
    """The order of a client's `count` samples in one epoch: each index once."""
    # The client id comes last, so that different tuples give different strings.
    keys = _make_stream(f"subfleet batch order 1/{seed}/{round_number}/{epoch}/{client_id}").random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def draw_round_part(count: int, part_count: int, *, seed: int, round_number: int, client_id: str) -> Indices:
    """Draw `part_count` of a client's `count` samples for a round, in ascending order."""
    keys = _make_stream(f"subfleet round part 1/{seed}/{round_number}/{client_id}").random_raw(count)
    return np.sort(np.argsort(keys, kind="stable")[:part_count]).astype(np.int64)


def iter_batches(
    count: int, batch_size: int, *, seed: int, round_number: int, client_id: str, epoch: int
) -> Iterator[tuple[Indices, Mask]]:
    """Batches of one epoch, each of exactly `batch_size` indices.

    Yields:
        Indices of the samples, and a mask that is 1 for real samples. The last batch is padded with repetitions of its
        first sample, with mask 0: with real values, padding cannot cause an overflow that a real sample would not.
    """
    order = batch_order(count, seed=seed, round_number=round_number, client_id=client_id, epoch=epoch)
    for start in range(0, count, batch_size):
        real = order[start : start + batch_size]
        mask = np.zeros(batch_size, np.float32)
        mask[: len(real)] = 1
        yield _pad(real, batch_size), mask


def split_batch(indices: Indices, mask: Mask, size: int) -> Iterator[tuple[Indices, Mask]]:
    """Split a batch into parts of exactly `size` indices, padded like batches; each has at least one real sample.

    Args:
        indices: indices of a batch of `iter_batches`: at least one real sample, then padding.
        mask: mask of the batch.
        size: number of samples of each part.
    """
    if size == len(indices):  # most batches have one part
        yield indices, mask
        return
    real = indices[mask > 0]
    for start in range(0, len(real), size):
        part = real[start : start + size]
        part_mask = np.zeros(size, np.float32)
        part_mask[: len(part)] = 1
        yield _pad(part, size), part_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrigin:
    """Identifies a training step; its randomness follows from these values alone.

    Attributes:
        seed: seed of the run.
        round_number: number of the round.
        client_id: id of the client.
        epoch: epoch of the training.
        step: step of the epoch.
    """

    seed: int
    round_number: int
    client_id: str
    epoch: int
    step: int


def step_random(shape: tuple[int, ...], origin: StepOrigin, *, index: int = 0, part: int = 0) -> Mask:
    """Uniform numbers in [0, 1) for one step, such as for dropout; they are the same when a training is replayed.

    They are multiples of 2**-24, so float32 represents them exactly and none is 1.

    Args:
        shape: shape of the result.
        origin: the step.
        index: distinguishes several random inputs of one step.
        part: part of the batch. The numbers of all parts in order are those of the whole batch, so training in parts
            drops the same units.
    """
    # The client id comes last, as in the order of batches.
    numbers = f"{origin.seed}/{origin.round_number}/{origin.epoch}/{origin.step}/{index}"
    stream = _make_stream(f"subfleet random 1/{numbers}/{origin.client_id}")
    stream.advance(part * math.prod(shape))
    return _draw_uniform(stream, shape)


def path_random(origin: StepOrigin) -> np.random.Generator:
    """The generator that draws the path of one batch; it is the same when a training is replayed."""
    # The client id comes last, as in the order of batches.
    numbers = f"{origin.seed}/{origin.round_number}/{origin.epoch}/{origin.step}"
    return np.random.Generator(_make_stream(f"subfleet path 1/{numbers}/{origin.client_id}"))


def sample_random(
    count: int, columns: int, *, seed: int, round_number: int, client_id: str, epoch: int
) -> npt.NDArray[np.float32]:
    """Uniform numbers in [0, 1) for the samples of one epoch, (count, columns), such as for augmentation.

    A sample's row does not depend on its batch, and is the same when a training is replayed.
    """
    # The client id comes last, as in the order of batches.
    return _draw_uniform(
        _make_stream(f"subfleet sample random 1/{seed}/{round_number}/{epoch}/{client_id}"), (count, columns)
    )


def _make_stream(identity: str) -> np.random.PCG64:
    entropy = int.from_bytes(hashlib.sha256(identity.encode()).digest(), "little")
    return np.random.PCG64(np.random.SeedSequence(entropy))


def _draw_uniform(stream: np.random.PCG64, shape: tuple[int, ...]) -> Mask:
    uniform: Mask = np.empty(math.prod(shape), np.float32)
    # In pieces, because the raw numbers take twice the memory of the result.
    for start in range(0, len(uniform), _DRAWN_AT_ONCE):
        part = uniform[start : start + _DRAWN_AT_ONCE]
        part[:] = stream.random_raw(len(part)) >> np.uint64(40)
    uniform *= np.float32(2**-24)
    return uniform.reshape(shape)


def _pad(real: Indices, size: int) -> Indices:
    if len(real) == size:
        return real
    return np.pad(real, (0, size - len(real)), constant_values=real[0])
