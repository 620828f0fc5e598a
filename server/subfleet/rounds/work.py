"""Requests for work beside the loop, and their results: plain data, the same way for all.

    a request --> RequestDone(request, result)     the result is the record that the request's docstring names
              --> RequestFailed(request, reason)

Everything that takes longer than a step of the loop is requested. Each request may be made and answered twice. The one
request that carries client states, `AggregationRequest`, is in `signals`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from subfleet.elastic.lineage import Lineage
from subfleet.methods.aggregator import EvaluatedModel, Participant
from subfleet.methods.run_networks import Generation
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.memory_plan import Packing
from subfleet.protocol.messages import Update
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate
from subfleet.search.query import FoundSize, Search
from subfleet.search.queue import ProgramFacts, SizedProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """Prepare a client's training task: the program of its size and its weights. Results in `PreparedTask`."""

    participant: Participant
    round: int
    attempt: int
    target: str
    student: Architecture | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequest:
    """Prepare a client's score task: the programs that score these sizes, and their initial weights.

    Results in a tuple of `Scorable`, from the smallest to the largest; sizes without a program are left out.
    """

    client_id: str
    round: int
    target: str
    sizes: tuple[Architecture, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Prepare a client's evaluate task: its program, and its weights for inference. Results in `PreparedTask`."""

    participant: Participant
    round: int
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsRequest:
    """Export a client's own models for inference. Results in `ExportedModels`."""

    participant: Participant
    round: int


ClientRequest = TaskRequest | ScoringRequest | EvaluationRequest | ModelsRequest
"""Requests for one client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """Write a program for later rounds. Results in `ProgramFacts`."""

    program: SizedProgram
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRequest:
    """Estimate the memory of all sizes of a network on a target. Results in `MemoryEstimates`, from the planner.

    Attributes:
        lineage: the network's lineage; None for the run's first network.
    """

    target: str
    lineage: Lineage | None = None

    @property
    def key(self) -> str:
        """A key that is unique in a run: the target, after the network's id unless it is the first network."""
        return self.target if self.lineage is None or not self.lineage.id else f"{self.lineage.id}/{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworksRequest:
    """Choose the networks that the run begins with, by the offers of the clients of an attempt.

    Results in a tuple of lineages; it is empty if the run begins with the configured network.
    """

    run_attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """Search sizes for the clients of an attempt, by the method. Results in `SearchResult`."""

    run_attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Propose and score a generation, numbered from 1, of the search after a round. Results in `ProposedGeneration`."""

    round: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """Pull the blob of an update and check it. Results in `ChangeSize`.

    It fails if the update cannot be aggregated.
    """

    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTask:
    """The program and the weights of a task; a training's frozen weights are a blob of their own."""

    program: ProgramRef
    weights: BlobRef
    facts: ProgramFacts
    frozen: BlobRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorable:
    """A candidate with its scoring program, initial weights, and planned memory."""

    size: Architecture
    program: ProgramRef
    weights: BlobRef
    planned_peak_bytes: int
    packings: tuple[Packing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One inference model of a client.

    Attributes:
        file: its path.
        max_abs_diff: largest difference from PyTorch; None if the exporter did not report it.
        quantised_accuracy: accuracy of a model in 8-bit integers, on evaluation samples; else None.
        float_accuracy: accuracy of the same model in float32, on the same samples.
    """

    target: str
    file: str
    max_abs_diff: float | None
    quantised_accuracy: float | None = None
    float_accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModels:
    """A client's inference models."""

    programs: tuple[ProgramRef, ...]
    models: tuple[ModelFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The sizes that a method's search found in an attempt.

    Attributes:
        sizes: new sizes, in the order in which they were found.
        searches: by target, the search that knows these sizes and all earlier ones.
        written_estimates: by their keys, the estimated costs of written programs that had none yet.
    """

    sizes: tuple[FoundSize, ...]
    searches: Mapping[str, Search] = field(default_factory=dict)
    written_estimates: Mapping[str, Candidate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedGeneration:
    """A generation of paths, and their scores.

    Attributes:
        generation: None if nothing is left to propose.
        scores: the scores of its paths, by the server; empty if devices score and the server has no validation samples.
        ticket: distinguishes its scoring tasks from those of an earlier server process.
    """

    generation: Generation | None
    scores: tuple[float, ...] = ()
    ticket: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedRound:
    """The next model, which is on disk; it counts once the round is closed.

    Attributes:
        accuracy: accuracy of the new model on the evaluation data; None if the task has none. `loss` and `metrics` are
            for the same model and data; without a model the loss is None.
        sha256: digest of its checkpoint; empty without a model.
        model: the evaluated model.
        refused: clients whose updates could not be aggregated, and why.
        observation: the method's observation of the updates, see `Memory.observe`.
        lineages: the lineages of the run's networks, after the round.
        model_bytes: bytes of all tensors that the server keeps for the next round.
        metrics: the metrics of its kind of task, by name, without accuracy.
        guess_loss: the loss of guessing without the inputs; None if it follows from the number of classes.
    """

    accuracy: float | None
    loss: float | None
    sha256: str
    refused: Mapping[str, str]
    observation: Any = None
    lineages: tuple[Lineage, ...] = ()
    model_bytes: int = 0
    model: EvaluatedModel | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    guess_loss: float | None = None
