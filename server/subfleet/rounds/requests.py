"""What is made beside the loop: what is asked for, and what comes of it. Plain data, one way for all.

    Request(wanted) --> Ready(made)               what was made carries the request that it answers
                    --> Failed(wanted, reason)    it cannot be made

Whatever takes longer than a step of the loop is asked for in this way. Each may be asked for and answered twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.methods.aggregator import Participant
from subfleet.methods.path_search import Generation
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.memory import Packing
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.subnet import SubnetSpec
from subfleet.rounds.written import ModelFile, ProgramFacts
from subfleet.search.candidates import Candidate
from subfleet.search.query import FoundSize, Search
from subfleet.search.queue import SizedProgram

__all__ = [
    "BeginningMade",
    "BeginningWanted",
    "EvaluationMade",
    "EvaluationWanted",
    "GenerationMade",
    "GenerationWanted",
    "Made",
    "ModelsMade",
    "ModelsWanted",
    "PricesMade",
    "PricesWanted",
    "ProgramMade",
    "ProgramWanted",
    "Scorable",
    "ScoringMade",
    "ScoringWanted",
    "SearchMade",
    "SearchWanted",
    "TaskMade",
    "TaskWanted",
    "Wanted",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWanted:
    """A client's training task: the program of its size, and the weights of its subnet."""

    participant: Participant
    round: int
    attempt: int
    target: str
    student: SubnetSpec | None = None

    @property
    def client_id(self) -> str:
        """Whose task it is."""
        return self.participant.client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringWanted:
    """A client's score task: programs that score these sizes, and the weights that they begin with."""

    client_id: str
    round: int
    target: str
    sizes: tuple[SubnetSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWanted:
    """A client's evaluate task: the program for its size, and the weights of its subnet as they are used."""

    participant: Participant
    round: int
    target: str

    @property
    def client_id(self) -> str:
        """Whose task it is."""
        return self.participant.client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsWanted:
    """A client's own models for inference."""

    participant: Participant
    round: int

    @property
    def client_id(self) -> str:
        """Whose models they are."""
        return self.participant.client_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramWanted:
    """A program for later rounds."""

    program: SizedProgram
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PricesWanted:
    """What all sizes of a network take in training on a target, told by the exporter's planner.

    Attributes:
        lineage: of the network; None for the one that the run begins with.
    """

    target: str
    lineage: Lineage | None = None

    @property
    def key(self) -> str:
        """Names it among all of a run: by the target, and the network before it where that is not the first."""
        return self.target if self.lineage is None or not self.lineage.id else f"{self.lineage.id}/{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginningWanted:
    """The networks that the run begins with, by what the clients of a turn have and can give."""

    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchWanted:
    """Sizes for the clients of a turn, looked for by the method's search."""

    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationWanted:
    """The next generation of the search after a round, by its number from 1, proposed and scored."""

    round: int
    number: int


Wanted = (
    TaskWanted
    | ScoringWanted
    | EvaluationWanted
    | ModelsWanted
    | ProgramWanted
    | PricesWanted
    | SearchWanted
    | BeginningWanted
    | GenerationWanted
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMade:
    """A task's program and weights."""

    wanted: TaskWanted
    program: ProgramRef
    weights: BlobRef
    facts: ProgramFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorable:
    """A candidate with the program and the weights that it is scored with, and what both plan to need."""

    size: SubnetSpec
    program: ProgramRef
    weights: BlobRef
    planned_peak_bytes: int
    packings: tuple[Packing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringMade:
    """The candidates of a score task, from smallest to largest; those without a program are left out."""

    wanted: ScoringWanted
    candidates: tuple[Scorable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMade:
    """An evaluate task's program and weights."""

    wanted: EvaluationWanted
    program: ProgramRef
    weights: BlobRef
    facts: ProgramFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsMade:
    """A client's inference models."""

    wanted: ModelsWanted
    programs: tuple[ProgramRef, ...]
    models: tuple[ModelFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMade:
    """A program for later rounds was written."""

    wanted: ProgramWanted
    facts: ProgramFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class PricesMade:
    """What memory costs on a target."""

    wanted: PricesWanted
    memory: MemoryPrices


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMade:
    """What the method's search came by for a turn.

    Attributes:
        found: sizes to be remembered, in the order in which they were found.
        searches: by target, the search that knows them and all that was found before.
        written_prices: by their keys, what programs that were written cost by prices, as far as that was not known.
    """

    wanted: SearchWanted
    found: tuple[FoundSize, ...]
    searches: Mapping[str, Search] = field(default_factory=dict)
    written_prices: Mapping[str, Candidate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginningMade:
    """The lineages of the networks that the run begins with; none where that is the configured one."""

    wanted: BeginningWanted
    lineages: tuple[Lineage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMade:
    """A generation and the scores of its paths.

    Attributes:
        generation: None where nothing is left to propose.
        scores: of its paths, by the server; none where devices score, and the server has no validation samples.
        ticket: names this making of it, in the tasks of devices that score.
    """

    wanted: GenerationWanted
    generation: Generation | None
    scores: tuple[float, ...] = ()
    ticket: str = ""


Made = (
    TaskMade
    | ScoringMade
    | EvaluationMade
    | ModelsMade
    | ProgramMade
    | PricesMade
    | SearchMade
    | BeginningMade
    | GenerationMade
)
