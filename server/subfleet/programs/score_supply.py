"""What score tasks need: a program for each candidate, and the weights that it is scored with. Never waited for."""

import logging
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path

from subfleet.elastic.building import build_module
from subfleet.export.requests import TrainRequest
from subfleet.folding.updates import subnet_weights
from subfleet.programs.requests import train_request
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.programs import ProgramRef, decode_program
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.actions import PrepareScoring
from subfleet.rounds.events import Scorable, ScoringPrepared
from subfleet.rounds.proposing import BATCHES, score_training
from subfleet.rounds.state import Plan
from subfleet.transport.blob_store import BlobStore

__all__ = ["ScoreSupply"]

_LOG = logging.getLogger(__name__)

_Futures = Mapping[SubnetSpec, "Future[Path]"]


class ScoreSupply:
    """Prepares score tasks. It belongs to the server's one thread; the exporter works elsewhere.

    Args:
        plan: of the run.
        blobs: where programs and weights are served from.
    """

    def __init__(self, plan: Plan, blobs: BlobStore) -> None:
        self._network = plan.network
        self._plan = plan
        self._blobs = blobs
        self._asked: list[tuple[PrepareScoring, _Futures]] = []
        self._programs: dict[str, BlobRef] = {}
        self._weights: dict[str, BlobRef] = {}

    @property
    def digests(self) -> set[str]:
        """Of every blob that score tasks may still need."""
        return {blob.sha256 for blob in (*self._programs.values(), *self._weights.values())}

    def requests(self, action: PrepareScoring) -> Mapping[SubnetSpec, TrainRequest]:
        """What a score task asks of the exporter, for each candidate."""
        training = score_training(self._plan.training(action.round))
        return {size: train_request(self._network, size, action.target, training) for size in action.sizes}

    def await_programs(self, action: PrepareScoring, futures: _Futures) -> None:
        """Begin a score task; candidates without a future are left out."""
        self._asked.append((action, futures))

    def events(self) -> list[ScoringPrepared]:
        """What has become ready since the last call."""
        ready = [job for job in self._asked if all(future.done() for future in job[1].values())]
        self._asked = [job for job in self._asked if job not in ready]
        return [self._prepared(action, futures) for action, futures in ready]

    def _prepared(self, action: PrepareScoring, futures: _Futures) -> ScoringPrepared:
        candidates = []
        for size, future in futures.items():
            try:
                candidates.append(self._scorable(size, action.target, future.result()))
            except (SubfleetError, CancelledError, OSError) as error:
                _LOG.warning("size %s cannot be scored on %s: %s", size.name, action.target, error)
        return ScoringPrepared(client_id=action.client_id, round=action.round, candidates=tuple(candidates))

    def _scorable(self, size: SubnetSpec, target: str, path: Path) -> Scorable:
        content = path.read_bytes()
        manifest = decode_program(content).manifest
        blob = self._programs.setdefault(manifest.program_id, self._blobs.add(content))
        weights = self._weights_of(size)
        return Scorable(
            size=size,
            program=ProgramRef(program_id=manifest.program_id, target=target, blob=blob),
            weights=weights,
            # A gradient of each batch is held beside the program.
            planned_peak_bytes=manifest.planned_peak_bytes + BATCHES * weights.size_bytes,
            packings=manifest.memory.packings,
        )

    def _weights_of(self, size: SubnetSpec) -> BlobRef:
        """Drawn alike in every run, with no layer at 0, which would hide the gradients of the layers before it."""
        if size.spec_id not in self._weights:
            first = build_module(self._network, self._network.full_spec()).state_dict()
            self._weights[size.spec_id] = self._blobs.add(subnet_weights(self._network, size, first))
        return self._weights[size.spec_id]
