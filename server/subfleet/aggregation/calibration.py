"""Rounds in which devices measure the running statistics of norms: checks of their sums, and the model with them.

HeteroFL's static batch norm (Diao et al. 2021, section 3.3), from sums that devices send in place of data: of the
inputs of each channel of each norm, over all samples of a device.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy

from subfleet.aggregation.aggregation import AggregatedModel, find_network_id
from subfleet.aggregation.updates import read_stored
from subfleet.arrays import Arrays, decode_arrays
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import NormMoments, pool_statistics
from subfleet.methods.aggregator import Participant, count_samples
from subfleet.protocol.calibration import Calibration, NormLayer, name_sums
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Calibrate
from subfleet.rounds.context import RunContext
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import AggregationRequest
from subfleet.rounds.weights import weigh_round
from subfleet.transport.blob_store import BlobStore

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
            f"the sums contain other tensors than requested, such as {min(set(arrays) ^ expected)!r:.80}"
        )
    shapes = network.shapes(architecture)
    rms = [_check_rms(norm, shapes[f"{norm.name}.running_mean"], arrays, sample_count) for norm in calibration.norms]
    return ChangeSize(measured=float(np.sqrt(np.mean(np.square(np.concatenate(rms))))))


def _check_rms(norm: NormLayer, shape: tuple[int, ...], arrays: Arrays, sample_count: int) -> npt.NDArray[np.float64]:
    """The root of the mean square of each channel of a norm."""
    sums = [arrays[name] for name in name_sums(norm.name)]
    if [(str(array.dtype), array.shape) for array in sums] != [("int64", ()), ("float64", shape), ("float64", shape)]:
        raise ProtocolError(
            f"the sums of norm {norm.name!r:.80} must be an int64 scalar and two float64 arrays of the shape {shape}"
        )
    count, total, squares = int(sums[0]), *(np.asarray(array, np.float64) for array in sums[1:])
    if count != sample_count * norm.positions:
        raise ProtocolError(
            f"norm {norm.name!r:.80} has counted {count} values per channel, but {sample_count} samples have "
            f"{sample_count * norm.positions}"
        )
    # Written so that NaN does not pass either.
    rms = np.sqrt(np.maximum(squares, 0) / count)
    if not ((np.abs(total) / count <= rms * (1 + _SLACK)) & (squares >= 0) & (rms <= _LARGEST)).all():
        raise ProtocolError(
            f"the sums of norm {norm.name!r:.80} are not finite, exceed single precision, or contradict each other"
        )
    return rms


def calibrate_model(
    context: RunContext, blobs: BlobStore, state: ModelState, request: AggregationRequest
) -> AggregatedModel:
    """The model with the running statistics of all devices' data; every copy has those of its own clients.

    Nothing else changes; the order of the clients does not matter.

    Args:
        context: of the run.
        blobs: where answers are stored.
        state: the model.
        request: with clients that have accepted answers to calibrate tasks.
    """
    refused, participants = dict[str, str](), list[Participant]()
    for network_id in state.network_ids:
        own = state.of(network_id)
        network, measured = context.get_declared(own.lineage).network, defaultdict[str, _Measured](list)
        clients = [client for client in request.clients if find_network_id(client) == network_id]
        weights = weigh_round(count_samples, clients, context.config.max_client_fraction)
        for client in sorted(clients, key=lambda client: client.client_id):
            participant, update, work = client.participant, client.update, client.task and client.task.work
            if participant is None or update is None or not isinstance(work, Calibrate):
                raise ValueError(f"client {client.client_id} has no sums to aggregate")
            try:
                moments = _read_moments(work.calibration, blobs.path(update.blob))
            except (ProtocolError, FileError) as error:
                refused[client.client_id] = str(error)
                continue
            participants.append(participant)
            share = weights[client.client_id].counted / update.sample_count
            groups = context.roles.aggregator.sharing_groups(network, participant, own.sizes)
            for layer, sums in moments.items():
                counted = {layer: sums.rescale(client.scale).reweight(share)}
                measured[groups.get(f"{layer}.running_mean", _SHARED)].append((participant.architecture, counted))
        state = state.with_network(network_id, _pool(network, own, measured))
    return AggregatedModel(
        state=state,
        aggregated=state,
        clients=tuple(sorted(participants, key=lambda participant: participant.client_id)),
        refused=refused,
        lineages=request.lineages,
    )


def _pool(network: Network, state: ModelState, measured: Mapping[str, _Measured]) -> ModelState:
    """The state of a network with the statistics that the clients of each sharing group measured."""
    copies: dict[str, Mapping[str, Tensor]] = {_SHARED: state.shared, **state.copies}
    for group, moments in measured.items():
        own = copies.get(group, {})
        copies[group] = {**own, **pool_statistics(network, {**state.shared, **own}, moments)}
    return replace(state, shared=copies.pop(_SHARED), copies=copies)


def _read_moments(calibration: Calibration, path: Path) -> dict[str, NormMoments]:
    arrays = decode_arrays(read_stored(path))
    moments = {}
    for norm in calibration.norms:
        count, total, squares = (arrays[name] for name in name_sums(norm.name))
        moments[norm.name] = NormMoments(total=from_numpy(total), squares=from_numpy(squares), count=int(count))
    return moments
