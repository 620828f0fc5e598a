"""Checks of received updates, beside the loop, as a large one takes longer than a step of the loop may."""

from subfleet.aggregation.calibration import check_sums
from subfleet.aggregation.update_ranges import UpdateRanges
from subfleet.aggregation.updates import Magnitude, check_update
from subfleet.aggregation.views import View
from subfleet.elastic.grid import largest_change
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.update_form import UpdateForm
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.task import Calibrate, Train
from subfleet.rounds.context import RunContext
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CheckRequest
from subfleet.transport.blob_store import BlobStore


class Checker:
    """Checks updates before they are accepted; one that cannot be aggregated is refused.

    Args:
        context: of the run.
        blobs: where updates are stored.
        ranges: learns how large the changes of checked updates are.
    """

    def __init__(self, context: RunContext, blobs: BlobStore, ranges: UpdateRanges | None = None) -> None:
        self._context = context
        self._blobs = blobs
        self._ranges = ranges or UpdateRanges()
        self._model = ModelState(shared={})
        self._magnitudes: dict[tuple[str, str, str], Magnitude] = {}  # of its tensors, each computed once

    def check(self, request: CheckRequest, state: RunState, model: ModelState) -> ChangeSize:
        """Check an update, and return how far it moves the weights that it trained.

        Args:
            request: for an update with its blob in the store.
            state: of the run.
            model: that the round started from.

        Raises:
            ProtocolError: it does not match its task.
            FileError: its blob cannot be read.
        """
        update = request.update
        client = state.clients.get(update.client_id)
        if client is None or client.task is None or client.task.task_id != update.task_id:
            return ChangeSize()  # no task waits for it, so the coordinator refuses it
        if model is not self._model:
            self._model, self._magnitudes = model, {}
        architecture, work = client.task.architecture, client.task.work
        own, path = model.of(architecture.network), self._blobs.path(update.blob)
        network = self._context.get_declared(own.lineage).network
        if isinstance(work, Calibrate):
            known_count = client.offer.sample_count
            return check_sums(network, architecture, work.calibration, path, update.sample_count, known_count)
        if not isinstance(work, Train) or client.participant is None:
            raise ProtocolError(f"task {update.task_id!r:.120} does not ask for an update")
        form = UpdateForm.of(network, architecture, work.update_codec, work.sends)
        view = View.of(self._context.roles, network, own, client.participant)
        magnitudes = {name: self._measure(network.id, own, name, view.groups.get(name, "")) for name in form.shapes}
        largest = dict[str, float]()
        change = check_update(form, path, magnitudes=magnitudes, own=view.own, largest=largest)
        self._ranges.note(update.blob.sha256, largest)
        return change

    def _measure(self, network_id: str, state: ModelState, name: str, group: str) -> Magnitude:
        """The magnitude of a tensor of a network, as a sharing group has it."""
        key = (network_id, group, name)
        if key not in self._magnitudes:
            tensor = state.copies.get(group, {}).get(name, state.shared[name])
            self._magnitudes[key] = Magnitude(
                largest_change=largest_change(name, tensor), mean_square=float(tensor.double().square().mean())
            )
        return self._magnitudes[key]
