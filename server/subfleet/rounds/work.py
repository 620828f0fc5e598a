"""Work beside the loop: what a run asks for, and what each request results in. Plain data, one way for all.

    a request --> Done(request, result)     the result is the record that the request's docstring names
              --> Failed(request, reason)   there is none

Whatever takes longer than a step of the loop is asked for in this way. Each may be asked for and answered twice.
`actions` has the one request that carries client states, `AggregationRequest`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from subfleet.elastic.lineage import Lineage
from subfleet.methods.aggregator import Participant
from subfleet.methods.model_kinds import EvaluatedModel
from subfleet.methods.path_search import Generation
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.memory import Packing
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

    @property
    def client_id(self) -> str:
        """The client that the task is for."""
        return self.participant.client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequest:
    """Prepare a client's score task: programs that score these sizes, and the weights that they begin with.

    Results in a tuple of `Scorable`, from the smallest to the largest; those without a program are left out.
    """

    client_id: str
    round: int
    target: str
    sizes: tuple[Architecture, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Prepare a client's evaluate task: its program, and its weights as they are used. Results in `PreparedTask`."""

    participant: Participant
    round: int
    target: str

    @property
    def client_id(self) -> str:
        """The client that the task is for."""
        return self.participant.client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsRequest:
    """Export a client's own models for inference. Results in `ExportedModels`."""

    participant: Participant
    round: int

    @property
    def client_id(self) -> str:
        """The client that the models are for."""
        return self.participant.client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """Write a program for later rounds. Results in `ProgramFacts`."""

    program: SizedProgram
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRequest:
    """Let the exporter's planner estimate what all sizes of a network take on a target. Results in `MemoryEstimates`.

    Attributes:
        lineage: of the network; None for the one that the run begins with.
    """

    target: str
    lineage: Lineage | None = None

    @property
    def key(self) -> str:
        """Unique in a run: the target, after the network's id where that is not the first network."""
        return self.target if self.lineage is None or not self.lineage.id else f"{self.lineage.id}/{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworksRequest:
    """Choose the networks that the run begins with, by what the clients of a turn have and can give.

    Results in a tuple of lineages; it is empty where the run begins with the configured network.
    """

    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """Let the method search sizes for the clients of a turn. Results in `SearchResult`."""

    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Propose and score a generation, numbered from 1, of the search after a round. Results in `ProposedGeneration`."""

    round: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """Pull the blob of an update and check it. Results in `ChangeSize`: how far it moves what it trained.

    It fails where the update cannot be aggregated.
    """

    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTask:
    """The program and the weights of a task."""

    program: ProgramRef
    weights: BlobRef
    facts: ProgramFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorable:
    """A candidate with the program and the weights that it is scored with, and the memory that both are planned for."""

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
        quantised_accuracy: of a model in 8-bit integers, on evaluation samples; else None.
        float_accuracy: of the same model in float32, on the same samples.
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
    """The sizes that a method's search found in a turn.

    Attributes:
        found: new sizes, in the order in which they were found.
        searches: by target, the search that knows them and all that was found before.
        written_estimates: by their keys, estimated costs of written programs that had none yet.
    """

    found: tuple[FoundSize, ...]
    searches: Mapping[str, Search] = field(default_factory=dict)
    written_estimates: Mapping[str, Candidate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedGeneration:
    """A generation of paths, and their scores.

    Attributes:
        generation: None where nothing is left to propose.
        scores: of its paths, by the server; none where devices score, and the server has no validation samples.
        ticket: distinguishes the tasks of devices that score it from those of an earlier server.
    """

    generation: Generation | None
    scores: tuple[float, ...] = ()
    ticket: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedRound:
    """The next model is on disk; it counts once the round is closed.

    Attributes:
        accuracy: of the new model on the evaluation data, as are loss and metrics; None where that means nothing.
        model: the one that they describe.
        refused: clients whose updates could not be aggregated after all, and why.
        observation: what the method observed in the updates, see `Memory.observe`.
        lineages: of the networks that the run has had, with what became of them after the round.
        model_bytes: of all tensors that the server has to keep for the next round.
        metrics: of its kind of task, by name, without accuracy.
        guess_loss: that of knowing nothing of the inputs; None where the number of classes says it.
    """

    accuracy: float | None
    loss: float
    sha256: str
    refused: Mapping[str, str]
    observation: Any = None
    lineages: tuple[Lineage, ...] = ()
    model_bytes: int = 0
    model: EvaluatedModel | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    guess_loss: float | None = None
