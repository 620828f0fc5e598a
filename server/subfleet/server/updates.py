"""Stored updates: checked when they come, read again when they are folded."""

import contextlib
import hashlib
import math
import mmap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from torch import Tensor, from_numpy

from subfleet.arrays import Arrays, decode_arrays, encode_arrays
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.transport.blob_store import BlobStore

__all__ = ["check_update", "mapped_change", "read_change", "subnet_weights"]


def subnet_weights(network: Network, spec: SubnetSpec, state: Mapping[str, Tensor]) -> bytes:
    """A subnet's weights as a tensor container; equal models and specs give equal bytes."""
    return encode_arrays({name: tensor.numpy() for name, tensor in extract(network, spec, state).items()})


def check_update(network: Network, spec: SubnetSpec, path: Path) -> None:
    """Refuse an update that could not be folded.

    Raises:
        ProtocolError: it is no container, names other tensors, has other shapes or types, or holds what is not finite.
        FileError: it cannot be read.
    """
    arrays = decode_arrays(_read(path))
    shapes = network.shapes(spec)
    if set(arrays) != set(shapes):
        odd = sorted(set(arrays) ^ set(shapes))
        raise ProtocolError(f"the update names other tensors than its subnet, such as {odd[0]!r:.80}")
    for name, array in arrays.items():
        if array.shape != shapes[name] or array.dtype != np.float32:
            raise ProtocolError(
                f"tensor {name!r} of the update is {array.dtype} of shape {array.shape}, but must be float32 of shape "
                f"{shapes[name]}"
            )
        # A float64 sum of finite float32 values cannot overflow, so it is finite exactly when every value is.
        if not math.isfinite(float(np.sum(array, dtype=np.float64))):
            raise ProtocolError(f"tensor {name!r} of the update holds a value that is not finite")


def read_change(blobs: BlobStore, ref: BlobRef) -> dict[str, Tensor]:
    """The tensors of a stored update, in memory of their own.

    Raises:
        FileError: it cannot be read, or is not what was stored.
        ProtocolError: it is no container.
    """
    return _tensors(_intact(_read(blobs.path(ref)), ref))


@contextlib.contextmanager
def mapped_change(blobs: BlobStore, ref: BlobRef) -> Iterator[dict[str, Tensor]]:
    """The tensors of a stored update where they lie in its file; what is not looked at takes no memory.

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
        yield _tensors(_intact(memoryview(pages), ref))


def _intact(content: memoryview, ref: BlobRef) -> Arrays:
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise FileError(f"the stored update {ref.sha256[:16]} is damaged on this disk")
    return decode_arrays(content)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: from_numpy(array) for name, array in arrays.items()}


def _read(path: Path) -> memoryview:
    """The file's content in memory that may be written, as torch wants it to be."""
    try:
        return memoryview(bytearray(path.read_bytes()))
    except OSError as error:
        raise FileError(f"update {path} cannot be read: {error.strerror}; check the state folder") from error
