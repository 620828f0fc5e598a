"""What tasks need: programs from the exporter, weights cut from the model, inference models. Never waited for."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from subfleet.elastic.model_state import ModelState
from subfleet.export.requests import InferRequest, TrainRequest
from subfleet.folding.updates import subnet_weights
from subfleet.folding.views import Views
from subfleet.methods.policies import Participant
from subfleet.programs.requests import train_request
from subfleet.programs.score_supply import ScoreSupply
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.memory import Packing
from subfleet.protocol.programs import ProgramRef, decode_program
from subfleet.rounds.actions import Export, Prepare, PrepareModels, PrepareScoring
from subfleet.rounds.events import DeployPrepared, Event, Exported, Prepared, PrepareFailed
from subfleet.rounds.state import NO_PROGRAM_BYTES, ModelFile, Plan, Queued
from subfleet.transport.blob_store import BlobStore

__all__ = ["Exports", "Supply"]

_LOG = logging.getLogger(__name__)


class Exports(Protocol):
    """The seam to the exporter; `subfleet.export.pool.ExportPool` is the real one."""

    def submit_training(self, request: TrainRequest) -> "Future[Path]":
        """A file with the packed training program."""
        ...

    def submit_inference(
        self, request: InferRequest, weights_path: Path, *, calibration_data: str = ""
    ) -> "Future[Path]":
        """A plain inference model file; the weights are a container of the subnet's own tensors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    ref: ProgramRef
    planned_peak_bytes: int
    operators: tuple[str, ...]
    packings: tuple[Packing, ...]


class Supply:
    """Prepares tasks. Every method belongs to the server's one thread; the exporter works elsewhere.

    Args:
        plan: of the run.
        views: what clients see of the model.
        exports: the exporter.
        blobs: where programs and weights are served from.
        models_folder: where each client's inference models are kept.
        calibration_sha256: content id of the samples for models in 8-bit integers; empty where none are wanted.
    """

    def __init__(
        self,
        plan: Plan,
        views: Views,
        exports: Exports,
        *,
        blobs: BlobStore,
        models_folder: Path,
        calibration_sha256: str = "",
    ) -> None:
        self._plan = plan
        self._network = plan.network
        self._views = views
        self._exports = exports
        self._blobs = blobs
        self._models_folder = models_folder
        self._calibration_sha256 = calibration_sha256
        self._model = ModelState(shared={})
        self._weights: dict[tuple[str, tuple[tuple[str, str], ...]], BlobRef] = {}
        self._programs: dict[str, _Program] = {}
        self._training: list[tuple[Prepare, TrainRequest, Future[Path] | None]] = []
        self._inference: list[tuple[PrepareModels, dict[str, Future[Path]]]] = []
        self._scoring = ScoreSupply(plan, blobs)
        self._failed: list[PrepareFailed] = []
        self._ahead: list[tuple[Queued, TrainRequest, Future[Path]]] = []
        self._written: list[Exported] = []
        self._deployed: set[str] = set()

    @property
    def digests(self) -> set[str]:
        """Of every blob that tasks may still need."""
        weights = {ref.sha256 for ref in self._weights.values()} | self._deployed
        return weights | {program.ref.blob.sha256 for program in self._programs.values()} | self._scoring.digests

    def renew(self, model: ModelState) -> None:
        """From now on cut weights from this model."""
        self._model = model
        self._weights.clear()

    def begin(self, action: Prepare | PrepareScoring | PrepareModels | Export) -> None:
        """Begin whatever is asked for; `events` tells when it is ready."""
        if isinstance(action, Prepare):
            self.prepare(action)
        elif isinstance(action, PrepareScoring):
            self.prepare_scoring(action)
        elif isinstance(action, PrepareModels):
            self.prepare_models(action)
        else:
            self.export(action)

    def prepare(self, action: Prepare) -> None:
        """Begin a training task."""
        training = self._plan.training(action.round, student=action.student)
        size = action.participant.size
        request = train_request(self._network, size, action.target, training, student=action.student)
        try:
            known = request.program_id in self._programs
            future = None if known else self._exports.submit_training(request)
        except SubfleetError as error:
            self._fail(action, error)
            return
        self._training.append((action, request, future))

    def prepare_scoring(self, action: PrepareScoring) -> None:
        """Begin a score task."""
        futures = {}
        for size, request in self._scoring.requests(action).items():
            try:
                futures[size] = self._exports.submit_training(request)
            except SubfleetError as error:
                _LOG.warning("size %s cannot be scored on %s: %s", size.name, action.target, error)
        self._scoring.await_programs(action, futures)

    def export(self, action: Export) -> None:
        """Begin to write a program for later rounds."""
        queued, training = action.queued, self._plan.training(action.round)
        request = train_request(self._network, queued.size, queued.target, training)
        try:
            self._ahead.append((queued, request, self._exports.submit_training(request)))
        except SubfleetError as error:
            self._written.append(_no_program(queued, error))

    def prepare_models(self, action: PrepareModels) -> None:
        """Begin a client's inference models."""
        config = self._plan.config
        try:
            seen = self._views.for_use(self._model, action.participant)
            weights = self._blobs.add(subnet_weights(self._network, action.participant.spec, seen))
            self._deployed.add(weights.sha256)
            futures = {
                target: self._exports.submit_inference(
                    InferRequest(
                        model=self._network.config,
                        spec=action.participant.size,
                        target=target,
                        weights_sha256=weights.sha256,
                        quantisation=config.deploy_quantisation,
                        calibration_sha256=self._calibration_sha256,
                        classes=config.data.classes,
                    ),
                    self._blobs.path(weights),
                    calibration_data=config.data.evaluated_on if self._calibration_sha256 else "",
                )
                for target in config.deploy_targets
            }
        except SubfleetError as error:
            self._fail(action, error)
            return
        self._inference.append((action, futures))

    def events(self) -> tuple[Event, ...]:
        """What has become ready, or has failed, since the last call."""
        events: list[Event] = [*self._failed, *self._written]
        self._failed.clear()
        self._written.clear()
        events += [*self._exported(), *self._scoring.events()]
        ready = [job for job in self._training if job[2] is None or job[2].done()]
        self._training = [job for job in self._training if job not in ready]
        for action, request, future in ready:
            try:
                events.append(self._prepared(action, request, future))
            except (SubfleetError, CancelledError, OSError) as error:
                events.append(_failure(action, error))
        finished = [job for job in self._inference if all(future.done() for future in job[1].values())]
        self._inference = [job for job in self._inference if job not in finished]
        for deploy, futures in finished:
            try:
                events.append(self._deploy_prepared(deploy, futures))
            except (SubfleetError, CancelledError, OSError) as error:
                events.append(_failure(deploy, error))
        return tuple(events)

    def _prepared(self, action: Prepare, request: TrainRequest, future: "Future[Path] | None") -> Prepared:
        program_id = request.program_id
        if program_id not in self._programs and future is not None:
            self._programs[program_id] = self._pack(request, future.result())
        program = self._programs[program_id]
        return Prepared(
            client_id=action.client_id,
            round=action.round,
            attempt=action.attempt,
            size_id=action.participant.size.spec_id,
            program=program.ref,
            weights=self._weights_of(action.participant),
            planned_peak_bytes=program.planned_peak_bytes,
            operators=program.operators,
            packings=program.packings,
        )

    def _exported(self) -> list[Event]:
        """The programs for later rounds that have become ready."""
        events: list[Event] = []
        ready = [job for job in self._ahead if job[2].done()]
        self._ahead = [job for job in self._ahead if job not in ready]
        for queued, request, future in ready:
            try:
                program = self._programs.setdefault(request.program_id, self._pack(request, future.result()))
                events.append(
                    Exported(
                        queued=queued,
                        planned_peak_bytes=program.planned_peak_bytes,
                        operators=program.operators,
                        packings=program.packings,
                    )
                )
            except (SubfleetError, CancelledError, OSError) as error:
                events.append(_no_program(queued, error))
        return events

    def _pack(self, request: TrainRequest, path: Path) -> _Program:
        content = path.read_bytes()
        manifest = decode_program(content).manifest
        ref = ProgramRef(program_id=manifest.program_id, target=request.target, blob=self._blobs.add(content))
        return _Program(
            ref=ref,
            planned_peak_bytes=manifest.planned_peak_bytes,
            operators=manifest.operators,
            packings=manifest.memory.packings,
        )

    def _weights_of(self, client: Participant) -> BlobRef:
        key = (client.spec.spec_id, tuple(sorted(self._views.cohorts(self._model, client).items())))
        if key not in self._weights:
            seen = self._views.for_training(self._model, client)
            self._weights[key] = self._blobs.add(subnet_weights(self._network, client.spec, seen))
        return self._weights[key]

    def _deploy_prepared(self, action: PrepareModels, futures: "Mapping[str, Future[Path]]") -> DeployPrepared:
        programs, models = [], []
        for target, future in futures.items():
            exported = future.result()
            kept = self._keep(exported, self._models_folder / action.client_id / f"model{exported.suffix}")
            blob = self._blobs.add_file(kept)
            programs.append(ProgramRef(program_id=blob.sha256, target=target, blob=blob))
            models.append(ModelFile(target=target, file=str(kept), **_figures(exported)))
        return DeployPrepared(client_id=action.client_id, programs=tuple(programs), models=tuple(models))

    def _keep(self, source: Path, target: Path) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(target.name + ".partial")
        shutil.copyfile(source, aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        return aside.replace(target)

    def _fail(self, action: Prepare | PrepareModels, error: Exception) -> None:
        self._failed.append(_failure(action, error))


def _no_program(queued: Queued, error: BaseException) -> Exported:
    _LOG.warning("size %s cannot be trained on %s: %s", queued.size.name, queued.target, error)
    return Exported(queued=queued, planned_peak_bytes=NO_PROGRAM_BYTES)


def _failure(action: Prepare | PrepareModels, error: BaseException) -> PrepareFailed:
    _LOG.warning("a task for client %s cannot be prepared: %s", action.client_id, error)
    attempt = action.attempt if isinstance(action, Prepare) else 0
    reason = f"export failed: {str(error) or type(error).__name__}"[:400]
    return PrepareFailed(client_id=action.client_id, round=action.round, attempt=attempt, reason=reason)


def _figures(exported: Path) -> dict[str, float | None]:
    """The exporter's own findings, which lie beside the model as `<file>.json`."""
    try:
        found = json.loads(Path(f"{exported}.json").read_text(encoding="utf-8"))
        quantised = found.get("quantisation") or {}
        figures = {
            "max_abs_diff": found.get("max_abs_diff"),
            "quantised_accuracy": quantised.get("accuracy"),
            "float_accuracy": quantised.get("float_accuracy"),
        }
        return {name: None if figure is None else float(figure) for name, figure in figures.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {"max_abs_diff": None}
