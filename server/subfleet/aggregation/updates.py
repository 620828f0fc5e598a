"""Stored updates: checked on arrival, read again for aggregation."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from torch import Tensor, from_numpy

from subfleet.arrays import Arrays, decode_arrays, encode_arrays
from subfleet.arrays.codecs import Floats
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.elastic.update_form import UpdateForm
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.outliers import ChangeSize
from subfleet.transport.blob_store import BlobStore

_HELD: Mapping[str, str] = MappingProxyType({"weights": "held_weights", "statistics": "held_statistics"})
"""From a kind of tensor, the kind of its values before the change."""


def encode_submodel(
    network: Network, architecture: Architecture, state: Mapping[str, Tensor], *, frozen: bool | None = None
) -> bytes:
    """A submodel's weights as a tensor container; equal models and architectures give equal bytes.

    Args:
        network: the network.
        architecture: of the submodel.
        state: tensors of the whole network.
        frozen: True encodes only the frozen tensors, False only the trained ones, None all.
    """
    weights = {
        name: tensor.cpu().numpy()
        for name, tensor in extract(network, architecture, state).items()
        if frozen is None or network.tensors[name].frozen == frozen
    }
    return encode_arrays(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Magnitude:
    """How large the values of a tensor are.

    Attributes:
        largest_change: the largest change of an element that can be summed.
        mean_square: of its elements.
    """

    largest_change: float
    mean_square: float = 0.0


def check_update(
    form: UpdateForm,
    path: Path,
    *,
    magnitudes: Mapping[str, Magnitude],
    own: Set[str] = frozenset(),
    largest: dict[str, float] | None = None,
) -> ChangeSize:
    """Refuse an update that cannot be aggregated; else return how far it moves the weights that it trained.

    Args:
        form: that it must have.
        path: of its container.
        magnitudes: of the model's tensors, by name.
        own: names of the client's personalised tensors.
        largest: gets the largest absolute change of each tensor.

    Raises:
        ProtocolError: it is no container, has other tensors, shapes or types, or has values that are not finite, above
            their limit or not written by its codec.
        FileError: it cannot be read.
    """
    arrays = decode_arrays(read_stored(path))
    if set(arrays) != set(form.shapes):
        odd = sorted(set(arrays) ^ set(form.shapes))
        raise ProtocolError(f"the update contains other tensors than its submodel, such as {odd[0]!r:.80}")
    squares = {kind: list[tuple[float, int]]() for kind in (*_HELD, *_HELD.values(), "own")}
    for name in form.shapes:
        change, magnitude = form.decode(name, arrays[name]), magnitudes[name]
        reached = _check_limit(name, change, magnitude.largest_change)
        if largest is not None:
            largest[name] = reached
        kind = "own" if name in own else "statistics" if name in form.exact else "weights"
        flat = change.reshape(-1)
        squares[kind].append((float(np.einsum("i,i->", flat, flat, dtype=np.float64)), flat.size))
        if kind in _HELD:
            squares[_HELD[kind]].append((magnitude.mean_square * flat.size, flat.size))
    return ChangeSize(**{kind: _root_mean(parts) for kind, parts in squares.items()})


def measure_largest(form: UpdateForm, path: Path) -> dict[str, float]:
    """The largest absolute change of each tensor of a stored update; see `check_update` for the errors."""
    arrays = decode_arrays(read_stored(path))
    return {name: _find_largest(form.decode(name, arrays[name])) for name in form.shapes}


def _find_largest(change: Floats) -> float:
    return max(-float(change.min()), float(change.max()))


def _check_limit(name: str, change: Floats, limit: float) -> float:
    largest = _find_largest(change)
    # Written so that NaN is refused too.
    if not largest <= limit:
        raise ProtocolError(
            f"tensor {name!r} of the update contains a change of {largest}, but must be finite and at most {limit:g}"
        )
    return largest


def _root_mean(parts: Sequence[tuple[float, int]]) -> float:
    count = sum(size for _, size in parts)
    return math.sqrt(math.fsum(square for square, _ in parts) / count) if count else 0.0


def open_update(
    form: UpdateForm,
    blobs: BlobStore,
    ref: BlobRef,
    *,
    scale: float = 1.0,
    own: Set[str] = frozenset(),
    mapped: bool = False,
) -> Mapping[str, Tensor]:
    """The changes of a stored update by tensor, each decoded when it is used.

    Args:
        form: of the update.
        blobs: where it is stored.
        ref: of its container.
        scale: factor of its changes, above 0 and at most 1; with 1, they keep their bits.
        own: names of the client's personalised tensors, which are not scaled.
        mapped: whether the file is mapped into memory, so that unused changes take none; a disk that fails while they
            are used then ends the process.

    Raises:
        FileError: it cannot be read, or is not what was stored.
        ProtocolError: it is no container; or, when a change is used, it is not what the codec writes.
    """
    content = read_stored(blobs.path(ref), mapped=mapped)
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise FileError(f"the stored update {ref.sha256[:16]} is damaged on this disk")
    return _Changes(form, decode_arrays(content), scale, own)


class _Changes(Mapping[str, Tensor]):
    """See `open_update`."""

    def __init__(self, form: UpdateForm, arrays: Arrays, scale: float, own: Set[str]) -> None:
        self._form = form
        self._arrays = arrays
        self._scale = scale
        self._own = own

    def __getitem__(self, name: str) -> Tensor:
        change = from_numpy(self._form.decode(name, self._arrays[name]))
        return change if self._scale == 1 or name in self._own else change * self._scale

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def read_stored(path: Path, *, mapped: bool = False) -> memoryview:
    """Read the file of a stored answer, or map it. The memory is writable, as torch requires; the file is not written.

    Raises:
        FileError: it cannot be read.
        ProtocolError: it is empty and is to be mapped.
    """
    try:
        return np.memmap(path, np.uint8, "c").data if mapped else np.fromfile(path, np.uint8).data
    except ValueError as error:  # an empty file cannot be mapped
        raise ProtocolError("the answer is empty, but must be a tensor container") from error
    except OSError as error:
        raise FileError(f"the answer {path} cannot be read: {error.strerror}; check the state folder") from error
