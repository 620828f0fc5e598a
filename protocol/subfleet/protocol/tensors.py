"""The tensor container: the safetensors format, read and written with the standard library.

Layout: 8 bytes little-endian header length, a JSON header of names to dtype, shape and byte range, then the raw
little-endian values. Golden tests compare the bytes with the `safetensors` package. Nothing in a container can execute.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from subfleet.protocol.errors import ProtocolError, TooLargeError

# In the order in which the `safetensors` package ranks types; tensors are written in this order.
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "F64": 8, "I64": 8}
)
_RANKS: Mapping[str, int] = MappingProxyType({dtype: rank for rank, dtype in enumerate(DTYPE_BYTES)})
MAX_HEADER_BYTES = 16 * 2**20
MAX_DIMENSIONS = 32
"""The limit of NumPy 1. Without a limit, multiplying the sizes in a malicious header could take hours."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor as a name, a type, a shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ProtocolError(
                f"tensor {self.name!r} has dtype {self.dtype!r}, but must be one of {list(DTYPE_BYTES)}"
            )
        expected = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        if any(size < 0 for size in self.shape) or len(self.data) != expected:
            raise ProtocolError(
                f"tensor {self.name!r} of shape {self.shape} has {len(self.data)} bytes, but must have {expected}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A decoded container. The tensors are views into the decoded buffer; nothing is copied."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def encode_container(tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Write tensors, ordered as the `safetensors` package orders them (highest type first, then by name)."""
    return b"".join(container_parts(tensors, metadata))


def container_parts(
    tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes | memoryview, ...]:
    """Return the parts of `encode_container` without copying tensors, so that a device can write them one by one."""
    ordered = sorted(tensors, key=lambda tensor: (-_RANKS[tensor.dtype], tensor.name))
    text = _write_header([(tensor.name, tensor.dtype, tensor.shape, len(tensor.data)) for tensor in ordered], metadata)
    return (_LENGTH.pack(len(text)), text, *(tensor.data for tensor in ordered))


def measure_container(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Compute the bytes of a container of tensors of 32-bit floating point numbers with these shapes."""
    sizes = [(name, "F32", shape, DTYPE_BYTES["F32"] * math.prod(shape)) for name, shape in sorted(shapes.items())]
    return _LENGTH.size + len(_write_header(sizes)) + sum(size_bytes for *_, size_bytes in sizes)


def _write_header(
    entries: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Write the header of tensors in their order: name, type, shape and bytes of each."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name, dtype, shape, size_bytes in entries:
        if name in header:
            raise ProtocolError(f"tensor name {name!r} occurs twice, but must be unique")
        end = offset + size_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def decode_container(buffer: bytes | memoryview, *, max_bytes: int = 2**32) -> Container:
    """Read a container without copying its values.

    Raises:
        TooLargeError: the buffer or its header is above its limit.
        ProtocolError: the container is truncated, has gaps or overlaps, or is not a container at all.
    """
    view = memoryview(buffer).cast("B")
    if len(view) > max_bytes:
        raise TooLargeError(f"a tensor container is {len(view)} bytes, but must be at most {max_bytes}")
    text, body = _split(view)
    header = _recall_header(text) if len(text) <= _RECALLED_BYTES else _read_header(text)
    tensors: dict[str, Tensor] = {}
    expected = 0
    for start, end, dtype, shape, name in header.entries:
        if start != expected or end > len(body):
            raise ProtocolError(f"tensor {name!r:.80} stands at bytes {start} to {end}, but must start at {expected}")
        tensors[name] = Tensor(name=name, dtype=dtype, shape=shape, data=body[start:end])
        expected = end
    if expected != len(body):
        raise ProtocolError(f"the container holds {len(body)} bytes of values, but its header names {expected}")
    return Container(tensors=MappingProxyType(tensors), metadata=header.metadata)


def _split(view: memoryview) -> tuple[bytes, memoryview]:
    """The bytes of the header, and the values."""
    if len(view) < _LENGTH.size:
        raise ProtocolError(f"a tensor container has {len(view)} bytes, but must have {_LENGTH.size} or more")
    (length,) = _LENGTH.unpack(view[: _LENGTH.size])
    if length > MAX_HEADER_BYTES:
        raise TooLargeError(f"the container's header is {length} bytes, but must be at most {MAX_HEADER_BYTES}")
    if _LENGTH.size + length > len(view):
        raise ProtocolError(f"the container is cut off inside its header of {length} bytes")
    return bytes(view[_LENGTH.size : _LENGTH.size + length]), view[_LENGTH.size + length :]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What a header says, whatever the values: start, end, type, shape and name of each tensor, by position."""

    entries: tuple[tuple[int, int, str, tuple[int, ...], str], ...]
    metadata: Mapping[str, str]


def _read_header(text: bytes) -> _Header:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the container's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError("the container's header must be a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ProtocolError("the container's __metadata__ must be an object of strings")
    entries = sorted(((*_read_entry(name, entry), name) for name, entry in header.items()), key=lambda item: item[:2])
    return _Header(entries=tuple(entries), metadata=MappingProxyType(metadata))


_RECALLED_BYTES = 2**16
"""Larger headers are not remembered: a device has little memory, and anybody may send it a large one."""
_recall_header = lru_cache(maxsize=16)(_read_header)  # all weights and updates of a submodel have the same header


def _read_entry(name: str, entry: object) -> tuple[int, int, str, tuple[int, ...]]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ProtocolError(f"the header entry of {name!r:.80} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ProtocolError(f"tensor {name!r:.80} has dtype {dtype!r:.80}, but must be one of {list(DTYPE_BYTES)}")
    if not _read_sizes(shape) or not _read_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ProtocolError(f"tensor {name!r:.80} has a shape or byte range that is not made of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"tensor {name!r:.80} has {len(shape)} dimensions, but must have at most {MAX_DIMENSIONS}")
    return offsets[0], offsets[1], dtype, tuple(shape)


def _read_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**48 for size in value)
