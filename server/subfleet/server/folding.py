"""From stored updates to the next model: checked when they come, folded in the order of client ids."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor, from_numpy

from subfleet.arrays import Arrays, decode_arrays, encode_arrays
from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.maps import extract
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.methods.policies import AfterRound, Participant, Policies, Trained
from subfleet.server.rounds import Seat
from subfleet.transport.blob_store import BlobStore

__all__ = ["FoldedModel", "Folding", "check_update", "subnet_weights"]

_SHARED = ""
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedModel:
    """The next model.

    Attributes:
        clients: whose updates are in it.
        refused: clients whose update was refused, with the reason.
    """

    state: ModelState
    clients: tuple[Participant, ...]
    refused: Mapping[str, str]


def subnet_weights(network: Network, spec: SubnetSpec, state: Tensors) -> bytes:
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


class _RefusedError(Exception):
    """One client's update cannot be folded."""

    def __init__(self, client_id: str, reason: str) -> None:
        super().__init__(reason)
        self.client_id = client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """How the updates of a round become the next model.

    Attributes:
        network: the declaration of the whole model.
        policies: of the method.
        space: the sizes that clients may have.
        blobs: where the updates are stored.
        seed: of the run.
    """

    network: Network
    policies: Policies
    space: tuple[SubnetSpec, ...]
    blobs: BlobStore
    seed: int = 0

    def fold(self, state: ModelState, round_number: int, seats: Sequence[Seat]) -> FoldedModel:
        """Fold the updates of a round's seats into a model; without any, the model stays as it is.

        Args:
            state: the model that the round started from.
            round_number: of the round.
            seats: with accepted updates.
        """
        refused = dict[str, str]()
        while True:
            kept = [seat for seat in sorted(seats, key=lambda one: one.client_id) if seat.client_id not in refused]
            clients = [_Client.of(seat, self.policies) for seat in kept]
            try:
                folded = self._folded(state, clients)
            except _RefusedError as error:
                # Once more without it, so that nothing of it is left in any cohort.
                refused[error.client_id] = str(error)
                continue
            participants = tuple(client.participant for client in clients)
            context = AfterRound(
                network=self.network,
                round=round_number,
                seed=self.seed,
                before=state,
                after=folded,
                clients=participants,
            )
            return FoldedModel(state=self.policies.after_round(context), clients=participants, refused=refused)

    def _folded(self, state: ModelState, clients: Sequence["_Client"]) -> ModelState:
        cohorts = {
            client.participant.client_id: self.policies.cohorts(self.network, client.participant, self.space)
            for client in clients
        }
        changes = self._rescaled(state, clients, cohorts)
        copies = dict(state.copies)
        shared: Tensors = state.shared
        for key in sorted({_SHARED, *(key for keys in cohorts.values() for key in keys.values())}):
            names = {
                client.participant.client_id: self._names_of(client.participant, cohorts, key) for client in clients
            }
            start = {
                name: copies.get(key, {}).get(name, tensor)
                for name, tensor in state.shared.items()
                if key == _SHARED or any(name in found for found in names.values())
            }
            members = [client for client in clients if names[client.participant.client_id]]
            if not start or math.fsum(client.weight for client in members) <= 0:
                continue
            new = self._averaged(start, members, names, changes)
            if key == _SHARED:
                shared = {**shared, **new}
            else:
                copies[key] = {**copies.get(key, {}), **new}
        return ModelState(shared=shared, copies=copies, moments=state.moments)

    def _names_of(self, client: Participant, cohorts: Mapping[str, Mapping[str, str]], key: str) -> frozenset[str]:
        """Names in the whole model that an update of this client adds to in a cohort."""
        keys = cohorts[client.client_id]
        places = self.policies.placements(self.network, client.spec)
        return frozenset(place.name for place in places if keys.get(place.name, _SHARED) == key)

    def _averaged(
        self,
        start: Tensors,
        members: Sequence["_Client"],
        names: Mapping[str, frozenset[str]],
        changes: Mapping[str, Tensors],
    ) -> Tensors:
        accumulator = Accumulator(self.network, start, total_weight=math.fsum(client.weight for client in members))
        for client in members:
            who = client.participant
            try:
                change = changes[who.client_id] if who.client_id in changes else self._change_of(client)
                accumulator.add(who.spec, change, client.weight)
            except (ProtocolError, FileError) as error:
                raise _RefusedError(who.client_id, str(error)) from error
        return accumulator.finish()

    def _rescaled(
        self, state: ModelState, clients: Sequence["_Client"], cohorts: Mapping[str, Mapping[str, str]]
    ) -> Mapping[str, Tensors]:
        """The updates that are folded in place of the clients' own; empty where they are folded as they are."""
        if self.policies.rescale is None:
            return {}
        trained = [
            Trained(
                client=client.participant,
                weight=client.weight,
                received=extract(
                    self.network, client.participant.spec, state.seen_with(cohorts[client.participant.client_id])
                ),
                change=self._change_of(client),
            )
            for client in clients
        ]
        changes = self.policies.rescale(self.network, trained)
        return {one.client.client_id: change for one, change in zip(trained, changes, strict=True)}

    def _change_of(self, client: "_Client") -> dict[str, Tensor]:
        client_id = client.participant.client_id
        try:
            content = _read(self.blobs.path(client.update_ref))
            arrays = decode_arrays(content)
        except (ProtocolError, FileError) as error:
            raise _RefusedError(client_id, str(error)) from error
        if hashlib.sha256(content).hexdigest() != client.update_ref.sha256:
            raise _RefusedError(client_id, f"the stored update of client {client_id} is damaged on this disk")
        return _tensors(arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Client:
    participant: Participant
    weight: float
    update_ref: BlobRef

    @classmethod
    def of(cls, seat: Seat, policies: Policies) -> "_Client":
        if seat.participant is None or seat.result is None:
            raise ValueError(f"the seat of client {seat.client_id} has no update")
        return cls(participant=seat.participant, weight=policies.weigh(seat.result), update_ref=seat.result.blob)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: from_numpy(array) for name, array in arrays.items()}


def _read(path: Path) -> memoryview:
    """The file's content in memory that may be written, as torch wants it to be."""
    try:
        return memoryview(bytearray(path.read_bytes()))
    except OSError as error:
        raise FileError(f"update {path} cannot be read: {error.strerror}; check the state folder") from error
