"""Rounds in which devices measure the running statistics of norms: checks of their sums, and the model with them.

HeteroFL's static batch norm (Diao et al. 2021, section 3.3), from sums that devices send in place of data: of the
inputs of each channel of each norm, over all samples of a device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy

from subfleet.aggregation.aggregation import AggregatedModel, Aggregation
from subfleet.aggregation.network_aggregation import NetworkAggregation
from subfleet.aggregation.updates import read_stored
from subfleet.arrays import Arrays, decode_arrays
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import NormMoments, pool_statistics
from subfleet.methods.aggregator import Participant, count_samples
from subfleet.protocol.calibration import Calibration, NormLayer, name_sums
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Calibrate
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.state import ClientState
from subfleet.rounds.weights import weigh_round

_SHARED = ""
_SLACK = 1e-3
"""By rounding, the sum of squares of a constant channel may be this fraction below that of its mean."""
_LARGEST = 1e18
"""The largest root of a mean square, so that the square is a number of single precision."""
_Measured = list[tuple[Architecture, Mapping[str, NormMoments]]]


def check_sums(
    network: Network,
    architecture: Architecture,
    calibration: Calibration,
    path: Path,
    sample_count: int,
    known_count: int,
) -> ChangeSize:
    """Refuse sums that no data can have; else return the magnitude of what was measured.

    Args:
        network: the declaration of the whole model.
        architecture: of the device's submodel.
        calibration: what the device was asked to measure.
        path: of the answer's container.
        sample_count: samples that the device claims.
        known_count: samples according to its profile.

    Raises:
        ProtocolError: it is no container of these sums, or the sums are impossible.
        FileError: it cannot be read.
    """
    if sample_count > known_count:
        raise ProtocolError(f"the sums are of {sample_count} samples, but the client's profile has {known_count}")
    arrays = decode_arrays(read_stored(path))
    expected = {name for norm in calibration.norms for name in name_sums(norm.name)}
    if set(arrays) != expected:
        raise ProtocolError(
            f"the sums name other tensors than was asked for, such as {min(set(arrays) ^ expected)!r:.80}"
        )
    shapes = network.shapes(architecture)
    rms = [_check_rms(norm, shapes[f"{norm.name}.running_mean"], arrays, sample_count) for norm in calibration.norms]
    return ChangeSize(measured=float(np.sqrt(np.mean(np.square(np.concatenate(rms))))))


def _check_rms(norm: NormLayer, shape: tuple[int, ...], arrays: Arrays, sample_count: int) -> npt.NDArray[np.float64]:
    """The root of the mean square of each channel of a norm."""
    sums = [arrays[name] for name in name_sums(norm.name)]
    if [(str(array.dtype), array.shape) for array in sums] != [("int64", ()), ("float64", shape), ("float64", shape)]:
        raise ProtocolError(
            f"the sums of norm {norm.name!r:.80} must be a count, int64 of no dimension, and two of float64 and shape "
            f"{shape}"
        )
    count, total, squares = int(sums[0]), *(np.asarray(array, np.float64) for array in sums[1:])
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


def calibrate_model(
    aggregation: Aggregation, state: ModelState, clients: Sequence[ClientState], lineages: tuple[Lineage, ...] = ()
) -> AggregatedModel:
    """The model with the running statistics of all devices' data; every copy has those of its own clients.

    Nothing else changes; the order of the clients does not matter.

    Args:
        aggregation: the run's context and where answers are stored.
        state: the model.
        clients: with accepted answers to calibrate tasks.
        lineages: of the networks that the run has had.
    """
    refused, participants = dict[str, str](), list[Participant]()
    for network_id in state.network_ids:
        own = state.of(network_id)
        members = [client for client in clients if client.architecture and client.architecture.network == network_id]
        part = NetworkAggregation.of(aggregation.context, own.lineage, aggregation.blobs)
        calibrated, who, why = _calibrate_network(part, own, members)
        state, refused = state.with_network(network_id, calibrated), refused | why
        participants += who
    return AggregatedModel(
        state=state,
        aggregated=state,
        clients=tuple(sorted(participants, key=lambda participant: participant.client_id)),
        refused=refused,
        lineages=lineages,
    )


def _calibrate_network(
    aggregation: NetworkAggregation, state: ModelState, clients: Sequence[ClientState]
) -> tuple[ModelState, list[Participant], dict[str, str]]:
    """The state of one network, the clients with sums in it, and by client why its sums were refused."""
    refused = dict[str, str]()
    of_copies = dict[str, _Measured]()
    weights = weigh_round(count_samples, clients, aggregation.context.config.max_client_fraction)
    participants = list[Participant]()
    for client in sorted(clients, key=lambda client: client.client_id):
        participant, work = client.participant, None if client.task is None else client.task.work
        if participant is None or client.update is None or not isinstance(work, Calibrate):
            raise ValueError(f"client {client.client_id} has no sums to aggregate")
        try:
            moments = _read_moments(work.calibration, aggregation.blobs.path(client.update.blob))
            share = weights[client.client_id].counted / client.update.sample_count
        except (ProtocolError, FileError) as error:
            refused[client.client_id] = str(error)
            continue
        participants.append(participant)
        keys = aggregation.roles.aggregator.sharing_groups(aggregation.network, participant, state.sizes)
        for layer, sums in moments.items():
            key = keys.get(f"{layer}.running_mean", _SHARED)
            counted = {layer: sums.rescale(client.scale).reweight(share)}
            of_copies.setdefault(key, []).append((participant.architecture, counted))
    copies: dict[str, Mapping[str, Tensor]] = {_SHARED: state.shared, **state.copies}
    for key, measured in of_copies.items():
        own = copies.get(key, {})
        copies[key] = {**own, **pool_statistics(aggregation.network, {**state.shared, **own}, measured)}
    shared = copies.pop(_SHARED)
    return replace(state, shared=shared, copies=copies), participants, refused


def _read_moments(calibration: Calibration, path: Path) -> dict[str, NormMoments]:
    arrays = decode_arrays(read_stored(path))
    moments = {}
    for norm in calibration.norms:
        count, total, squares = (arrays[name] for name in name_sums(norm.name))
        moments[norm.name] = NormMoments(total=from_numpy(total), squares=from_numpy(squares), count=int(count))
    return moments
