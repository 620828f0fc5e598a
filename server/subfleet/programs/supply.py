"""Prepares what tasks need: programs and cost estimates from the exporter, submodel weights, inference models."""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from subfleet.aggregation.updates import encode_submodel
from subfleet.aggregation.views import View, Views
from subfleet.elastic.building import build_module
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.elastic.update_form import list_frozen
from subfleet.export.requests import AnyRequest, EstimateRequest, EvaluateRequest, InferRequest, TrainRequest
from subfleet.methods.aggregator import Participant
from subfleet.programs.worker import Handler, Snapshot, Steps, Threads, wait_for
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.disks import write_atomically
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.programs import ProgramRef, decode_program
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds import work
from subfleet.rounds.tasks import BATCHES, derive_score_training
from subfleet.search.queue import ProgramFacts
from subfleet.transport.blob_store import BlobStore


def without_network(architecture: Architecture) -> Architecture:
    """A submodel as the exporter knows it, independent of a run's networks.

    So networks with the same settings share their programs.
    """
    return replace(architecture, network="") if architecture.network else architecture


def build_train_request(
    network: Network,
    architecture: Architecture,
    target: str,
    training: TrainingSettings,
    *,
    student: Architecture | None = None,
) -> TrainRequest:
    """The exporter's request for a training program of a submodel."""
    return TrainRequest(
        model=network.config,
        architecture=without_network(architecture),
        target=target,
        batch_size=training.program_batch_size,
        objective=training.objective,
        optimiser=training.optimiser,
        accumulate=training.micro_batch_size > 0,
        recompute=training.recompute,
        one_part=training.micro_batch_size == training.batch_size,
        student=None if student is None else without_network(student),
    )


def derive_evaluate_request(export: TrainRequest) -> EvaluateRequest:
    """The exporter's request for the program that evaluates what another one trains, with the plain objective."""
    return EvaluateRequest(
        model=export.model,
        architecture=export.architecture,
        target=export.target,
        batch_size=export.batch_size,
        objective=export.objective.plain,
    )


_LOG = logging.getLogger(__name__)
_Part = Literal["training", "frozen", "evaluation"]
"""The trained weights, the frozen weights, or all weights as an evaluation uses them."""
_LANE = "weights"


class Exports(Protocol):
    """The seam to the exporter; `subfleet.export.pool.ExportPool` is the real one."""

    def submit(
        self, request: AnyRequest, *, weights_path: Path | None = None, samples_from: str = ""
    ) -> "Future[Path]":
        """The file of a packed program, of an inference model, or of the cost estimates of all submodels."""
        ...


class Supply:
    """Prepares tasks: the coroutines of a `Worker`, and their caches.

    Args:
        views: the models that clients see.
        exports: the exporter.
        threads: that submodel weights are cut in.
        blobs: that serve programs and weights.
        models_folder: for each client's inference models.
        samples_sha256: content id of the samples for models in 8-bit integers; empty without such models.
    """

    def __init__(
        self,
        views: Views,
        exports: Exports,
        threads: Threads,
        *,
        blobs: BlobStore,
        models_folder: Path,
        samples_sha256: str = "",
    ) -> None:
        self._context = views.context
        self._views = views
        self._exports = exports
        self._threads = threads
        self._blobs = blobs
        self._models_folder = models_folder
        self._samples_sha256 = samples_sha256
        self._model = ModelState(shared={})
        self._weights: dict[tuple[str, ...], BlobRef] = {}
        self._cuts: dict[tuple[str, ...], Future[bytes]] = {}  # weights that are being cut
        # By network and program: two may have the same program.
        self._programs: dict[tuple[str, TrainRequest | EvaluateRequest], tuple[ProgramRef, ProgramFacts]] = {}
        self._first_weights: dict[str, BlobRef] = {}  # by size
        self._deployed: set[str] = set()

    @property
    def duties(self) -> Mapping[type, Handler]:
        """Its handlers, by the type of the request."""
        works: Mapping[type, Callable[[Any, Snapshot], Steps[Any]]] = {
            work.TaskRequest: self._prepare_task,
            work.EvaluationRequest: self._prepare_task,
            work.ScoringRequest: self._prepare_scoring,
            work.ModelsRequest: self._export_models,
            work.ProgramRequest: self._write_program,
            work.CostRequest: self._estimate_costs,
        }
        return {kind: Handler(work=prepare, failure="export failed") for kind, prepare in works.items()}

    @property
    def digests(self) -> set[str]:
        """Digests of every blob that tasks may still need."""
        programs = (program.blob for program, _ in self._programs.values())
        blobs = (*self._weights.values(), *self._first_weights.values(), *programs)
        return {blob.sha256 for blob in blobs} | self._deployed

    def renew(self, model: ModelState) -> None:
        """Cache the weights of this model from now on, and drop the programs of networks that it does not have."""
        self._model = model
        self._weights, self._cuts = {}, {}
        in_use = set(model.network_ids)
        self._programs = {key: program for key, program in self._programs.items() if key[0] in in_use}

    async def _prepare_task(
        self, request: work.TaskRequest | work.EvaluationRequest, run: Snapshot
    ) -> work.PreparedTask:
        client, network = request.participant, self._find_network(run.model, request.participant.size)
        student = request.student if isinstance(request, work.TaskRequest) else None
        training = self._context.training(request.round, student=student)
        export = build_train_request(network, client.size, request.target, training, student=student)
        evaluates = isinstance(request, work.EvaluationRequest)
        program, facts = await self._fetch_program(
            client.size.network, derive_evaluate_request(export) if evaluates else export
        )
        frozen = None
        if not evaluates and list_frozen(network):
            frozen = await self._cut_weights(run.model, client, "frozen")
        weights = await self._cut_weights(run.model, client, "evaluation" if evaluates else "training")
        return work.PreparedTask(program=program, weights=weights, facts=facts, frozen=frozen)

    async def _write_program(self, request: work.ProgramRequest, run: Snapshot) -> ProgramFacts:
        program, training = request.program, self._context.training(request.round)
        network, evaluation = self._find_network(run.model, program.size), None
        export = build_train_request(network, program.size, program.target, training)
        file = self._exports.submit(export)
        if self._context.config.evaluation.every and not self._context.roles.assigner.awaits_programs:
            # Clients of this size evaluate it between rounds, which the exporter must not hold up either.
            evaluation = self._exports.submit(derive_evaluate_request(export))
        _, facts = await self._fetch_program(program.size.network, export, file)
        if evaluation is not None:
            with contextlib.suppress(SubfleetError, CancelledError):  # the training program is still usable
                await wait_for(evaluation)
        return facts

    async def _estimate_costs(self, request: work.CostRequest, run: Snapshot) -> MemoryEstimates:
        del run
        network = self._context.get_declared(request.lineage).network
        export = build_train_request(network, network.full_architecture(), request.target, self._context.training(1))
        file = await wait_for(self._exports.submit(EstimateRequest(training=export)))
        return MemoryEstimates.unpack(file.read_bytes())

    async def _prepare_scoring(self, request: work.ScoringRequest, run: Snapshot) -> tuple[work.Scorable, ...]:
        training = derive_score_training(self._context.training(request.round))
        exports = [
            build_train_request(self._find_network(run.model, size), size, request.target, training)
            for size in request.sizes
        ]
        files = [self._exports.submit(export) for export in exports]  # all are written at once
        candidates = []
        for size, export, file in zip(request.sizes, exports, files, strict=True):
            try:
                program, facts = await self._fetch_program(size.network, export, file)
            except (SubfleetError, CancelledError, OSError) as error:
                _LOG.warning("size %s cannot be scored on %s: %s", size.name, export.target, error)
                continue
            if size.architecture_id not in self._first_weights:
                network = self._find_network(run.model, size)
                content = await wait_for(self._threads.submit(_LANE, _draw_first_weights, network, size))
                self._first_weights[size.architecture_id] = self._blobs.add(content)
            weights = self._first_weights[size.architecture_id]
            # The device holds a gradient of each batch beside the program.
            peak_bytes = (facts.planned_peak_bytes or 0) + BATCHES * weights.size_bytes
            candidates.append(
                work.Scorable(
                    size=size, program=program, weights=weights, planned_peak_bytes=peak_bytes, packings=facts.packings
                )
            )
        return tuple(candidates)

    async def _export_models(self, request: work.ModelsRequest, run: Snapshot) -> work.ExportedModels:
        config, client = self._context.config, request.participant
        view = self._views.of(run.model, client)
        content = await wait_for(self._cut(view, "evaluation"))
        weights = self._blobs.add(content)
        self._deployed.add(weights.sha256)
        files = {
            target: self._exports.submit(
                InferRequest(
                    model=view.network.config,
                    architecture=without_network(client.size),
                    target=target,
                    weights_sha256=weights.sha256,
                    quantisation=config.deploy_quantisation,
                    samples_sha256=self._samples_sha256,
                    classes=config.data.classes,
                    objective=config.training.objective.name,
                    transform=config.data.transform,
                ),
                weights_path=self._blobs.path(weights),
                samples_from=config.data.evaluated_on if self._samples_sha256 else "",
            )
            for target in config.deploy_targets
        }
        programs, models = [], []
        for target, file in files.items():
            exported = await wait_for(file)
            copy = self._models_folder / client.client_id / f"model{exported.suffix}"
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy, [exported.read_bytes()])
            blob = self._blobs.add_file(copy)
            programs.append(ProgramRef(program_id=blob.sha256, target=target, blob=blob))
            models.append(work.ModelFile(target=target, file=str(copy), **read_figures(exported)))
        return work.ExportedModels(programs=tuple(programs), models=tuple(models))

    async def _fetch_program(
        self, network_id: str, export: TrainRequest | EvaluateRequest, file: "Future[Path] | None" = None
    ) -> tuple[ProgramRef, ProgramFacts]:
        """The program of a network, from the cache or the exporter."""
        key = (network_id, export)
        if key not in self._programs:
            path = await wait_for(file or self._exports.submit(export))
            if key not in self._programs:  # another request may have waited for the same file
                content = path.read_bytes()
                manifest = decode_program(content).manifest
                ref = ProgramRef(program_id=manifest.program_id, target=export.target, blob=self._blobs.add(content))
                self._programs[key] = ref, ProgramFacts.of(manifest, len(content))
        return self._programs[key]

    def _find_network(self, model: ModelState, size: Architecture) -> Network:
        """The network of a submodel; one that has retired fails the request."""
        return self._context.get_declared(model.of(size.network).lineage).network

    async def _cut_weights(self, model: ModelState, client: Participant, part: _Part) -> BlobRef:
        """The weights that a client sees of a model; cut once for all that share them."""
        # Weights of an earlier model are not cached.
        weights, cuts = (self._weights, self._cuts) if model is self._model else ({}, {})
        view = self._views.of(model, client)
        key = (part, *view.key)
        if key not in weights:
            cuts[key] = cuts.get(key) or self._cut(view, part)
            try:
                content = await wait_for(cuts[key])
            finally:
                cuts.pop(key, None)  # if it has failed, the next client that needs these weights cuts them again
            if key not in weights:
                weights[key] = self._blobs.add(content)
        return weights[key]

    def _cut(self, view: View, part: _Part) -> "Future[bytes]":
        def cut() -> bytes:
            if part == "evaluation":
                return encode_submodel(view.network, view.client.architecture, self._views.prepare_tensors(view))
            return encode_submodel(view.network, view.client.architecture, view.tensors, frozen=part == "frozen")

        return self._threads.submit(_LANE, cut)


def _draw_first_weights(network: Network, size: Architecture) -> bytes:
    """The weights that a candidate is scored with: the same random ones in every run.

    No layer is 0, which would hide the gradients of the layers before it.
    """
    return encode_submodel(network, size, build_module(network, network.full_architecture()).state_dict())


def read_figures(exported: Path) -> dict[str, float | None]:
    """The exporter's figures for a model, read from `<file>.json` beside it; None for missing ones."""
    names = ("max_abs_diff", "quantised_accuracy", "float_accuracy")
    try:
        figures = json.loads(Path(f"{exported}.json").read_text(encoding="utf-8"))
        quantised = figures.get("quantisation") or {}
        values = (figures.get("max_abs_diff"), quantised.get("accuracy"), quantised.get("float_accuracy"))
        return {name: None if value is None else float(value) for name, value in zip(names, values, strict=True)}
    except (OSError, ValueError, AttributeError, TypeError):
        return dict.fromkeys(names)
