"""A method, and the roles that it has: frozen records of small pure functions, with FedAvg's as defaults.

A round of every method is the same: clients are selected, each is assigned a submodel and trains it, and the updates
are aggregated. A method gives the roles in which it differs; what it does not give is federated averaging over nested
submodels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from subfleet.elastic.network import Network
from subfleet.elastic.norm_layers import norm_tensors
from subfleet.methods.aggregator import Aggregator, ClientUpdate, Participant
from subfleet.methods.assigner import Assigner
from subfleet.methods.describing import MethodInfo, Setting
from subfleet.methods.local_training import LocalTraining, as_estimated
from subfleet.methods.run_networks import Networks
from subfleet.methods.selector import LastUpdate, Selector
from subfleet.methods.techniques import Techniques
from subfleet.protocol.submodel import Architecture

__all__ = ["ClosedRound", "Memory", "Method", "Roles", "RoundUpdates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundUpdates:
    """The updates of a round.

    Attributes:
        networks: by id, the networks that the round was trained with.
        clients: what each client's training changed, in the order of their ids.
        memory: as it stood when the round's clients were selected.
    """

    networks: Mapping[str, Network]
    round: int
    clients: tuple[ClientUpdate, ...]
    memory: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedRound:
    """A round whose updates are in the model.

    Attributes:
        round: its number.
        clients: the clients that sent these updates, by id.
        loss: of the aggregated model, on the server's samples; accuracy likewise.
        observation: what `Memory.observe` returned for the updates; None where a method observes nothing.
    """

    round: int
    clients: Mapping[str, LastUpdate] = field(default_factory=lambda: MappingProxyType({}))
    loss: float = 0.0
    accuracy: float = 0.0
    observation: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a method remembers from round to round. By default it remembers nothing.

    What is to be remembered in tensors lies in `ModelState.kept`, which `Aggregator.after_round` and `Networks.evolve`
    hand on, and which every checkpoint has.

    Attributes:
        initial: before the first round: a frozen record of plain data, which the journal keeps with every step that
            changes it; None remembers nothing.
        observe: the round's updates to what `remember` is given of them, as plain data; called beside the server's
            loop. It needs the memory of all updates. None observes nothing.
        remember: what is remembered after a round; None is nothing more. It is called in the server's loop, and takes a
            few milliseconds for a thousand clients.
        stop: of what is remembered, the reason why the run ends before its last round; empty where it goes on.
    """

    initial: Any = None
    observe: Callable[[RoundUpdates], Any] | None = None
    remember: Callable[[Any, ClosedRound], Any] | None = None
    stop: Callable[[Any], str] = lambda memory: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles of a method.

    Attributes:
        selector: who takes part.
        memory: what is remembered.
        assigner: which submodel each client is given.
        training: how clients train it.
        aggregator: how the updates become the model.
        networks: which networks there are.
        techniques: what the method has of the techniques that go with any; a run may replace each.

    Raises:
        ValueError: two roles do not go together.
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
            raise ValueError("sends leaves tensors out of updates, but transform is given whole ones; name one of both")
        if self.networks.evolve is not None and self.assigner.search is not None:
            raise ValueError("evolve changes networks, but search knows the first network alone; name one of both")

    def with_techniques(self, techniques: Techniques) -> Roles:
        """The roles of a run that has these techniques in place of the method's own."""
        training, aggregator = self.training, self.aggregator
        if techniques.update_codec is not None:
            training = replace(training, fit_codec=as_estimated)
        if techniques.norms == "bank":
            aggregator = replace(aggregator, sharing_groups=_with_norm_bank(aggregator))
        return replace(self, training=training, aggregator=aggregator, techniques=techniques.over(self.techniques))


def _with_norm_bank(
    aggregator: Aggregator,
) -> Callable[[Network, Participant, Sequence[Architecture]], Mapping[str, str]]:
    """Sharing groups in which the clients of each size have norms of their own, where the method says nothing else."""

    def sharing_groups(network: Network, client: Participant, sizes: Sequence[Architecture]) -> Mapping[str, str]:
        bank = dict.fromkeys(norm_tensors(network), client.size.architecture_id)
        return {**bank, **aggregator.sharing_groups(network, client, sizes)}

    return sharing_groups


class Method(Protocol):
    """A federated method: frozen parameters, read from a configuration, that give its roles.

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

    def roles(self) -> Roles:
        """What it does in a round with these parameters."""
        ...
