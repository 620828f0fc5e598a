"""Checks of received updates, beside the loop, as a large one takes longer than a step of the loop may."""

from collections.abc import Mapping

from subfleet.aggregation.calibration import check_sums
from subfleet.aggregation.updates import Magnitude, check_update
from subfleet.elastic.grid import largest_change
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.update_form import UpdateForm
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import Task, Update
from subfleet.protocol.task import Calibrate, Train
from subfleet.rounds.context import RunContext
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.state import ClientState, RunState
from subfleet.rounds.work import CheckRequest
from subfleet.transport.blob_store import BlobStore

_SHARED = ""


class Checker:
    """Checks updates, so that only those that can be aggregated are accepted.

    Args:
        context: of the run.
        blobs: where updates are stored.
    """

    def __init__(self, context: RunContext, blobs: BlobStore) -> None:
        self._context = context
        self._blobs = blobs
        self._magnitudes = _Magnitudes(ModelState(shared={}))

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
            return ChangeSize()  # it is refused, as no task waits for it
        if model is not self._magnitudes.model:
            self._magnitudes = _Magnitudes(model)
        return self._measure(update, client, client.task)

    def _measure(self, update: Update, client: ClientState, task: Task) -> ChangeSize:
        magnitudes, path = self._magnitudes, self._blobs.path(update.blob)
        model = magnitudes.model.of(task.architecture.network)
        network = self._context.declared(model.lineage).network
        work = task.work
        if isinstance(work, Calibrate):
            return check_sums(
                network, task.architecture, work.calibration, path, update.sample_count, client.offer.sample_count
            )
        if not isinstance(work, Train):
            raise ProtocolError(f"task {task.task_id!r:.120} does not ask for an update")
        form = UpdateForm.of(network, task.architecture, work.update_codec, work.sends)
        participant = client.participant
        groups_of = self._context.roles.aggregator.sharing_groups
        sharing_groups = {} if participant is None else groups_of(network, participant, model.sizes)
        own = frozenset(name for name, key in sharing_groups.items() if key == client.client_id)
        return check_update(
            form,
            path,
            magnitudes=magnitudes.of(network.id, {name: sharing_groups.get(name, _SHARED) for name in form.shapes}),
            own=own,
        )


class _Magnitudes:
    """The magnitudes of a model's tensors, each computed once."""

    def __init__(self, model: ModelState) -> None:
        self.model = model
        self._found: dict[tuple[str, str, str], Magnitude] = {}

    def of(self, network_id: str, sharing_groups: Mapping[str, str]) -> dict[str, Magnitude]:
        """By tensor of a network, the magnitude of the sharing group's copy."""
        return {name: self._magnitude(network_id, name, key) for name, key in sharing_groups.items()}

    def _magnitude(self, network_id: str, name: str, key: str) -> Magnitude:
        if (network_id, key, name) not in self._found:
            state = self.model.of(network_id)
            tensor = state.copies.get(key, {}).get(name, state.shared[name])
            self._found[network_id, key, name] = Magnitude(
                largest_change=largest_change(name, tensor), mean_square=float(tensor.double().square().mean())
            )
        return self._found[network_id, key, name]
