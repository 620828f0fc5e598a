"""Codecs that compress the change of a training.

A codec is named by its settings in `subfleet.protocol.update_codecs`. A tensor that it makes smaller is one row of
bytes in the update's container; every other tensor is as it was. Nothing that is read decides how much memory is taken:
the reader knows every tensor's shape and so the size of its bytes.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.arrays import Arrays
from subfleet.arrays.codecs.coders import Coder, Floats, PlainCoder, QsgdCoder, TopKCoder, Uniform
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.update_codecs import AnyUpdateCodec, Qsgd, TopK, TopKQsgd, Uncompressed

__all__ = ["UPDATE_CODECS", "Floats", "count_encoded_bytes", "decode_change", "draw_rounding_numbers", "encode_changes"]

_FLOAT_BYTES = 4

UPDATE_CODECS: Mapping[str, Callable[[Any], Coder]] = MappingProxyType(
    {
        Uncompressed.TYPE: lambda settings: PlainCoder(),
        Qsgd.TYPE: lambda settings: QsgdCoder(settings.levels, settings.bucket_size),
        TopK.TYPE: lambda settings: TopKCoder(settings.fraction, PlainCoder()),
        TopKQsgd.TYPE: lambda settings: TopKCoder(settings.fraction, QsgdCoder(settings.levels, settings.bucket_size)),
    }
)
"""By the name that configurations and tasks give a codec, what makes the coder of its settings."""


def count_encoded_bytes(codec: AnyUpdateCodec, size: int) -> int:
    """Compute the size of a tensor's encoded change, without the container's header."""
    return min(_coder(codec).count_bytes(size), size * _FLOAT_BYTES)


def encode_changes(
    codec: AnyUpdateCodec, changes: Arrays, *, exact: Collection[str], uniform: Callable[[str], Uniform]
) -> dict[str, npt.NDArray[np.generic]]:
    """Write the change of every tensor.

    Args:
        codec: how.
        changes: finite float32, by tensor name.
        exact: tensors that are no weights, such as running statistics: they stay as they are.
        uniform: gives each tensor random numbers of its own; see `draw_rounding_numbers`.

    Returns:
        By the same names float32 of the same shape, or bytes (`count_encoded_bytes`,).

    Raises:
        TrainingError: a change is too large to be written so.
    """
    coder = _coder(codec)
    return {
        name: change
        if _stays(coder, change.size, exact=name in exact)
        else coder.encode(np.asarray(change, np.float32).reshape(-1), uniform(name))
        for name, change in changes.items()
    }


def decode_change(
    codec: AnyUpdateCodec, name: str, encoded: npt.NDArray[np.generic], shape: tuple[int, ...], *, exact: bool
) -> Floats:
    """Read the change of a tensor.

    Args:
        codec: how it must be written.
        name: of the tensor, for messages.
        encoded: what came.
        shape: that the tensor has.
        exact: whether it is no weight, so that no codec writes it.

    Returns:
        float32 of that shape; what was not encoded shares the memory of `encoded`.

    Raises:
        ProtocolError: it has another type or size, or holds what the codec never writes.
    """
    coder, size = _coder(codec), math.prod(shape)
    stays = _stays(coder, size, exact=exact)
    dtype, expected = (np.float32, shape) if stays else (np.uint8, (coder.count_bytes(size),))
    if encoded.dtype != dtype or encoded.shape != expected:
        raise ProtocolError(
            f"tensor {name!r:.80} of the update is {encoded.dtype} of shape {encoded.shape}, but must be "
            f"{np.dtype(dtype)} of shape {expected}"
        )
    if stays:
        return encoded.view(np.float32)
    try:
        return coder.decode(encoded.view(np.uint8), size).reshape(shape)
    except ProtocolError as error:
        raise ProtocolError(f"tensor {name!r:.80} of the update cannot be read: {error}") from error


def draw_rounding_numbers(tensor: str, *, seed: int, round_number: int, client_id: str) -> Uniform:
    """Draw the random numbers that round a tensor's change; the same task gives the same numbers."""
    # Neither a number nor a client's id holds a slash, so that no two different tensors have the same text.
    text = f"subfleet rounding 1/{seed}/{round_number}/{client_id}/{tensor}"
    entropy = int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")
    stream = np.random.PCG64(np.random.SeedSequence(entropy))

    def uniform(count: int) -> npt.NDArray[np.float64]:
        # From raw output, as NumPy may change what a generator draws: its highest 53 bits as a fraction.
        numbers: npt.NDArray[np.float64] = (stream.random_raw(count) >> np.uint64(11)) * 2.0**-53
        return numbers

    return uniform


def _coder(codec: AnyUpdateCodec) -> Coder:
    return UPDATE_CODECS[codec.TYPE](codec)


def _stays(coder: Coder, size: int, *, exact: bool) -> bool:
    return exact or coder.count_bytes(size) >= size * _FLOAT_BYTES
