"""From stored updates to the next model: checked when they come, folded in the order of client ids."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from subfleet.arrays import Arrays, decode_arrays, encode_arrays
from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.methods import Method
from subfleet.server.rounds import Seat
from subfleet.transport.blob_store import BlobStore

__all__ = ["FoldedModel", "check_update", "fold", "subnet_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedModel:
    """The next model, and the clients whose update was refused, with the reason."""

    state: Mapping[str, torch.Tensor]
    refused: Mapping[str, str]


def subnet_weights(network: Network, spec: SubnetSpec, state: Mapping[str, torch.Tensor]) -> bytes:
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


def fold(
    network: Network,
    method: Method,
    state: Mapping[str, torch.Tensor],
    seats: Sequence[Seat],
    blobs: BlobStore,
) -> FoldedModel:
    """Fold the updates of a round's seats into a model, one at a time; without any, the model stays as it is.

    Args:
        network: the declaration of the whole model.
        method: how updates are weighed, and what follows the folding.
        state: the model that the round started from.
        seats: with accepted updates.
        blobs: where the updates are stored.
    """
    folded, refused = dict(state), dict[str, str]()
    weights = {seat.client_id: method.weigh(seat.result) for seat in seats if seat.result is not None}
    total = math.fsum(weights.values())
    if total > 0:
        accumulator = Accumulator(network, state, total_weight=total)
        for seat in sorted(seats, key=lambda one: one.client_id):
            try:
                _add(accumulator, seat, weights[seat.client_id], blobs)
            except (ProtocolError, FileError) as error:
                refused[seat.client_id] = str(error)
        folded = accumulator.finish()
    return FoldedModel(state=method.after_round(network, state, folded), refused=refused)


def _add(accumulator: Accumulator, seat: Seat, weight: float, blobs: BlobStore) -> None:
    if seat.task is None or seat.result is None:
        raise ProtocolError(f"client {seat.client_id} has no update")
    content = _read(blobs.path(seat.result.blob))
    if hashlib.sha256(content).hexdigest() != seat.result.blob.sha256:
        raise FileError(f"the stored update of client {seat.client_id} is damaged on this disk")
    accumulator.add(seat.task.spec, _tensors(decode_arrays(content)), weight)


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _read(path: Path) -> memoryview:
    """The file's content in memory that may be written, as torch wants it to be."""
    try:
        return memoryview(bytearray(path.read_bytes()))
    except OSError as error:
        raise FileError(f"update {path} cannot be read: {error.strerror}; check the state folder") from error
