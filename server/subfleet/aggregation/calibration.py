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

from subfleet.aggregation.aggregation import AggregatedModel, Aggregation
from subfleet.aggregation.network_aggregation import NetworkAggregation
from subfleet.aggregation.updates import stored_bytes
from subfleet.arrays import Arrays, decode_arrays
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import NormMoments, pool_statistics
from subfleet.methods.aggregator import Participant, count_samples
from subfleet.protocol.calibration import Calibration, NormLayer, sum_names
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Calibrate
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.state import ClientState
from subfleet.rounds.weights import weigh_round

__all__ = ["calibrated_model", "check_sums"]

_SHARED = ""
_SLACK = 1e-3
"""Rounding may leave a channel that never changes with a sum of squares so much below that of its mean."""
_LARGEST = 1e18
"""Of the root of a mean square: the square is a number of single precision."""
_Measured = list[tuple[Architecture, Mapping[str, NormMoments]]]


def check_sums(
    network: Network,
    architecture: Architecture,
    calibration: Calibration,
    path: Path,
    sample_count: int,
    known_count: int,
) -> ChangeSize:
    """Refuse sums that no data have; else tell the magnitude of what was measured.

    Args:
        network: the declaration of the whole model.
        architecture: of the device's submodel.
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
    shapes = network.shapes(architecture)
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
    aggregation: Aggregation, state: ModelState, clients: Sequence[ClientState], lineages: tuple[Lineage, ...] = ()
) -> AggregatedModel:
    """The model with the running statistics of all the devices' data, of every copy those of its own clients.

    Nothing else moves a bit; the order of the client states makes no difference.

    Args:
        aggregation: the run's context and where answers are stored.
        state: the model.
        clients: with accepted answers to calibrate tasks.
        lineages: of the networks that the run has had.
    """
    refused, participants = dict[str, str](), list[Participant]()
    for network_id in state.network_ids:
        own = state.of(network_id)
        of_network = [
            client
            for client in clients
            if client.architecture is not None and client.architecture.network == network_id
        ]
        part = NetworkAggregation.of(aggregation.context, own.lineage, aggregation.blobs)
        calibrated, who, why = _calibrated(part, own, of_network)
        state, refused = state.with_network(network_id, calibrated), refused | why
        participants += who
    ordered = tuple(sorted(participants, key=lambda one: one.client_id))
    return AggregatedModel(state=state, aggregated=state, clients=ordered, refused=refused, lineages=lineages)


def _calibrated(
    aggregation: NetworkAggregation, state: ModelState, clients: Sequence[ClientState]
) -> tuple[ModelState, list[Participant], dict[str, str]]:
    """The state of one network, whose answers are in it, and whose were refused and why."""
    refused = dict[str, str]()
    of_copies = dict[str, _Measured]()
    weights = weigh_round(count_samples, clients, aggregation.max_client_fraction)
    participants = list[Participant]()
    for client in sorted(clients, key=lambda one: one.client_id):
        participant, work = client.participant, None if client.task is None else client.task.work
        if participant is None or client.update is None or not isinstance(work, Calibrate):
            raise ValueError(f"the client state of client {client.client_id} has no sums")
        try:
            moments = _moments(work.calibration, aggregation.blobs.path(client.update.blob))
            share = weights[client.client_id].counted / client.update.sample_count
        except (ProtocolError, FileError) as error:
            refused[client.client_id] = str(error)
            continue
        participants.append(participant)
        keys = aggregation.roles.aggregator.sharing_groups(aggregation.network, participant, state.sizes)
        for layer, one in moments.items():
            key = keys.get(f"{layer}.running_mean", _SHARED)
            of_copies.setdefault(key, []).append(
                (participant.architecture, {layer: one.rescale(client.scale).reweight(share)})
            )
    return _with_statistics(aggregation.network, state, of_copies), participants, refused


def _with_statistics(network: Network, state: ModelState, of_copies: Mapping[str, _Measured]) -> ModelState:
    shared: Mapping[str, Tensor] = state.shared
    copies = dict(state.copies)
    for key, measured in of_copies.items():
        own = {} if key == _SHARED else copies.get(key, {})
        new = pool_statistics(network, {**state.shared, **own}, measured)
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
