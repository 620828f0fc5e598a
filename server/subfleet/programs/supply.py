"""What tasks need: programs and prices from the exporter, weights cut from the model, models. Never waited for.

Every request goes one way: it is begun as a job with the files that it waits for, and told as ready or failed when
these are there. A few are told at a time, as to finish one is work of the loop's own thread.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.export.requests import EvaluateRequest, InferRequest, PriceRequest, TrainRequest
from subfleet.folding.updates import subnet_weights
from subfleet.folding.views import Views
from subfleet.methods.aggregator import Participant
from subfleet.programs.requests import alone, evaluate_request, train_request
from subfleet.programs.scoring_weights import ScoringWeights
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.programs import ProgramRef, decode_program
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.events import Failed, Ready
from subfleet.rounds.exhaustive import never
from subfleet.rounds.proposing import BATCHES, score_training
from subfleet.rounds.requests import (
    EvaluationMade,
    EvaluationWanted,
    Made,
    ModelsMade,
    ModelsWanted,
    PricesMade,
    PricesWanted,
    ProgramMade,
    ProgramWanted,
    Scorable,
    ScoringMade,
    ScoringWanted,
    TaskMade,
    TaskWanted,
)
from subfleet.rounds.terms import Terms
from subfleet.rounds.written import ModelFile, ProgramFacts
from subfleet.transport.blob_store import BlobStore

__all__ = ["Exports", "Supplied", "Supply"]

_LOG = logging.getLogger(__name__)
_AT_ONCE = 8
"""Requests that are told of in one step: each may cut weights out of the model."""
_MOST_CHARACTERS = 400  # of a reason, as it stands in tables

Supplied = TaskWanted | ScoringWanted | EvaluationWanted | ModelsWanted | ProgramWanted | PricesWanted
"""What is made of the exporter's files."""
_Files = Mapping[str, "Future[Path]"]


class Exports(Protocol):
    """The seam to the exporter; `subfleet.export.pool.ExportPool` is the real one."""

    def submit_training(self, request: TrainRequest) -> "Future[Path]":
        """A file with the packed training program."""
        ...

    def submit_evaluation(self, request: EvaluateRequest) -> "Future[Path]":
        """A file with the packed evaluation program."""
        ...

    def submit_inference(self, request: InferRequest, weights_path: Path, *, samples_from: str = "") -> "Future[Path]":
        """A plain inference model file; the weights are a container of the subnet's own tensors."""
        ...

    def submit_prices(self, request: PriceRequest) -> "Future[Path]":
        """A file with what the programs of all subnets would be planned to take."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    ref: ProgramRef
    facts: ProgramFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One request under way.

    Attributes:
        files: that it waits for.
        finished: what they come to.
    """

    wanted: Supplied
    finished: Callable[[], Made]
    files: _Files = field(default_factory=lambda: MappingProxyType({}))

    @property
    def done(self) -> bool:
        """Whether nothing is waited for."""
        return all(file.done() for file in self.files.values())


class Supply:
    """Prepares tasks. Every method belongs to the server's one thread; the exporter works elsewhere.

    Args:
        terms: of the run.
        views: what clients see of the model.
        exports: the exporter.
        blobs: where programs and weights are served from.
        models_folder: where each client's inference models are kept.
        samples_sha256: content id of the samples for models in 8-bit integers; empty where none are wanted.
    """

    def __init__(
        self,
        terms: Terms,
        views: Views,
        exports: Exports,
        *,
        blobs: BlobStore,
        models_folder: Path,
        samples_sha256: str = "",
    ) -> None:
        self._terms = terms
        self._views = views
        self._exports = exports
        self._blobs = blobs
        self._models_folder = models_folder
        self._samples_sha256 = samples_sha256
        self._model = ModelState(shared={})
        self._weights: dict[tuple[str, ...], BlobRef] = {}
        self._programs: dict[tuple[str, str], _Program] = {}  # by network and program: two may have the same program
        self._first_weights = ScoringWeights(blobs)
        self._jobs: dict[Supplied, _Job] = {}
        self._failed: list[Failed] = []
        self._deployed: set[str] = set()

    @property
    def digests(self) -> set[str]:
        """Of every blob that tasks may still need."""
        weights = {ref.sha256 for ref in self._weights.values()} | self._deployed | self._first_weights.digests
        return weights | {program.ref.blob.sha256 for program in self._programs.values()}

    @property
    def more(self) -> bool:
        """Whether the next call of `events` tells of something."""
        return bool(self._failed) or any(job.done for job in self._jobs.values())

    def renew(self, model: ModelState) -> None:
        """From now on cut weights from this model, and forget the programs of networks that are not in it."""
        self._model = model
        self._weights.clear()
        in_use = set(model.network_ids)
        self._programs = {key: program for key, program in self._programs.items() if key[0] in in_use}

    def begin(self, wanted: Supplied) -> None:
        """Begin what is asked for; `events` tells when it is ready. What is under way is not begun again."""
        if wanted in self._jobs:
            return
        try:
            self._jobs[wanted] = self._begun(wanted)
        except Exception as error:  # noqa: BLE001  # as in `events`
            self._failed.append(_failure(wanted, error))

    def events(self) -> tuple[Ready | Failed, ...]:
        """What has become ready, or has failed, since the last call: a few, in the order in which they were begun."""
        events: list[Ready | Failed] = [*self._failed]
        self._failed.clear()
        for job in [job for job in self._jobs.values() if job.done][:_AT_ONCE]:
            del self._jobs[job.wanted]
            try:
                events.append(Ready(made=job.finished()))
            except Exception as error:  # noqa: BLE001  # whatever it is, what was asked for fails, and not the run
                events.append(_failure(job.wanted, error))
        return tuple(events)

    def _begun(self, wanted: Supplied) -> _Job:
        match wanted:
            case TaskWanted():
                job = self._task(wanted)
            case ScoringWanted():
                job = self._scoring(wanted)
            case EvaluationWanted():
                job = self._evaluation(wanted)
            case ModelsWanted():
                job = self._models(wanted)
            case ProgramWanted():
                job = self._program(wanted)
            case PricesWanted():
                job = self._prices(wanted)
            case _:
                never(wanted)
        return job

    def _task(self, wanted: TaskWanted) -> _Job:
        training = self._terms.training(wanted.round, student=wanted.student)
        size = wanted.participant.size
        request = train_request(self._network_of(size), size, wanted.target, training, student=wanted.student)
        known = (size.network, request.program_id) in self._programs
        files = {} if known else {"": self._exports.submit_training(request)}

        def finished() -> Made:
            program = self._packed(size.network, request, files)
            weights = self._weights_of(wanted.participant)
            return TaskMade(wanted=wanted, program=program.ref, weights=weights, facts=program.facts)

        return _Job(wanted=wanted, files=files, finished=finished)

    def _program(self, wanted: ProgramWanted) -> _Job:
        program, training = wanted.program, self._terms.training(wanted.round)
        network = self._network_of(program.size)
        request = train_request(network, program.size, program.target, training)
        files = {"": self._exports.submit_training(request)}
        if self._terms.config.evaluation.every and not self._terms.roles.assigner.awaits_programs:
            # Who is given it after this evaluates it between rounds, which nothing is to hold up either.
            evaluation = evaluate_request(network, program.size, program.target, training)
            files["evaluation"] = self._exports.submit_evaluation(evaluation)
        return _Job(
            wanted=wanted,
            files=files,
            finished=lambda: ProgramMade(wanted=wanted, facts=self._packed(program.size.network, request, files).facts),
        )

    def _prices(self, wanted: PricesWanted) -> _Job:
        network = self._terms.declared(wanted.lineage).network
        request = train_request(network, network.full_spec(), wanted.target, self._terms.training(1))
        file = self._exports.submit_prices(PriceRequest(training=request))
        return _Job(
            wanted=wanted,
            files={"": file},
            finished=lambda: PricesMade(wanted=wanted, memory=MemoryPrices.unpacked(file.result().read_bytes())),
        )

    def _scoring(self, wanted: ScoringWanted) -> _Job:
        training = score_training(self._terms.training(wanted.round))
        requests = {size: train_request(self._network_of(size), size, wanted.target, training) for size in wanted.sizes}
        files = {size.spec_id: self._training_file(request) for size, request in requests.items()}

        def finished() -> Made:
            found = (self._scorable(size, request, files[size.spec_id]) for size, request in requests.items())
            return ScoringMade(wanted=wanted, candidates=tuple(one for one in found if one is not None))

        return _Job(wanted=wanted, files=files, finished=finished)

    def _training_file(self, request: TrainRequest) -> "Future[Path]":
        """A candidate without a program is left out, however that comes."""
        try:
            return self._exports.submit_training(request)
        except SubfleetError as error:
            failed: Future[Path] = Future()
            failed.set_exception(error)
            return failed

    def _scorable(self, size: SubnetSpec, request: TrainRequest, file: "Future[Path]") -> Scorable | None:
        try:
            program = self._packed(size.network, request, {"": file})
        except (SubfleetError, CancelledError, OSError) as error:
            _LOG.warning("size %s cannot be scored on %s: %s", size.name, request.target, error)
            return None
        weights = self._first_weights.of(self._network_of(size), size)
        return Scorable(
            size=size,
            program=program.ref,
            weights=weights,
            # A gradient of each batch is held beside the program.
            planned_peak_bytes=program.facts.planned_peak_bytes + BATCHES * weights.size_bytes,
            packings=program.facts.packings,
        )

    def _evaluation(self, wanted: EvaluationWanted) -> _Job:
        client = wanted.participant
        request = evaluate_request(
            self._network_of(client.size), client.size, wanted.target, self._terms.training(wanted.round)
        )
        known = (client.size.network, request.program_id) in self._programs
        files = {} if known else {"": self._exports.submit_evaluation(request)}

        def finished() -> Made:
            program = self._packed(client.size.network, request, files)
            weights = self._weights_of(client, for_use=True)
            return EvaluationMade(wanted=wanted, program=program.ref, weights=weights, facts=program.facts)

        return _Job(wanted=wanted, files=files, finished=finished)

    def _models(self, wanted: ModelsWanted) -> _Job:
        config = self._terms.config
        network = self._network_of(wanted.participant.spec)
        seen = self._views.for_use(self._model, wanted.participant)
        weights = self._blobs.add(subnet_weights(network, wanted.participant.spec, seen))
        self._deployed.add(weights.sha256)
        files = {
            target: self._exports.submit_inference(
                InferRequest(
                    model=network.config,
                    spec=alone(wanted.participant.size),
                    target=target,
                    weights_sha256=weights.sha256,
                    quantisation=config.deploy_quantisation,
                    samples_sha256=self._samples_sha256,
                    classes=config.data.classes,
                    objective=config.training.objective.name,
                    transform=config.data.transform,
                ),
                self._blobs.path(weights),
                samples_from=config.data.evaluated_on if self._samples_sha256 else "",
            )
            for target in config.deploy_targets
        }
        return _Job(wanted=wanted, files=files, finished=partial(self._models_made, wanted, files))

    def _models_made(self, wanted: ModelsWanted, files: _Files) -> ModelsMade:
        programs, models = [], []
        for target, file in files.items():
            exported = file.result()
            kept = _kept(exported, self._models_folder / wanted.client_id / f"model{exported.suffix}")
            blob = self._blobs.add_file(kept)
            programs.append(ProgramRef(program_id=blob.sha256, target=target, blob=blob))
            models.append(ModelFile(target=target, file=str(kept), **figures_of(exported)))
        return ModelsMade(wanted=wanted, programs=tuple(programs), models=tuple(models))

    def _packed(self, network_id: str, request: TrainRequest | EvaluateRequest, files: _Files) -> _Program:
        """The program of a network's request, read from the exporter's one file where it is not known yet."""
        key = (network_id, request.program_id)
        if key not in self._programs:
            content = files[""].result().read_bytes()
            manifest = decode_program(content).manifest
            ref = ProgramRef(program_id=manifest.program_id, target=request.target, blob=self._blobs.add(content))
            self._programs[key] = _Program(ref=ref, facts=ProgramFacts.of(manifest, len(content)))
        return self._programs[key]

    def _network_of(self, spec: SubnetSpec) -> Network:
        """The network of a subnet; one that has retired fails what was asked for."""
        return self._terms.declared(self._model.of(spec.network).lineage).network

    def _weights_of(self, client: Participant, *, for_use: bool = False) -> BlobRef:
        """What a client sees of the model, to train on or as it would use it."""
        key = (*(["use"] if for_use else []), *self._views.key(self._model, client))
        if key not in self._weights:
            see = self._views.for_use if for_use else self._views.for_training
            seen = see(self._model, client)
            network = self._network_of(client.spec)
            self._weights[key] = self._blobs.add(subnet_weights(network, client.spec, seen))
        return self._weights[key]


def _kept(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".partial")
    shutil.copyfile(source, aside)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    return aside.replace(target)


def _failure(wanted: Supplied, error: BaseException) -> Failed:
    _LOG.warning("%s", _told(wanted, error))
    reason = f"export failed: {str(error) or type(error).__name__}"[:_MOST_CHARACTERS]
    return Failed(wanted=wanted, reason=reason)


def _told(wanted: Supplied, error: BaseException) -> str:
    match wanted:
        case TaskWanted() | ScoringWanted() | EvaluationWanted() | ModelsWanted():
            said = f"a task for client {wanted.client_id} cannot be prepared: {error}"
        case ProgramWanted():
            program = wanted.program
            said = f"size {program.size.name} cannot be trained on {program.target}: {error}"
        case PricesWanted():
            said = f"the network cannot be trained on {wanted.target}: {error}"
        case _:
            never(wanted)
    return said


def figures_of(exported: Path) -> dict[str, float | None]:
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
