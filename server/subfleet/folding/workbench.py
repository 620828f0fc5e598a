"""The slow arithmetic of a round, beside the loop: fold, evaluate, write the checkpoint."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from subfleet.elastic.model_state import ModelState, packed
from subfleet.folding.calibration import calibrated_model
from subfleet.folding.checkpoint import save_checkpoint
from subfleet.folding.examining import Examiner
from subfleet.folding.folding import Folding
from subfleet.folding.views import Views
from subfleet.protocol.errors import FileError
from subfleet.protocol.loading import cause_of
from subfleet.rounds.actions import Fold
from subfleet.rounds.events import Folded, NotFolded
from subfleet.rounds.state import RunState
from subfleet.tasks import Dataset

__all__ = ["FoldOutcome", "Workbench"]

_LOG = logging.getLogger(__name__)

_ATTEMPTS = 2
"""At a fold: what no update causes, such as too little memory at one moment, costs no client its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldOutcome:
    """What tells of a fold, and the next model, which is on disk already; None where there is none."""

    event: Folded | NotFolded
    model: ModelState | None = None


class Workbench:
    """One thread that folds; one round at a time.

    Args:
        folding: how updates become the next model.
        views: what clients see of it.
        evaluation: held-out samples, in the shape that the model takes.
        checkpoints: folder of the models.
    """

    def __init__(self, folding: Folding, views: Views, evaluation: Dataset, *, checkpoints: Path) -> None:
        self._folding = folding
        self._views = views
        self._examiner = Examiner(views, evaluation)
        self._checkpoints = checkpoints
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="subfleet-fold")
        self._work: Future[FoldOutcome] | None = None

    def begin(self, action: Fold, model: ModelState, state: RunState) -> None:
        """Start folding a round's updates into a model, in a run that stands as its state says."""
        self._work = self._pool.submit(self._outcome, action, model, state)

    def outcome(self) -> FoldOutcome | None:
        """The folded round, once; None while there is none.

        Raises:
            FileError: the checkpoint cannot be written.
        """
        if self._work is None or not self._work.done():
            return None
        work, self._work = self._work, None
        return work.result()

    def finish(self) -> None:
        """Wait until the round in hand is folded; `outcome` then has it."""
        wait([] if self._work is None else [self._work])

    def close(self) -> None:
        """Let the thread end; what it is doing is finished and can be done again."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _outcome(self, action: Fold, model: ModelState, state: RunState) -> FoldOutcome:
        reason = ""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._fold(action, model, state)
            except FileError:  # a disk that is full is no client's doing
                raise
            except Exception as error:  # noqa: BLE001  # whatever it is, this try of the round fails
                _LOG.warning(
                    "round %d could not be folded, attempt %d of %d", action.round, attempt, _ATTEMPTS, exc_info=error
                )
                reason = cause_of(error)
        return FoldOutcome(event=NotFolded(round=action.round, reason=f"folding failed: {reason}"))

    def _fold(self, action: Fold, model: ModelState, state: RunState) -> FoldOutcome:
        if self._views.terms.config.calibrates(action.round):
            folded = calibrated_model(self._folding, model, action.seats, action.lineages)
        else:
            folded = self._folding.fold(
                model, action.round, action.seats, action.memory, action.lineages, action.brought
            )
        examined = self._examiner.examined(folded, state, action.round)
        metrics = dict(examined.evaluation.metrics)
        sha256 = save_checkpoint(self._checkpoints, action.round, packed(folded.state))
        event = Folded(
            round=action.round,
            accuracy=metrics.pop("accuracy", None),
            loss=examined.evaluation.loss,
            model=examined.model,
            sha256=sha256,
            refused=folded.refused,
            found=folded.found,
            lineages=folded.lineages,
            model_bytes=folded.state.tensor_bytes,
            metrics=MappingProxyType(metrics),
            guess_loss=examined.evaluation.guess_loss,
        )
        return FoldOutcome(model=folded.state, event=event)
