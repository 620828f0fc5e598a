"""Checks of updates that have come, beside the loop: a large one takes longer than a step of it may."""

from collections.abc import Mapping

from subfleet.elastic.grid import largest_change
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.update_form import UpdateForm
from subfleet.folding.calibration import check_sums
from subfleet.folding.updates import Magnitude, check_update
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import Task, Update
from subfleet.protocol.task import Calibrate, Train
from subfleet.rounds.state import RunState, Seat
from subfleet.rounds.suspicion import ChangeSize
from subfleet.rounds.terms import Terms
from subfleet.rounds.work import CheckRequest
from subfleet.transport.blob_store import BlobStore

__all__ = ["Checker"]

_SHARED = ""


class Checker:
    """Checks updates: whatever keeps one from being aggregated shows here.

    Args:
        terms: of the run.
        blobs: where updates are stored.
    """

    def __init__(self, terms: Terms, blobs: BlobStore) -> None:
        self._terms = terms
        self._blobs = blobs
        self._magnitudes = _Magnitudes(ModelState(shared={}))

    def check(self, request: CheckRequest, state: RunState, model: ModelState) -> ChangeSize:
        """How far an update moves what it trained.

        Args:
            request: for an update with its blob in the store.
            state: of the run.
            model: that the round started from.

        Raises:
            ProtocolError: it is not what its task asked for.
            FileError: its blob cannot be read.
        """
        update = request.update
        seat = state.seats.get(update.client_id)
        if seat is None or seat.task is None or seat.task.task_id != update.task_id:
            return ChangeSize()  # and is refused, as nobody waits for it
        if model is not self._magnitudes.model:
            self._magnitudes = _Magnitudes(model)
        return self._change(update, seat, seat.task)

    def _change(self, update: Update, seat: Seat, task: Task) -> ChangeSize:
        magnitudes, path = self._magnitudes, self._blobs.path(update.blob)
        model = magnitudes.model.of(task.spec.network)
        network = self._terms.declared(model.lineage).network
        work = task.work
        if isinstance(work, Calibrate):
            return check_sums(network, task.spec, work.calibration, path, update.sample_count, seat.offer.sample_count)
        if not isinstance(work, Train):
            raise ProtocolError(f"task {task.task_id!r:.120} asks for no update")
        form = UpdateForm.of(network, task.spec, work.update_codec, work.sends)
        client = seat.participant
        cohorts = {} if client is None else self._terms.roles.aggregator.sharing_groups(network, client, model.sizes)
        own = frozenset(name for name, key in cohorts.items() if key == seat.client_id)
        return check_update(
            form,
            path,
            magnitudes=magnitudes.of(network.id, {name: cohorts.get(name, _SHARED) for name in form.shapes}),
            own=own,
        )


class _Magnitudes:
    """How large the tensors of a model are; found once for each."""

    def __init__(self, model: ModelState) -> None:
        self.model = model
        self._found: dict[tuple[str, str, str], Magnitude] = {}

    def of(self, network_id: str, cohorts: Mapping[str, str]) -> dict[str, Magnitude]:
        """Of each tensor of a network, in the copy that a cohort has of it."""
        return {name: self._magnitude(network_id, name, key) for name, key in cohorts.items()}

    def _magnitude(self, network_id: str, name: str, key: str) -> Magnitude:
        if (network_id, key, name) not in self._found:
            state = self.model.of(network_id)
            tensor = state.copies.get(key, {}).get(name, state.shared[name])
            self._found[network_id, key, name] = Magnitude(
                largest_change=largest_change(name, tensor), mean_square=float(tensor.double().square().mean())
            )
        return self._found[network_id, key, name]
