"""What a method decides, as a record of small pure functions with the kernel's usual behaviour as defaults.

A round of every method is the same: a size is assigned to each client, placed in the model, trained, and folded back.
A method names the steps in which it differs; what it does not name is federated averaging over nested subnets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from subfleet.elastic.lineage import Lineage
from subfleet.elastic.merges import AnyStackedMerge
from subfleet.elastic.network import Network
from subfleet.elastic.server_optimisers import AnyServerOptimiser
from subfleet.elastic.spaces import SearchSpace, uniform_space
from subfleet.elastic.teaching import DistillationSettings
from subfleet.methods.asking import Ask, Assigned, Draw, Written, largest_fitting
from subfleet.methods.describing import MethodInfo, Published, Setting
from subfleet.methods.evolving import Beginning, Evolved, Evolving, Standing
from subfleet.methods.model_kinds import FOR_ALL, ModelKind
from subfleet.methods.path_search import PathSearch
from subfleet.methods.selecting import ClosedRound, Selected, Selecting, Trainee
from subfleet.protocol.messages import Update
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.readings import Budget
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed
from subfleet.search.candidates import Candidate
from subfleet.search.query import FoundSize, PriceList, Search

if TYPE_CHECKING:  # methods are read where no PyTorch is; what is folded is passed through
    from torch import Tensor

    from subfleet.elastic.exchanges import Exchange
    from subfleet.elastic.model_state import ModelState

__all__ = [
    "BY_SAMPLES",
    "UNIFORM",
    "AfterRound",
    "Ask",
    "Assigned",
    "Beginning",
    "Draw",
    "Evolved",
    "Evolving",
    "Finding",
    "Method",
    "Participant",
    "Policies",
    "Replacement",
    "Standing",
    "Trained",
    "UpdateBytes",
    "Weighting",
    "Written",
    "as_folded",
    "as_priced",
    "by_samples",
    "in_front",
    "largest_fitting",
    "shared_by_all",
    "weigh_by",
    "without_self_distillation",
]

Weighting = Literal["samples", "uniform"]
"""How much an update counts in the mean: by its samples, or 1 each."""
BY_SAMPLES = Published(value="samples", told="each client counts as 1")
UNIFORM = Published(value="uniform", told="an update counts by its samples")
"""Of `Weighting`, in papers that have the one or the other."""
UpdateBytes = Callable[[AnyUpdateCodec], int]
"""What the update of a size takes with a codec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A client as far as methods know it.

    Attributes:
        spec: its subnet, as placed in the model.
        size: the same kept at the front of every axis: all that its programs and costs depend on.
        class_counts: samples of each of the run's classes in its data.
        examples: where it drew paths of a subspace, how many examples went through each operator of each choice.
    """

    client_id: str
    spec: SubnetSpec
    size: SubnetSpec
    class_counts: tuple[int, ...] = ()
    examples: OperatorExamples = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of one client's training.

    Attributes:
        weight: how much it counts in the mean.
        received: the weights that it began with.
        change: trained minus received, both by name of the subnet's tensors.
        exchange: the pair of maps between its network and the model; None where that is a slice.
    """

    client: Participant
    weight: float
    received: Mapping[str, Tensor]
    change: Mapping[str, Tensor]
    exchange: Exchange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """What is folded for one client.

    Attributes:
        spec: the subnet that is moved; not always the one that was trained.
        change: of each of its tensors, by name.
    """

    spec: SubnetSpec
    change: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterRound:
    """A folded round.

    Attributes:
        before: the model that the round started from.
        after: the model with all updates folded in.
        clients: whose updates were folded.
    """

    network: Network
    round: int
    seed: int
    before: ModelState
    after: ModelState
    clients: tuple[Participant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A round's updates, for a method to find in them what it will remember.

    Attributes:
        networks: by id, those that the round was played with.
        clients: whose updates were folded, in the order of their ids.
        memory: as it stood when the round's clients were chosen.
    """

    networks: Mapping[str, Network]
    round: int
    clients: tuple[Trained, ...]
    memory: Any = None


def in_front(network: Network, size: SubnetSpec, draw: Draw) -> SubnetSpec:
    """The subnet where its size already says: at the front of every axis."""
    return size


def shared_by_all(network: Network, client: Participant, sizes: Sequence[SubnetSpec]) -> Mapping[str, str]:
    """Every tensor is the same for every client."""
    return {}


def as_folded(context: AfterRound) -> ModelState:
    """The next round starts from the folded model."""
    return context.after


def as_priced(codec: AnyUpdateCodec, update_bytes: UpdateBytes, budget: Budget) -> AnyUpdateCodec:
    """Every client writes by the codec that sizes are priced by."""
    return codec


def by_samples(update: Update) -> float:
    """An update counts by the samples that it was trained on."""
    return float(update.sample_count)


def weigh_by(weighting: Weighting) -> Callable[[Update], float]:
    """How much an update counts."""
    return by_samples if weighting == "samples" else (lambda update: 1.0)


def without_self_distillation(settings: TrainingSettings) -> TrainingSettings:
    """The local training of a client that has no nested subnet to teach."""
    if settings.objective.distillation != "self":
        return settings
    return replace(settings, distillation_weight=0.0, objective=replace(settings.objective, distillation="none"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The steps of a round. Each function is pure.

    Attributes:
        memory: what the method remembers before the first round: a frozen record of plain data, which the journal keeps
            with every step that changes it; None remembers nothing. What is to be remembered in tensors lies in
            `ModelState.kept`, which `after_round` and `evolve` hand on, and every checkpoint has.
        select: which clients take part in a round, and what is remembered from then on; None draws them at random.
        evaluated_first: `select` goes by what clients found when they evaluated the model that they are to be given, so
            that a run must have them do so after every round.
        remember: what is remembered of a round that was folded; None is nothing more. Both are asked in the server's
            loop: they take a few milliseconds for a thousand clients.
        find: a round's updates to what `remember` is told of them, as plain data: asked beside the loop, where the
            round is folded. It needs the memory of all updates; None looks for nothing.
        begin: the networks that the run begins with, in place of that which the configuration describes: with ids, and
            first weights that are drawn; none leaves it that. Asked beside the server's loop, before the first round's
            clients are chosen.
        evolve: networks that appear and retire after a round, asked beside the loop, where the round is folded; with
            None a run has one network throughout. `assign` then has the sizes of all that are in use to choose from,
            each with its network's id; all else is done for each network apart.
        standing: where a run has had several networks, the subnet of one in use that is a client's own while it trains
            nothing. With None it is what it trained last, and a client whose network has retired is as one that has
            not taken part yet.
        path_search: between two rounds, for paths of a supernet that become networks of the run; None searches none.
        done: of what is remembered, why the run ends before its last round; empty where it goes on.
        space: a network and width rates to the sizes that may be assigned.
        search: a search for a program target that knows nothing yet, of the network and what its subnets cost there; it
            is told what was found before, and handed to `explore` and `assign` with each client. None searches nothing.
        explore: what the search comes by when it looks for sizes for a client, to be remembered: asked for all clients
            of a round before any of them is given one, so that all have the same to choose from. It may take seconds.
        assign: chooses a size for a client.
        propose: candidates, from smallest to largest, that a client is to score on its own data; it then has the one
            of the highest score, and what `assign` chooses where it gives none. Fewer than two propose nothing; None
            never does.
        declarations: clients have the sizes that they declare, or networks of their own: a declaration is judged when a
            client joins, one without a valid one is left out, and `assign` is told the others'. Of networks of their
            own, `begin` and `evolve` make unions, whose sizes these then are.
        lasting: clients keep the size that they get first, so that devices which replay a log are asked what it has but
            for a share of its time: `Ask.lasting`.
        awaits_programs: a strict run closes no round before the programs are written that its clients wished for in it;
            else rounds go on, and from which one on each program counts is told in what the run leaves behind.
        draws_paths: clients train subspaces of a supernet; a model with choices of operators goes with such a method
            alone.
        place: a size to the subnet of the model that has it, for one client and round.
        exchange: where a client's network is no slice of the model, the pair of maps between the two, of the model's
            network, the client and what that network's `ModelState.kept` has; None cuts its subnet from the model where
            it is placed. Of a client, it is the same in all rounds.
        training: the configured local training and the round's number to the local training of the round.
        local: the local training of the round and a client that is given a task to the client's own: its epochs, its
            learning rate and its coefficients. All else is in the program, which is the same for all who have the size.
        sends: names of the tensors whose change a client sends, of those of its subnet; None has it send all. What is
            not sent is held by nobody.
        student: the nested subnet of self-distillation, smaller than the size; None where there is none, and the client
            trains without that term.
        weigh: how much an update counts in the mean, above 0.
        min_contributors: of a network, how many clients must hold an element for it to move; 1 or more.
        cohorts: which copy of each tensor a client trains, by tensor name; those not named are shared by all. With
            `cohorts_by_sizes` it is told the sizes of the clients whose updates are in the model, else none.
        cohorts_by_sizes: cohorts depend on what sizes others have; the model then remembers them, and forgets none.
        factors: by tensor of the model, a factor from 0 to 1 on a client's weight there: a number, or a tensor that
            broadcasts against the client's own. For robust merges, which know no weights, a client holds what has a
            factor above 0.
        transform: the model that the round started from and its updates, in the order of client ids, to what is
            folded in their place; None folds them as they are. It needs the memory of them all.
        after_round: the model that the next round starts from.
        merge: of every single update, in place of the weighted mean; None takes that. A run's configuration names it.
        server_optimiser: takes the mean change for a gradient; None adds it.
        distillation: what the full model teaches its subnets after each round; None is nothing.
        taught: its sizes to the space from which the subnets are drawn that the full model teaches.
        update_codec: how devices write their updates; sizes are priced by it.
        fit_codec: that codec, what an update of a size takes with any codec, and the client's budget, to the codec of
            the client's task. What it writes must fit the budget too.
        planned_prices: sizes are priced by a model of the planner: for searches, which look at many and give few.
        recalibrates: running statistics are measured anew for every subnet that is evaluated or deployed.
        model: what the method's model is, which is evaluated after each round and reported: one for all, or one that
            each client has; see `subfleet.methods.model_kinds`.

    Raises:
        ValueError: two steps do not go together.
    """

    memory: Any = None
    select: Callable[[Selecting], Selected] | None = None
    evaluated_first: bool = False
    remember: Callable[[Any, ClosedRound], Any] | None = None
    find: Callable[[Finding], Any] | None = None
    begin: Callable[[Beginning], tuple[Lineage, ...]] | None = None
    evolve: Callable[[Evolving], Evolved] | None = None
    standing: Callable[[Standing], SubnetSpec] | None = None
    path_search: PathSearch | None = None
    done: Callable[[Any], str] = lambda memory: ""
    space: Callable[[Network, Sequence[float]], tuple[SubnetSpec, ...]] = uniform_space
    search: Callable[[Network, PriceList, str], Search] | None = None
    explore: Callable[[Ask], tuple[FoundSize, ...]] = lambda ask: ()
    assign: Callable[[Ask], Assigned] = largest_fitting
    propose: Callable[[Ask], tuple[Candidate, ...]] | None = None
    declarations: bool = False
    lasting: bool = False
    awaits_programs: bool = True
    draws_paths: bool = False
    place: Callable[[Network, SubnetSpec, Draw], SubnetSpec] = in_front
    exchange: Callable[[Network, Participant, Mapping[str, Tensor]], Exchange] | None = None
    training: Callable[[TrainingSettings, int], TrainingSettings] = lambda settings, round_number: settings
    local: Callable[[TrainingSettings, Trainee], TrainingSettings] = lambda settings, trainee: settings
    sends: Callable[[Trainee], frozenset[str]] | None = None
    student: Callable[[Network, SubnetSpec, Draw], SubnetSpec | None] = lambda network, size, draw: None
    weigh: Callable[[Update], float] = by_samples
    min_contributors: Callable[[Network], int] = lambda network: 1
    cohorts: Callable[[Network, Participant, Sequence[SubnetSpec]], Mapping[str, str]] = shared_by_all
    cohorts_by_sizes: bool = False
    factors: Callable[[Network, Participant], Mapping[str, float | Tensor]] = lambda network, client: {}
    transform: Callable[[Network, Mapping[str, Tensor], Sequence[Trained]], Sequence[Replacement]] | None = None
    after_round: Callable[[AfterRound], ModelState] = as_folded
    merge: AnyStackedMerge | None = None
    server_optimiser: AnyServerOptimiser | None = None
    distillation: DistillationSettings | None = None
    taught: Callable[[Network, Sequence[SubnetSpec]], Sequence[SubnetSpec] | SearchSpace] = lambda network, sizes: sizes
    recalibrates: bool = False
    model: ModelKind = "trained"
    update_codec: AnyUpdateCodec = field(default_factory=Uncompressed)
    fit_codec: Callable[[AnyUpdateCodec, UpdateBytes, Budget], AnyUpdateCodec] = as_priced
    planned_prices: bool = False

    def __post_init__(self) -> None:
        if self.sends is not None and self.transform is not None:
            raise ValueError("sends leaves tensors out of updates, but transform is given whole ones; name one of both")
        if self.evolve is not None and self.search is not None:
            raise ValueError("evolve changes networks, but search knows that of the beginning alone")

    @property
    def personal(self) -> bool:
        """Whether clients have models of their own, and there is none for all."""
        return self.model not in FOR_ALL


class Method(Protocol):
    """A federated method: frozen parameters, read from a configuration, that give its policies.

    Attributes:
        TYPE: its name in a configuration.
        INFO: what people read of it, whatever its parameters.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    TYPE: ClassVar[str]
    INFO: ClassVar[MethodInfo]

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """In what it differs from its paper in this setting, beside what `INFO.published` says of its parameters."""
        ...

    def policies(self) -> Policies:
        """The steps of a round with these parameters."""
        ...
