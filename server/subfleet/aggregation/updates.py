"""Stored updates: checked on arrival, read again for aggregation."""

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

_FLOAT_BYTES = 4
_HELD: Mapping[str, str] = MappingProxyType({"weights": "held_weights", "statistics": "held_statistics"})
"""From a kind of tensor, the kind of its values before the change."""


def encode_submodel(network: Network, architecture: Architecture, state: Mapping[str, Tensor]) -> bytes:
    """A submodel's weights as a tensor container; equal models and architectures give equal bytes."""
    return encode_arrays({name: tensor.cpu().numpy() for name, tensor in extract(network, architecture, state).items()})


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
    form: UpdateForm, path: Path, *, magnitudes: Mapping[str, Magnitude], own: Set[str] = frozenset()
) -> ChangeSize:
    """Refuse an update that cannot be aggregated; else return how far it moves the weights that it trained.

    Args:
        form: that it must have.
        path: of its container.
        magnitudes: of the model's tensors, by name.
        own: names of the client's personalised tensors.

    Raises:
        ProtocolError: it is no container, has other tensors, shapes or types, or has values that are not finite, above
            their limit or not written by its codec.
        FileError: it cannot be read.
    """
    arrays = decode_arrays(read_stored(path))
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
    # Written so that NaN is refused too.
    if not largest <= limit:
        raise ProtocolError(
            f"tensor {name!r} of the update holds a change of {largest}, but each must be finite and {limit:g} at most"
        )


def _root_mean(parts: Sequence[tuple[float, int]]) -> float:
    count = sum(size for _, size in parts)
    return math.sqrt(math.fsum(square for square, _ in parts) / count) if count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The scaling of an update.

    Attributes:
        factor: above 0 and at most 1; with 1, changes keep their bits.
        own: names of the client's personalised tensors, which are not scaled.
    """

    factor: float = 1.0
    own: Set[str] = frozenset()

    def apply(self, name: str, change: Tensor) -> Tensor:
        """The scaled change of a tensor."""
        return change if self.factor == 1 or name in self.own else change * self.factor


UNSCALED = Scaling()
"""No scaling."""


def read_change(form: UpdateForm, blobs: BlobStore, ref: BlobRef, scaling: Scaling = UNSCALED) -> dict[str, Tensor]:
    """Read the changes of a stored update into memory.

    Raises:
        FileError: it cannot be read, or is not what was stored.
        ProtocolError: it is no container, or not what the codec writes.
    """
    return dict(_Changes(form, _verify(read_stored(blobs.path(ref)), ref), scaling))


@contextlib.contextmanager
def map_change(
    form: UpdateForm, blobs: BlobStore, ref: BlobRef, scaling: Scaling = UNSCALED
) -> Iterator[Mapping[str, Tensor]]:
    """Map the file of a stored update; changes that are not used take no memory.

    Raises:
        FileError: it cannot be read, or is not what was stored.
        ProtocolError: it is no container.
    """
    path = blobs.path(ref)
    with ExitStack() as open_files:
        try:
            file = open_files.enter_context(path.open("rb"))
            # A private mapping is writable, as torch requires; nothing is written.
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise FileError(f"update {path} cannot be read: {error}; check the state folder") from error
        # Not closed here: the pages live as long as the last tensor in them.
        yield _Changes(form, _verify(memoryview(pages), ref), scaling)


class _Changes(Mapping[str, Tensor]):
    """The changes of an update, each decoded when it is used."""

    def __init__(self, form: UpdateForm, arrays: Arrays, scaling: Scaling) -> None:
        self._form = form
        self._arrays = arrays
        self._scaling = scaling

    def __getitem__(self, name: str) -> Tensor:
        return self._scaling.apply(name, from_numpy(self._form.decode(name, self._arrays[name])))

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _verify(content: memoryview, ref: BlobRef) -> Arrays:
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise FileError(f"the stored update {ref.sha256[:16]} is damaged on this disk")
    return decode_arrays(content)


def read_stored(path: Path) -> memoryview:
    """Read a stored answer into writable memory, as torch requires.

    Raises:
        FileError: it cannot be read.
    """
    try:
        return np.fromfile(path, np.uint8).data
    except OSError as error:
        raise FileError(f"the answer {path} cannot be read: {error.strerror}; check the state folder") from error
