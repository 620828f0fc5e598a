"""Prepares what tasks need: programs and cost estimates from the exporter, submodel weights, inference models."""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from subfleet.aggregation.updates import encode_submodel
from subfleet.aggregation.views import Views
from subfleet.elastic.building import build_module
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.export.requests import AnyRequest, EstimateRequest, EvaluateRequest, InferRequest, TrainRequest
from subfleet.methods.aggregator import Participant
from subfleet.programs.worker import Handler, Snapshot, Steps, Threads, wait_for
from subfleet.protocol.blobs import BlobRef
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
    return replace(architecture, network="")


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


def build_evaluate_request(
    network: Network, architecture: Architecture, target: str, training: TrainingSettings
) -> EvaluateRequest:
    """The exporter's request for an evaluation program of a submodel, with the plain objective of its training."""
    return EvaluateRequest(
        model=network.config,
        architecture=without_network(architecture),
        target=target,
        batch_size=training.program_batch_size,
        objective=training.objective.plain,
    )


_LOG = logging.getLogger(__name__)
_LANE = "weights"


class Exports(Protocol):
    """The seam to the exporter; `subfleet.export.pool.ExportPool` is the real one."""

    def submit(
        self, request: AnyRequest, *, weights_path: Path | None = None, samples_from: str = ""
    ) -> "Future[Path]":
        """The file of a packed program, of an inference model, or of the cost estimates of all submodels."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    ref: ProgramRef
    facts: ProgramFacts


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
        self._weights: dict[tuple[str, ...], BlobRef | Future[bytes]] = {}  # stored, or being cut
        self._programs: dict[tuple[str, str], _Program] = {}  # by network and program: two may have the same program
        self._first_weights: dict[str, BlobRef] = {}  # by size
        self._deployed: set[str] = set()

    @property
    def duties(self) -> Mapping[type, Handler]:
        """Its handlers, by the type of the request."""
        works: Mapping[type, Callable[[Any, Snapshot], Steps[Any]]] = {
            work.TaskRequest: self._task,
            work.ScoringRequest: self._scoring,
            work.EvaluationRequest: self._evaluation,
            work.ModelsRequest: self._models,
            work.ProgramRequest: self._written,
            work.CostRequest: self._costs,
        }
        return {kind: Handler(work=prepare, failure="export failed") for kind, prepare in works.items()}

    @property
    def digests(self) -> set[str]:
        """Digests of every blob that tasks may still need."""
        weights = [*self._weights.values(), *self._first_weights.values()]
        stored = {ref.sha256 for ref in weights if isinstance(ref, BlobRef)} | self._deployed
        return stored | {program.ref.blob.sha256 for program in self._programs.values()}

    def renew(self, model: ModelState) -> None:
        """Cache the weights of this model from now on, and drop the programs of networks that it does not have."""
        self._model = model
        self._weights = {}
        in_use = set(model.network_ids)
        self._programs = {key: program for key, program in self._programs.items() if key[0] in in_use}

    async def _task(self, request: work.TaskRequest, run: Snapshot) -> work.PreparedTask:
        client = request.participant
        training = self._context.training(request.round, student=request.student)
        network = self._network_of(run.model, client.size)
        export = build_train_request(network, client.size, request.target, training, student=request.student)
        program = await self._program(client.size.network, export)
        weights = await self._weights_of(run.model, client)
        return work.PreparedTask(program=program.ref, weights=weights, facts=program.facts)

    async def _evaluation(self, request: work.EvaluationRequest, run: Snapshot) -> work.PreparedTask:
        client, training = request.participant, self._context.training(request.round)
        export = build_evaluate_request(self._network_of(run.model, client.size), client.size, request.target, training)
        program = await self._program(client.size.network, export)
        weights = await self._weights_of(run.model, client, for_use=True)
        return work.PreparedTask(program=program.ref, weights=weights, facts=program.facts)

    async def _written(self, request: work.ProgramRequest, run: Snapshot) -> ProgramFacts:
        program, training = request.program, self._context.training(request.round)
        network = self._network_of(run.model, program.size)
        export = build_train_request(network, program.size, program.target, training)
        files = [self._exports.submit(export)]
        if self._context.config.evaluation.every and not self._context.roles.assigner.awaits_programs:
            # Clients of this size evaluate it between rounds, which the exporter must not hold up either.
            evaluation = build_evaluate_request(network, program.size, program.target, training)
            files.append(self._exports.submit(evaluation))
        written = await self._program(program.size.network, export, files[0])
        for file in files[1:]:
            with contextlib.suppress(SubfleetError, CancelledError):  # the training program is still usable
                await wait_for(file)
        return written.facts

    async def _costs(self, request: work.CostRequest, run: Snapshot) -> MemoryEstimates:
        del run
        network = self._context.declared(request.lineage).network
        export = build_train_request(network, network.full_architecture(), request.target, self._context.training(1))
        file = await wait_for(self._exports.submit(EstimateRequest(training=export)))
        return MemoryEstimates.unpack(file.read_bytes())

    async def _scoring(self, request: work.ScoringRequest, run: Snapshot) -> tuple[work.Scorable, ...]:
        training = derive_score_training(self._context.training(request.round))
        networks = {size: self._network_of(run.model, size) for size in request.sizes}
        exports = {
            size: build_train_request(network, size, request.target, training) for size, network in networks.items()
        }
        files = {size: self._training_file(export) for size, export in exports.items()}  # all are written at once
        candidates = [
            await self._scorable(networks[size], size, export, files[size]) for size, export in exports.items()
        ]
        return tuple(candidate for candidate in candidates if candidate is not None)

    def _training_file(self, export: TrainRequest) -> "Future[Path]":
        """The file of a candidate's program; a failure leaves out the candidate."""
        try:
            return self._exports.submit(export)
        except SubfleetError as error:
            failed: Future[Path] = Future()
            failed.set_exception(error)
            return failed

    async def _scorable(
        self, network: Network, size: Architecture, export: TrainRequest, file: "Future[Path]"
    ) -> work.Scorable | None:
        try:
            program = await self._program(size.network, export, file)
        except (SubfleetError, CancelledError, OSError) as error:
            _LOG.warning("size %s cannot be scored on %s: %s", size.name, export.target, error)
            return None
        if size.architecture_id not in self._first_weights:
            content = await wait_for(self._threads.submit(_LANE, _draw_first_weights, network, size))
            self._first_weights[size.architecture_id] = self._blobs.add(content)
        weights = self._first_weights[size.architecture_id]
        return work.Scorable(
            size=size,
            program=program.ref,
            weights=weights,
            # The device holds a gradient of each batch beside the program.
            planned_peak_bytes=(program.facts.planned_peak_bytes or 0) + BATCHES * weights.size_bytes,
            packings=program.facts.packings,
        )

    async def _models(self, request: work.ModelsRequest, run: Snapshot) -> work.ExportedModels:
        config, client = self._context.config, request.participant
        content = await wait_for(self._cut(run.model, client, for_use=True))
        weights = self._blobs.add(content)
        self._deployed.add(weights.sha256)
        network = self._network_of(run.model, client.architecture)
        files = {
            target: self._exports.submit(
                InferRequest(
                    model=network.config,
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
            kept = _copy(exported, self._models_folder / request.client_id / f"model{exported.suffix}")
            blob = self._blobs.add_file(kept)
            programs.append(ProgramRef(program_id=blob.sha256, target=target, blob=blob))
            models.append(work.ModelFile(target=target, file=str(kept), **read_figures(exported)))
        return work.ExportedModels(programs=tuple(programs), models=tuple(models))

    async def _program(
        self, network_id: str, export: TrainRequest | EvaluateRequest, file: "Future[Path] | None" = None
    ) -> _Program:
        """The program of a network, from the cache or the exporter."""
        key = (network_id, export.program_id)
        if key in self._programs:
            return self._programs[key]
        path = await wait_for(file or self._exports.submit(export))
        if key not in self._programs:
            content = path.read_bytes()
            manifest = decode_program(content).manifest
            ref = ProgramRef(program_id=manifest.program_id, target=export.target, blob=self._blobs.add(content))
            self._programs[key] = _Program(ref=ref, facts=ProgramFacts.of(manifest, len(content)))
        return self._programs[key]

    def _network_of(self, model: ModelState, architecture: Architecture) -> Network:
        """The network of a submodel; one that has retired fails the request."""
        return self._context.declared(model.of(architecture.network).lineage).network

    async def _weights_of(self, model: ModelState, client: Participant, *, for_use: bool = False) -> BlobRef:
        """The weights that a client sees of a model, for training or inference; cut once for all that share them."""
        weights = self._weights if model is self._model else {}  # weights of an earlier model are not cached
        key = (*(["use"] if for_use else []), *self._views.key(model, client))
        known = weights.get(key)
        if isinstance(known, BlobRef):
            return known
        cutting = known or self._cut(model, client, for_use=for_use)
        weights[key] = cutting
        try:
            content = await wait_for(cutting)
        except Exception:  # the next client that needs these weights cuts them again
            weights.pop(key, None)
            raise
        stored = weights.get(key)
        if not isinstance(stored, BlobRef):
            stored = weights[key] = self._blobs.add(content)
        return stored

    def _cut(self, model: ModelState, client: Participant, *, for_use: bool) -> "Future[bytes]":
        see = self._views.for_use if for_use else self._views.for_training
        network = self._network_of(model, client.architecture)
        return self._threads.submit(_LANE, lambda: encode_submodel(network, client.architecture, see(model, client)))


def _draw_first_weights(network: Network, size: Architecture) -> bytes:
    """The weights that a candidate is scored with: the same random ones in every run.

    No layer is 0, which would hide the gradients of the layers before it.
    """
    return encode_submodel(network, size, build_module(network, network.full_architecture()).state_dict())


def _copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".partial")
    shutil.copyfile(source, aside)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    return aside.replace(target)


def read_figures(exported: Path) -> dict[str, float | None]:
    """The exporter's figures for a model, which are beside it in `<file>.json`."""
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
