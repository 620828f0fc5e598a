"""The slow arithmetic of a round, beside the loop: fold, evaluate, write the checkpoint."""

import math
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from subfleet.elastic.evaluate import Evaluation, evaluate
from subfleet.elastic.model_state import ModelState, packed
from subfleet.folding.calibration import calibrated_model
from subfleet.folding.checkpoint import save_checkpoint
from subfleet.folding.folding import FoldedModel, Folding
from subfleet.folding.path_scoring import random_paths
from subfleet.folding.views import Views
from subfleet.methods.asking import stream_of
from subfleet.methods.policies import Participant
from subfleet.rounds.actions import Fold
from subfleet.rounds.events import Folded
from subfleet.tasks import Dataset

__all__ = ["FoldOutcome", "Workbench"]

_PATHS = 8
"""Of a supernet, by whose mean it is evaluated."""
_ALL = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldOutcome:
    """The next model, already on disk, and the event that tells of it."""

    model: ModelState
    event: Folded


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
        self._inputs = torch.from_numpy(evaluation.inputs.copy())
        self._labels = torch.from_numpy(evaluation.labels.copy())
        self._checkpoints = checkpoints
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="subfleet-fold")
        self._work: Future[FoldOutcome] | None = None

    def begin(self, action: Fold, model: ModelState) -> None:
        """Start folding a round's updates into a model."""
        self._work = self._pool.submit(self._fold, action, model)

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

    def _fold(self, action: Fold, model: ModelState) -> FoldOutcome:
        if self._views.terms.config.calibrates(action.round):
            folded = calibrated_model(self._folding, model, action.seats, action.lineages)
        else:
            folded = self._folding.fold(
                model, action.round, action.seats, action.memory, action.lineages, action.brought
            )
        evaluation = self._evaluated(folded, action.round)
        sha256 = save_checkpoint(self._checkpoints, action.round, packed(folded.state))
        event = Folded(
            round=action.round,
            accuracy=evaluation.accuracy,
            loss=evaluation.loss,
            sha256=sha256,
            refused=folded.refused,
            found=folded.found,
            lineages=folded.lineages,
            model_bytes=folded.state.tensor_bytes,
        )
        return FoldOutcome(model=folded.state, event=event)

    def _evaluated(self, folded: FoldedModel, round_number: int) -> Evaluation:
        """The whole model, of several networks the newest; or where there is none for all, the mean of clients' own.

        A supernet is none by itself: it is as good as the mean of random paths (FedorAS, equation 4). Each of them has
        samples of its own, so that it takes no longer to evaluate than a network.
        """
        terms = self._views.terms
        lineages = [folded.folded.of(network_id).lineage for network_id in folded.folded.network_ids]
        newest = max(lineages, key=lambda one: 0 if one is None else one.born_round)
        network = terms.declared(newest).network
        if terms.policies.personal and folded.clients and not network.choices:
            found = [self._own(folded.folded, client) for client in folded.clients]
        else:
            paths = min(_PATHS, len(self._labels))
            specs = random_paths(network, paths, stream_of(f"{terms.config.seed}/{round_number}/paths"))
            everyone = [Participant(client_id="", spec=spec, size=spec) for spec in specs]
            found = [
                self._own(folded.folded, client, slice(place, None, len(everyone)))
                for place, client in enumerate(everyone)
            ]
        return replace(
            found[0],
            accuracy=math.fsum(one.accuracy for one in found) / len(found),
            loss=math.fsum(one.loss for one in found) / len(found),
        )

    def _own(self, state: ModelState, client: Participant, samples: slice = _ALL) -> Evaluation:
        seen, network = self._views.for_use(state, client), self._views.network_of(state, client)
        return evaluate(network, client.spec, seen, self._inputs[samples], self._labels[samples])
