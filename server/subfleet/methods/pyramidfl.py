"""PyramidFL: clients are selected as in Oort; fast ones train longer, and less useful ones send less.

Li et al., "PyramidFL: A Fine-grained Client Selection Framework for Efficient Federated Learning", MobiCom 2022.

Client half: train the given model for the epochs of the task; send the change of the tensors that it names.
Server half: the round's clients are selected as in Oort. They are ranked by their last updates, by the norm of the
change times the samples; the first leaves out the smallest fraction of its tensors and the last the largest, drawn anew
in each round. The slowest client after that sets the round's duration, and the others spend their idle time on further
passes over their data. A tensor that is not sent is held by nobody.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from subfleet.methods.describing import MethodInfo, always, parameters
from subfleet.methods.oort import Oort, OortMemory, duration_s
from subfleet.methods.roles import ClosedRound, Memory, Roles, Trainee
from subfleet.methods.selector import AvailableClient, Selection, SelectionContext, Selector
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Fraction
from subfleet.protocol.training import TrainingSettings

_MOST_PASSES = 10.0
"""The most additional passes, in multiples of the configured epochs, as in the authors' code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidMemory:
    """The memory of PyramidFL.

    Attributes:
        oort: Oort's memory.
        passes: by client of the open round, the multiple of the configured epochs that it trains, 1 or more.
        left_out: by client of the open round, the fraction of its tensors that it does not send.
    """

    oort: OortMemory
    passes: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, float] = field(default_factory=dict)


def _check_left_out(least_left_out: float, most_left_out: float) -> Iterator[str]:
    if least_left_out > most_left_out:
        yield f"least_left_out is {least_left_out}, but must be at most most_left_out {most_left_out}"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_left_out)
class PyramidFL:
    """Parameters of PyramidFL.

    Attributes:
        oort: how clients are selected.
        least_left_out: fraction of its tensors that the most useful client does not send, from 0 to below 1.
        most_left_out: the same for the least useful client; no less than that, below 1.
        idle: beta, the fraction of its idle time that a client trains, from 0 to 1; 0.5 to 1 in the authors' code.
    """

    TYPE: ClassVar[str] = "pyramidfl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="PyramidFL",
        paper="Li et al., PyramidFL: A Fine-grained Client Selection Framework for Efficient Federated Learning, "
        "MobiCom 2022",
        departures={
            **Oort.INFO.departures,
            "clients train on all samples, not only on those with the largest losses": always,
        },
    )
    oort: Oort = parameters(Oort)
    least_left_out: Annotated[float, Range(least=0, below=1)] = 0.1
    most_left_out: Annotated[float, Range(least=0, below=1)] = 0.6
    idle: Fraction = 0.5

    def roles(self) -> Roles:
        """Oort's roles, with clients that train longer or send less."""
        oort = self.oort.roles()
        return replace(
            oort,
            selector=Selector(select=self._select),
            memory=Memory(initial=PyramidMemory(oort=oort.memory.initial), remember=self._remember),
            training=replace(oort.training, for_client=_set_passes, sends=_draw_sent),
        )

    def _select(self, context: SelectionContext) -> Selection:
        selection = self.oort.select(replace(context, memory=context.memory.oort))
        clients = [client for client in context.clients if client.client_id in selection.clients]
        left_out = self._leave_out(clients)
        seconds = {
            client.client_id: duration_s(client, self.oort.durations)
            - left_out[client.client_id] * client.expected_uplink_s
            for client in clients
        }
        slowest_s = max(seconds.values())
        passes = {
            client.client_id: self._count_passes(client, slowest_s - seconds[client.client_id]) for client in clients
        }
        memory = PyramidMemory(oort=selection.memory, passes=passes, left_out=left_out)
        return Selection(clients=selection.clients, memory=memory)

    def _leave_out(self, clients: Sequence[AvailableClient]) -> dict[str, float]:
        """The fraction of its tensors that each client does not send; the smallest for clients without an update."""
        pasts = {client.client_id: client.past for client in clients if client.past is not None}
        # The most useful updates first.
        ranked = sorted(pasts, key=lambda name: (-pasts[name].change_norm * pasts[name].sample_count, name))
        step = (self.most_left_out - self.least_left_out) / max(len(clients), 1)
        fractions = {name: self.least_left_out + rank * step for rank, name in enumerate(ranked)}
        return {client.client_id: fractions.get(client.client_id, self.least_left_out) for client in clients}

    def _count_passes(self, client: AvailableClient, idle_s: float) -> float:
        """The multiple of the configured epochs that fills the fraction of a client's idle time."""
        measured_s = 0.0 if client.past is None or self.oort.durations == "expected" else client.past.train_s
        usual_s = measured_s or client.expected_training_s
        if usual_s <= 0:
            return 1.0
        return 1.0 + min(_MOST_PASSES, self.idle * idle_s / usual_s)

    def _remember(self, memory: PyramidMemory, closed: ClosedRound) -> PyramidMemory:
        return PyramidMemory(oort=self.oort.remember(memory.oort, closed))


def _set_passes(settings: TrainingSettings, trainee: Trainee) -> TrainingSettings:
    passes = max(trainee.draw.memory.passes.get(trainee.draw.client_id, 1.0), 1.0)
    if settings.local_steps:
        return replace(settings, local_steps=math.floor(settings.local_steps * passes))
    return replace(settings, epochs=math.floor(settings.epochs * passes))


def _draw_sent(trainee: Trainee) -> frozenset[str]:
    """All tensors but a drawn fraction of them; at least one."""
    fraction = trainee.draw.memory.left_out.get(trainee.draw.client_id, 0.0)
    count = max(1, len(trainee.tensors) - math.floor(fraction * len(trainee.tensors)))
    return frozenset(trainee.draw.stream("sent").sample(trainee.tensors, count))
