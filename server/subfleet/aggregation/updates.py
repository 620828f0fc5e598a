"""Stored updates: checked when they come, read again when they are aggregated."""

import contextlib
import hashlib
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
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

__all__ = [
    "AS_IT_IS",
    "Magnitude",
    "Scaling",
    "check_update",
    "mapped_change",
    "read_change",
    "stored_bytes",
    "submodel_weights",
]

_FLOAT_BYTES = 4
_HELD: Mapping[str, str] = MappingProxyType({"weights": "held_weights", "statistics": "held_statistics"})
"""What is changed to what is held before."""


def submodel_weights(network: Network, architecture: Architecture, state: Mapping[str, Tensor]) -> bytes:
    """A submodel's weights as a tensor container; equal models and architectures give equal bytes."""
    return encode_arrays({name: tensor.cpu().numpy() for name, tensor in extract(network, architecture, state).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Magnitude:
    """How large the values of a tensor are.

    Attributes:
        largest_change: of an element, that can be summed.
        mean_square: of its elements.
    """

    largest_change: float
    mean_square: float = 0.0


def check_update(
    form: UpdateForm, path: Path, *, magnitudes: Mapping[str, Magnitude], own: Set[str] = frozenset()
) -> ChangeSize:
    """Refuse an update that could not be aggregated; else tell how far it moves what it trained.

    Args:
        form: what it must be.
        path: of its container.
        magnitudes: by name of the submodel's tensors, those of the model's.
        own: names of the tensors that the client has to itself.

    Raises:
        ProtocolError: it is no container, names other tensors, has other shapes or types, or holds what is not finite,
            above its limit or not written by its codec.
        FileError: it cannot be read.
    """
    arrays = decode_arrays(stored_bytes(path))
    if set(arrays) != set(form.shapes):
        odd = sorted(set(arrays) ^ set(form.shapes))
        raise ProtocolError(f"the update names other tensors than its submodel, such as {odd[0]!r:.80}")
    squares = {kind: list[tuple[float, int]]() for kind in (*_HELD, *_HELD.values(), "own")}
    for name, array in arrays.items():
        change, magnitude = form.decode(name, array), magnitudes[name]
        _check_limit(name, change, magnitude.largest_change)
        kind = "own" if name in own else "statistics" if name in form.exact else "weights"
        flat = change.reshape(-1)
        squares[kind].append((float(np.einsum("i,i->", flat, flat, dtype=np.float64)), flat.size))
        if kind in _HELD:
            squares[_HELD[kind]].append((magnitude.mean_square * flat.size, flat.size))
    return ChangeSize(**{kind: _root_mean(parts) for kind, parts in squares.items()})


def _check_limit(name: str, change: Floats, limit: float) -> None:
    largest = max(-float(change.min()), float(change.max()))
    # Stated so that NaN, which both hand on, does not pass.
    if not largest <= limit:
        raise ProtocolError(
            f"tensor {name!r} of the update holds a change of {largest}, but each must be finite and {limit:g} at most"
        )


def _root_mean(parts: Sequence[tuple[float, int]]) -> float:
    count = sum(size for _, size in parts)
    return math.sqrt(math.fsum(square for square, _ in parts) / count) if count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What changes of an update are multiplied by.

    Attributes:
        factor: above 0 and at most 1, where they are left to the bit.
        own: names of tensors that the client has to itself, which are left as they are.
    """

    factor: float = 1.0
    own: Set[str] = frozenset()

    def of(self, name: str, change: Tensor) -> Tensor:
        """A tensor's change as it is aggregated."""
        return change if self.factor == 1 or name in self.own else change * self.factor


AS_IT_IS = Scaling()
"""What leaves every change as it is."""


def read_change(form: UpdateForm, blobs: BlobStore, ref: BlobRef, scaling: Scaling = AS_IT_IS) -> dict[str, Tensor]:
    """The changes of a stored update, in memory of their own.

    Raises:
        FileError: it cannot be read, or is not what was stored.
        ProtocolError: it is no container, or not what the codec writes.
    """
    return dict(_Changes(form, _intact(stored_bytes(blobs.path(ref)), ref), scaling))


@contextlib.contextmanager
def mapped_change(
    form: UpdateForm, blobs: BlobStore, ref: BlobRef, scaling: Scaling = AS_IT_IS
) -> Iterator[Mapping[str, Tensor]]:
    """The changes of a stored update from where they lie in its file; what is not looked at takes no memory.

    Raises:
        FileError: it cannot be read, or is not what was stored.
        ProtocolError: it is no container.
    """
    path = blobs.path(ref)
    with ExitStack() as open_files:
        try:
            file = open_files.enter_context(path.open("rb"))
            # A private mapping may be written, as torch wants it to be; nothing is.
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise FileError(f"update {path} cannot be read: {error}; check the state folder") from error
        # Not closed by name: the last tensor that looks into the pages ends them.
        yield _Changes(form, _intact(memoryview(pages), ref), scaling)


class _Changes(Mapping[str, Tensor]):
    """The changes of an update, each decoded when it is asked for."""

    def __init__(self, form: UpdateForm, arrays: Arrays, scaling: Scaling) -> None:
        self._form = form
        self._arrays = arrays
        self._scaling = scaling

    def __getitem__(self, name: str) -> Tensor:
        return self._scaling.of(name, from_numpy(self._form.decode(name, self._arrays[name])))

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _intact(content: memoryview, ref: BlobRef) -> Arrays:
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise FileError(f"the stored update {ref.sha256[:16]} is damaged on this disk")
    return decode_arrays(content)


def stored_bytes(path: Path) -> memoryview:
    """The content of a stored answer, in memory that may be written, as torch wants it to be.

    Raises:
        FileError: it cannot be read.
    """
    try:
        return np.fromfile(path, np.uint8).data
    except OSError as error:
        raise FileError(f"the answer {path} cannot be read: {error.strerror}; check the state folder") from error
