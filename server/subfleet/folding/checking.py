"""Updates that have come are looked at beside the loop, as large ones take longer than a step of it may."""

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from subfleet.elastic.grid import largest_change
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.update_form import UpdateForm
from subfleet.folding.calibration import check_sums
from subfleet.folding.updates import Magnitude, check_update
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.loading import cause_of
from subfleet.protocol.messages import Task, Update
from subfleet.rounds.events import UpdateRejected, UpdateStored
from subfleet.rounds.state import Seat
from subfleet.rounds.suspicion import ChangeSize
from subfleet.rounds.terms import Terms
from subfleet.transport.blob_store import BlobStore

__all__ = ["Checks"]

_LOG = logging.getLogger(__name__)
_SHARED = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    update: Update
    outcome: "Future[UpdateStored | UpdateRejected]"


class Checks:
    """One thread that looks at updates, one after the other: whatever keeps one from being folded shows here.

    Args:
        terms: of the run.
        blobs: where updates are stored.
    """

    def __init__(self, terms: Terms, blobs: BlobStore) -> None:
        self._terms = terms
        self._blobs = blobs
        self._magnitudes = _Magnitudes(ModelState(shared={}))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="subfleet-check")
        self._under_way: deque[_Check] = deque()

    @property
    def digests(self) -> frozenset[str]:
        """Of the blobs that are looked at."""
        return frozenset(check.update.blob.sha256 for check in self._under_way)

    def begin(self, update: Update, seat: Seat | None, model: ModelState) -> None:
        """Look at an update whose blob is stored.

        Args:
            update: as its client offered it.
            seat: the client's; None where it has none any more, and nobody asked for the update.
            model: that the round started from.
        """
        if any(check.update == update for check in self._under_way):
            return
        if model is not self._magnitudes.model:
            self._magnitudes = _Magnitudes(model)
        outcome = self._pool.submit(self._outcome, update, seat, self._magnitudes)
        self._under_way.append(_Check(update=update, outcome=outcome))

    def events(self) -> list[UpdateStored | UpdateRejected]:
        """What was found since the last time, in the order in which it was begun."""
        found = []
        while self._under_way and self._under_way[0].outcome.done():
            found.append(self._under_way.popleft().outcome.result())
        return found

    def finish(self) -> None:
        """Wait until everything is looked at; `events` then tells."""
        wait([check.outcome for check in self._under_way])

    def close(self) -> None:
        """Let the thread end. What it was not told of, a client offers again."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _outcome(self, update: Update, seat: Seat | None, magnitudes: "_Magnitudes") -> UpdateStored | UpdateRejected:
        task = None if seat is None else seat.task
        if seat is None or task is None or task.task_id != update.task_id:
            return UpdateStored(update=update)  # and is refused, as nobody waits for it
        try:
            return UpdateStored(update=update, change=self._change(update, seat, task, magnitudes))
        except (ProtocolError, FileError) as error:
            return UpdateRejected(update=update, reason=str(error))
        except Exception as error:  # noqa: BLE001  # whatever it is, this update fails, and not the run
            _LOG.warning("the update of client %s could not be checked", update.client_id, exc_info=error)
            return UpdateRejected(update=update, reason=f"it could not be checked ({cause_of(error)})")

    def _change(self, update: Update, seat: Seat, task: Task, magnitudes: "_Magnitudes") -> ChangeSize:
        model, path = magnitudes.model.of(task.spec.network), self._blobs.path(update.blob)
        network = self._terms.declared(model.lineage).network
        if task.calibration is not None:
            return check_sums(network, task.spec, task.calibration, path, update.sample_count, seat.offer.sample_count)
        form = UpdateForm.of(network, task.spec, task.update_codec, task.sends)
        client = seat.participant
        cohorts = {} if client is None else self._terms.policies.cohorts(network, client, model.sizes)
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
