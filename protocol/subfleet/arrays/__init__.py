"""Tensor containers to NumPy arrays and back, and the arithmetic that a device does on them."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.tensors import Tensor, container_parts, decode_container

__all__ = ["Arrays", "compute_change", "decode_arrays", "encode_arrays", "numpy_dtype", "split_arrays"]

Arrays = Mapping[str, npt.NDArray[np.generic]]

_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "|b1",
        "U8": "|u1",
        "I8": "|i1",
        "I16": "<i2",
        "F16": "<f2",
        "I32": "<i4",
        "F32": "<f4",
        "I64": "<i8",
        "F64": "<f8",
    }
)
_NAMES = MappingProxyType({np.dtype(code): name for name, code in _DTYPES.items()})


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the NumPy type of a container type.

    Raises:
        ProtocolError: NumPy has none (BF16).
    """
    if dtype not in _DTYPES:
        raise ProtocolError(f"dtype is {dtype!r}, but must be one of {list(_DTYPES)}")
    return np.dtype(_DTYPES[dtype])


def encode_arrays(arrays: Arrays, metadata: Mapping[str, str] | None = None) -> bytes:
    """Write arrays as a tensor container."""
    return b"".join(split_arrays(arrays, metadata))


def split_arrays(arrays: Arrays, metadata: Mapping[str, str] | None = None) -> tuple[bytes | memoryview, ...]:
    """Split `encode_arrays` into parts; those of contiguous arrays share their memory."""
    tensors = []
    for name, array in arrays.items():
        contiguous = np.ascontiguousarray(array)
        dtype = _NAMES.get(contiguous.dtype)
        if dtype is None:
            raise ProtocolError(f"array {name!r} has type {array.dtype}, but must be one of {list(_DTYPES)}")
        tensors.append(
            Tensor(name=name, dtype=dtype, shape=array.shape, data=contiguous.reshape(-1).view(np.uint8).data)
        )
    return container_parts(tensors, metadata)


def decode_arrays(buffer: bytes | memoryview) -> dict[str, npt.NDArray[np.generic]]:
    """Read a tensor container as read-only arrays that share its memory.

    Raises:
        ProtocolError: the bytes are not a container, or contain a type that NumPy lacks.
    """
    container = decode_container(buffer)
    arrays = {}
    for name, tensor in container.tensors.items():
        flat = np.frombuffer(tensor.data, dtype=numpy_dtype(tensor.dtype), count=math.prod(tensor.shape))
        try:
            arrays[name] = flat.reshape(tensor.shape)
        except ValueError as error:  # it is empty, but the product of its other sizes is too large
            raise ProtocolError(
                f"tensor {name!r:.80} has shape {tensor.shape}, which is too large for an array"
            ) from error
    return arrays


def compute_change(new: Arrays, old: Arrays, *, in_place: bool = False) -> dict[str, npt.NDArray[np.generic]]:
    """Compute the change of each tensor, new minus old; exactly 0 for unchanged values.

    Args:
        new: the trained tensors.
        old: the received tensors.
        in_place: overwrite the new tensors with the change, so that a device needs no third set of tensors.

    Raises:
        ProtocolError: the two do not name the same tensors with the same shapes.
    """
    if set(new) != set(old) or any(new[name].shape != old[name].shape for name in new):
        raise ProtocolError("the trained tensors and the received tensors must have the same names and shapes")
    return {name: np.subtract(new[name], old[name], out=new[name] if in_place else None) for name in sorted(new)}
