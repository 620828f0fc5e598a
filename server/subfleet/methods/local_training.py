"""The local training of a method: how clients train what they are given, and what they send."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from subfleet.elastic.network import Network
from subfleet.methods.assigner import Draw
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec

__all__ = ["LocalTraining", "Trainee", "UpdateBytes", "as_estimated", "without_self_distillation"]

UpdateBytes = Callable[[AnyUpdateCodec], int]
"""The bytes that the update of a size takes with a codec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """A client that is given a task, as far as its local training and what it sends may depend on it.

    Attributes:
        draw: seed, round and client, and what the method remembers.
        size: what it trains.
        tensors: names of the tensors of that size, in the network's order.
    """

    draw: Draw
    size: Architecture
    tensors: tuple[str, ...]


def as_estimated(codec: AnyUpdateCodec, update_bytes: UpdateBytes, budget: Budget) -> AnyUpdateCodec:
    """Every client writes by the codec that sizes are estimated by."""
    return codec


def without_self_distillation(settings: TrainingSettings) -> TrainingSettings:
    """The local training of a client that has no nested submodel to teach."""
    if settings.objective.distillation != "self":
        return settings
    return replace(settings, distillation_weight=0.0, objective=replace(settings.objective, distillation="none"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """How clients train. By default they train as the configuration says, and send the change of every tensor.

    Attributes:
        for_round: the configured settings and the round's number to the settings of the round.
        for_client: the settings of the round and a client that is given a task to the client's own epochs, learning
            rate and coefficients. All else is in the program, which is the same for all clients of the same size.
        student: the nested submodel of self-distillation, smaller than the size; None where there is none, and the
            client trains without that term.
        sends: names of the submodel's tensors whose changes a client sends; None has it send all. A tensor that is not
            sent is held by nobody.
        fit_codec: the update codec by which sizes are estimated, what an update takes with any codec, and the client's
            budget, to the codec of the client's task. What it writes must fit the budget too.
        draws_paths: clients train subspaces of a supernet. A model with choices of operators goes with such a method
            alone.
    """

    for_round: Callable[[TrainingSettings, int], TrainingSettings] = lambda settings, round_number: settings
    for_client: Callable[[TrainingSettings, Trainee], TrainingSettings] = lambda settings, trainee: settings
    student: Callable[[Network, Architecture, Draw], Architecture | None] = lambda network, size, draw: None
    sends: Callable[[Trainee], frozenset[str]] | None = None
    fit_codec: Callable[[AnyUpdateCodec, UpdateBytes, Budget], AnyUpdateCodec] = as_estimated
    draws_paths: bool = False
