"""A method and its roles: frozen records of small pure functions, with FedAvg's as defaults.

A round is the same for every method: clients are selected, each is assigned a submodel and trains it, and the updates
are aggregated. A method gives the roles in which it differs; the others are federated averaging over nested submodels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from subfleet.elastic.network import Network
from subfleet.elastic.norm_layers import norm_tensors
from subfleet.methods.aggregator import Aggregator, ClientUpdate, Participant
from subfleet.methods.assigner import Assigner, Draw
from subfleet.methods.describing import MethodInfo
from subfleet.methods.run_networks import Networks
from subfleet.methods.selector import LastUpdate, Selector
from subfleet.methods.techniques import Techniques
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec

__all__ = ["ClosedRound", "LocalTraining", "Memory", "Roles", "RoundUpdates", "Trainee", "change_objective"]

UpdateBytes = Callable[[AnyUpdateCodec], int]
"""The bytes that the update of a size takes with a codec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundUpdates:
    """The updates of a round.

    Attributes:
        networks: the networks of the round, by id.
        clients: what each client's training changed, in the order of their ids.
        memory: the method's memory when the round's clients were selected.
    """

    networks: Mapping[str, Network]
    round: int
    clients: tuple[ClientUpdate, ...]
    memory: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedRound:
    """A round after its updates have been aggregated.

    Attributes:
        clients: the clients that sent these updates, by id.
        loss: of the aggregated model, on the server's samples.
        accuracy: of the same model, on the same samples.
        observation: the result of `Memory.observe`, or what `Evolution` has in its place; None without either.
    """

    round: int
    clients: Mapping[str, LastUpdate] = field(default_factory=lambda: MappingProxyType({}))
    loss: float = 0.0
    accuracy: float = 0.0
    observation: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a method remembers from round to round; nothing by default.

    Tensors are remembered in `ModelState.kept`, which `Aggregator.after_round` and `Networks.evolve` pass on, and which
    is in every checkpoint.

    Attributes:
        initial: the memory before the first round: a frozen record of plain data, journaled with every step that
            changes it; None remembers nothing.
        observe: from the round's updates, the plain data that `remember` needs; called beside the server's loop. It
            holds all updates in memory. None observes nothing.
        remember: the memory after a round; None keeps it. It runs in the server's loop and takes a few milliseconds
            for a thousand clients.
        stop: from the memory, the reason why the run ends before its last round; empty if it goes on.
    """

    initial: Any = None
    observe: Callable[[RoundUpdates], Any] | None = None
    remember: Callable[[Any, ClosedRound], Any] | None = None
    stop: Callable[[Any], str] = lambda memory: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """A client that gets a task, as its local training and its update may depend on it.

    Attributes:
        draw: seed, round, client and the method's memory.
        size: what it trains.
        tensors: names of that size's tensors, in the network's order.
    """

    draw: Draw
    size: Architecture
    tensors: tuple[str, ...]


def keep_codec(codec: AnyUpdateCodec, update_bytes: UpdateBytes, budget: Budget) -> AnyUpdateCodec:
    """Use the codec by which sizes are estimated for every client."""
    return codec


def change_objective(
    settings: TrainingSettings, coefficients: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> TrainingSettings:
    """The same local training with some settings of its objective changed, and the coefficients that these need."""
    return replace(settings, objective=replace(settings.objective, **changes), **coefficients)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """How clients train. By default they train as configured and send the change of every tensor.

    Attributes:
        for_round: from the configured settings and the round's number, the settings of the round.
        for_client: from the settings of the round and a client with a task, the client's epochs, learning rate and
            coefficients. Everything else is part of the program, which all clients of a size share.
        student: the nested submodel of self-distillation, smaller than the size; None trains without that term.
        sends: names of the tensors that a client sends; None sends all. A tensor that is not sent is held by
            nobody.
        fit_codec: from the codec by which sizes are estimated, the bytes of an update with any codec, and the client's
            budget, the codec of the client's task; what it writes must fit the budget too.
        draws_paths: clients train subspaces of a supernet. A model with a choice of operators needs such a method.
    """

    for_round: Callable[[TrainingSettings, int], TrainingSettings] = lambda settings, round_number: settings
    for_client: Callable[[TrainingSettings, Trainee], TrainingSettings] = lambda settings, trainee: settings
    student: Callable[[Network, Architecture, Draw], Architecture | None] = lambda network, size, draw: None
    sends: Callable[[Trainee], frozenset[str]] | None = None
    fit_codec: Callable[[AnyUpdateCodec, UpdateBytes, Budget], AnyUpdateCodec] = keep_codec
    draws_paths: bool = False


def train_near_received(mu: float) -> LocalTraining:
    """Local training with FedProx's proximal term: mu / 2 times the squared distance from the received weights."""
    return LocalTraining(
        for_round=lambda settings, round_number: change_objective(settings, {"proximal_mu": mu}, proximal=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles of a method.

    Attributes:
        selector: which clients take part.
        memory: what is remembered.
        assigner: which submodel each client gets.
        training: how clients train it.
        aggregator: how the updates become the model.
        networks: which networks there are.
        techniques: the method's choice of techniques that work with any method; a run may replace each.

    Raises:
        ValueError: two roles exclude each other.
    """

    selector: Selector = field(default_factory=Selector)
    memory: Memory = field(default_factory=Memory)
    assigner: Assigner = field(default_factory=Assigner)
    training: LocalTraining = field(default_factory=LocalTraining)
    aggregator: Aggregator = field(default_factory=Aggregator)
    networks: Networks = field(default_factory=Networks)
    techniques: Techniques = field(default_factory=Techniques)

    def __post_init__(self) -> None:
        if self.training.sends is not None and self.aggregator.transform is not None:
            raise ValueError(
                "`sends` leaves tensors out of updates, but `transform` needs whole ones; give one of them"
            )
        if self.networks.evolve is not None and self.assigner.search is not None:
            raise ValueError("`evolve` changes networks, but `search` knows only the first one; give one of them")

    def with_techniques(self, techniques: Techniques) -> Roles:
        """The roles of a run: its techniques take precedence over the method's."""
        training, aggregator = self.training, self.aggregator
        if techniques.update_codec is not None:
            training = replace(training, fit_codec=keep_codec)
        if techniques.norms == "bank":
            aggregator = replace(aggregator, sharing_groups=_add_norm_bank(aggregator))
        return replace(
            self, training=training, aggregator=aggregator, techniques=techniques.complete_from(self.techniques)
        )


def _add_norm_bank(
    aggregator: Aggregator,
) -> Callable[[Network, Participant, Sequence[Architecture]], Mapping[str, str]]:
    """Sharing groups in which the clients of each size share their norms, unless the method groups them otherwise."""

    def group(network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
        bank = dict.fromkeys(norm_tensors(network), client.size.architecture_id)
        return {**bank, **aggregator.sharing_groups(network, client, sizes)}

    return group


class Method(Protocol):
    """A federated method: frozen parameters, read from a configuration, that give its roles.

    Attributes:
        TYPE: its name in a configuration.
        INFO: its description, whatever its parameters.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    TYPE: ClassVar[str]
    INFO: ClassVar[MethodInfo]

    def roles(self) -> Roles:
        """What it does in a round with these parameters."""
        ...
