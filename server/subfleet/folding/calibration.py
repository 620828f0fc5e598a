"""Rounds in which devices measure the running statistics of norms: what they are asked, and what becomes of the sums.

HeteroFL's static batch norm (Diao et al. 2021, section 3.3), of sums that devices send in place of data: they say how
each channel of each norm is given values, on the whole of a device's samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy

from subfleet.arrays import Arrays, decode_arrays
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import NormMoments, shared_statistics
from subfleet.folding.folding import FoldedModel, Folding
from subfleet.folding.network_folding import NetworkFolding
from subfleet.folding.updates import stored_bytes
from subfleet.methods.aggregator import Participant, by_samples
from subfleet.protocol.calibration import Calibration, NormLayer, sum_names
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.task import Calibrate
from subfleet.rounds.state import Seat
from subfleet.rounds.suspicion import ChangeSize
from subfleet.rounds.weights import round_weights

__all__ = ["calibrated_model", "check_sums"]

_SHARED = ""
_SLACK = 1e-3
"""Rounding may leave a channel that never changes with a sum of squares so much below that of its mean."""
_LARGEST = 1e18
"""Of the root of a mean square: the square is a number of single precision."""
_Measured = list[tuple[SubnetSpec, Mapping[str, NormMoments]]]


def check_sums(
    network: Network, spec: SubnetSpec, calibration: Calibration, path: Path, sample_count: int, known_count: int
) -> ChangeSize:
    """Refuse sums that no data have; else tell the magnitude of what was measured.

    Args:
        network: the declaration of the whole model.
        spec: of the device's subnet.
        calibration: what was asked.
        path: of the answer's container.
        sample_count: that the device says to have.
        known_count: that its profile told.

    Raises:
        ProtocolError: it is no container of what was asked, or what it says cannot be.
        FileError: it cannot be read.
    """
    if sample_count > known_count:
        raise ProtocolError(f"the sums are of {sample_count} samples, but the client's profile has {known_count}")
    arrays = decode_arrays(stored_bytes(path))
    wanted = {name for norm in calibration.norms for name in sum_names(norm.name)}
    if set(arrays) != wanted:
        raise ProtocolError(
            f"the sums name other tensors than was asked for, such as {min(set(arrays) ^ wanted)!r:.80}"
        )
    shapes = network.shapes(spec)
    rms = [_checked_rms(one, shapes[f"{one.name}.running_mean"], arrays, sample_count) for one in calibration.norms]
    return ChangeSize(measured=float(np.sqrt(np.mean(np.square(np.concatenate(rms))))))


def _checked_rms(norm: NormLayer, shape: tuple[int, ...], arrays: Arrays, sample_count: int) -> npt.NDArray[np.float64]:
    """The root of the mean square of each channel of a norm."""
    found = [arrays[name] for name in sum_names(norm.name)]
    if [(str(one.dtype), one.shape) for one in found] != [("int64", ()), ("float64", shape), ("float64", shape)]:
        raise ProtocolError(
            f"the sums of norm {norm.name!r:.80} must be a count, int64 of no dimension, and two of float64 and shape "
            f"{shape}"
        )
    count, total, squares = int(found[0]), *(np.asarray(one, np.float64) for one in found[1:])
    if count != sample_count * norm.positions:
        raise ProtocolError(
            f"norm {norm.name!r:.80} was given {count} values of each channel, but {sample_count} samples have "
            f"{sample_count * norm.positions}"
        )
    # Written so that what is no number does not pass either.
    rms = np.sqrt(np.maximum(squares, 0) / count)
    if not ((np.abs(total) / count <= rms * (1 + _SLACK)) & (squares >= 0) & (rms <= _LARGEST)).all():
        raise ProtocolError(
            f"the sums of norm {norm.name!r:.80} are not finite, or beyond single precision, or those of no numbers"
        )
    return rms


def calibrated_model(
    folding: Folding, state: ModelState, seats: Sequence[Seat], lineages: tuple[Lineage, ...] = ()
) -> FoldedModel:
    """The model with the running statistics of all the devices' data, of every copy those of its own clients.

    Nothing else moves a bit; the order of the seats makes no difference.

    Args:
        folding: the run's terms and where answers are stored.
        state: the model.
        seats: with accepted answers to calibrate tasks.
        lineages: of the networks that the run has had.
    """
    refused, clients = dict[str, str](), list[Participant]()
    for network_id in state.network_ids:
        own = state.of(network_id)
        of_network = [seat for seat in seats if seat.spec is not None and seat.spec.network == network_id]
        part = NetworkFolding.of(folding.terms, own.lineage, folding.blobs)
        calibrated, who, why = _calibrated(part, own, of_network)
        state, refused = state.with_network(network_id, calibrated), refused | why
        clients += who
    ordered = tuple(sorted(clients, key=lambda one: one.client_id))
    return FoldedModel(state=state, folded=state, clients=ordered, refused=refused, lineages=lineages)


def _calibrated(
    folding: NetworkFolding, state: ModelState, seats: Sequence[Seat]
) -> tuple[ModelState, list[Participant], dict[str, str]]:
    """The state of one network, whose answers are in it, and whose were refused and why."""
    refused = dict[str, str]()
    of_copies = dict[str, _Measured]()
    weights = round_weights(by_samples, seats, folding.max_client_share)
    clients = list[Participant]()
    for seat in sorted(seats, key=lambda one: one.client_id):
        client, work = seat.participant, None if seat.task is None else seat.task.work
        if client is None or seat.update is None or not isinstance(work, Calibrate):
            raise ValueError(f"the seat of client {seat.client_id} has no sums")
        try:
            moments = _moments(work.calibration, folding.blobs.path(seat.update.blob))
            share = weights[seat.client_id].counted / seat.update.sample_count
        except (ProtocolError, FileError) as error:
            refused[seat.client_id] = str(error)
            continue
        clients.append(client)
        keys = folding.roles.aggregator.sharing_groups(folding.network, client, state.sizes)
        for layer, one in moments.items():
            key = keys.get(f"{layer}.running_mean", _SHARED)
            of_copies.setdefault(key, []).append((client.spec, {layer: one.shrunk(seat.scale).scaled(share)}))
    return _with_statistics(folding.network, state, of_copies), clients, refused


def _with_statistics(network: Network, state: ModelState, of_copies: Mapping[str, _Measured]) -> ModelState:
    shared: Mapping[str, Tensor] = state.shared
    copies = dict(state.copies)
    for key, measured in of_copies.items():
        own = {} if key == _SHARED else copies.get(key, {})
        new = shared_statistics(network, {**state.shared, **own}, measured)
        if key == _SHARED:
            shared = {**shared, **new}
        else:
            copies[key] = {**own, **new}
    return replace(state, shared=shared, copies=copies)


def _moments(calibration: Calibration, path: Path) -> dict[str, NormMoments]:
    arrays = decode_arrays(stored_bytes(path))
    found = {}
    for norm in calibration.norms:
        count, total, squares = (arrays[name] for name in sum_names(norm.name))
        found[norm.name] = NormMoments(total=from_numpy(total), squares=from_numpy(squares), count=int(count))
    return found
