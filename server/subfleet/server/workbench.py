"""The slow arithmetic of a round, beside the loop: fold, evaluate, write the checkpoint."""

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.network import Network
from subfleet.protocol.errors import DataError, RunError
from subfleet.server.checkpoint import save_checkpoint
from subfleet.server.folding import fold
from subfleet.server.methods import Method
from subfleet.server.rounds import Fold, Folded
from subfleet.tasks import Dataset
from subfleet.transport.blob_store import BlobStore

__all__ = ["FoldOutcome", "Workbench"]

Model = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldOutcome:
    """The next model, already on disk, and the event that tells of it."""

    model: Model
    event: Folded


class Workbench:
    """One thread that folds; one round at a time.

    Args:
        network: the declaration of the whole model.
        method: the federated method.
        evaluation: held-out samples.
        blobs: where updates are stored.
        checkpoints: folder of the models.
    """

    def __init__(
        self, network: Network, method: Method, evaluation: Dataset, *, blobs: BlobStore, checkpoints: Path
    ) -> None:
        if evaluation.inputs.shape[1:] != network.config.input_shape:
            raise DataError(
                f"the evaluation samples have shape {evaluation.inputs.shape[1:]}, but the model takes "
                f"{network.config.input_shape}; correct evaluation_data or model.input_shape"
            )
        self._network = network
        self._method = method
        self._inputs = torch.from_numpy(evaluation.inputs.copy())
        self._labels = torch.from_numpy(evaluation.labels.copy())
        self._blobs = blobs
        self._checkpoints = checkpoints
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="subfleet-fold")
        self._work: Future[FoldOutcome] | None = None

    def begin(self, action: Fold, model: Model) -> None:
        """Start folding a round's updates into a model."""
        self._work = self._pool.submit(self._fold, action, model)

    def outcome(self) -> FoldOutcome | None:
        """The folded round, once; None while there is none.

        Raises:
            RunError: the new model is not finite, or gives no finite loss.
            FileError: the checkpoint cannot be written.
        """
        if self._work is None or not self._work.done():
            return None
        work, self._work = self._work, None
        return work.result()

    def settle(self) -> None:
        """Wait until the round in hand is folded; `outcome` then has it."""
        wait([] if self._work is None else [self._work])

    def close(self) -> None:
        """Let the thread end; what it is doing is finished and can be done again."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fold(self, action: Fold, model: Model) -> FoldOutcome:
        folded = fold(self._network, self._method, model, action.seats, self._blobs)
        evaluation = evaluate(self._network, self._network.full_spec(), folded.state, self._inputs, self._labels)
        if not math.isfinite(evaluation.loss):
            raise RunError(
                f"the model has diverged: its loss after round {action.round} is {evaluation.loss}; lower the learning "
                "rate or leave out a client whose updates are wrong, and begin a new run"
            )
        sha256 = save_checkpoint(self._checkpoints, action.round, folded.state)
        event = Folded(
            round=action.round,
            accuracy=evaluation.accuracy,
            loss=evaluation.loss,
            sha256=sha256,
            refused=folded.refused,
        )
        return FoldOutcome(model=folded.state, event=event)
