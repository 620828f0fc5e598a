"""PyramidFL: Oort's choice of clients, of whom the fast ones train longer and the less useful ones send less.

Li et al., "PyramidFL: A Fine-grained Client Selection Framework for Efficient Federated Learning", MobiCom 2022.

Client half: train the given model for the epochs of the task; send the change of the tensors that it names.
Server half: the round's clients are chosen as Oort does. Ranked by what their last updates moved, the norm of the
change times the samples, the first leaves out the smallest fraction of its tensors and the last the largest; which ones
is drawn anew in each round. The slowest of them after that sets the round's duration, and the others spend the time
that they would wait for it in further passes over their data. A tensor that is not sent is held by nobody.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from subfleet.methods.describing import MethodInfo, Setting
from subfleet.methods.local_training import Trainee
from subfleet.methods.oort import Oort, OortMemory, duration_s
from subfleet.methods.roles import ClosedRound, Memory, Roles
from subfleet.methods.selector import AvailableClient, Selection, SelectionContext, Selector
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Fraction
from subfleet.protocol.training import TrainingSettings

__all__ = ["PyramidFL", "PyramidMemory"]

_MOST_PASSES = 10.0
"""Times the usual epochs that idle time adds at most; what the authors' code takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidMemory:
    """What PyramidFL remembers.

    Attributes:
        oort: what Oort does.
        passes: by client of the open round, how many times the usual epochs it trains, 1 or more.
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
        oort: how clients are chosen.
        least_left_out: fraction of its tensors that the most useful client does not send, from 0 to below 1.
        most_left_out: the same of the least useful one, no less than that, below 1.
        idle: beta, the fraction of its idle time that a client trains in, from 0 to 1; the authors' code takes 0.5 to
            1.
    """

    TYPE: ClassVar[str] = "pyramidfl"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="PyramidFL",
        paper="Li et al., PyramidFL: A Fine-grained Client Selection Framework for Efficient Federated Learning, "
        "MobiCom 2022",
        varies=(),
        published={
            **{f"oort.{name}": one for name, one in Oort.INFO.published.items()},
            "least_left_out": None,
            "most_left_out": None,
            "idle": None,
        },
    )
    oort: Oort = field(default_factory=Oort)
    least_left_out: Annotated[float, Range(least=0, below=1)] = 0.1
    most_left_out: Annotated[float, Range(least=0, below=1)] = 0.6
    idle: Fraction = 0.5

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ("clients train on all samples, not only on those with the largest losses",)

    def roles(self) -> Roles:
        """Oort's, with clients that train longer or send less."""
        oort = self.oort.roles()
        return replace(
            oort,
            selector=Selector(select=self._select),
            memory=Memory(initial=PyramidMemory(oort=oort.memory.initial), remember=self._remember),
            training=replace(oort.training, for_client=_for_client, sends=_sent_tensors),
        )

    def _select(self, context: SelectionContext) -> Selection:
        found = self.oort.select(replace(context, memory=context.memory.oort))
        chosen = [one for one in context.clients if one.client_id in found.clients]
        left_out = self._left_out(chosen)
        seconds = {
            one.client_id: duration_s(one, self.oort.durations) - left_out[one.client_id] * one.expected_uplink_s
            for one in chosen
        }
        slowest_s = max(seconds.values())
        passes = {one.client_id: self._passes(one, slowest_s - seconds[one.client_id]) for one in chosen}
        return Selection(
            clients=found.clients, memory=PyramidMemory(oort=found.memory, passes=passes, left_out=left_out)
        )

    def _left_out(self, chosen: Sequence[AvailableClient]) -> dict[str, float]:
        """The fraction of its tensors that each does not send; of whom nothing is known, the smallest."""
        ranked = sorted((one for one in chosen if one.past is not None), key=_by_use)
        step = (self.most_left_out - self.least_left_out) / max(len(chosen), 1)
        shares = {one.client_id: self.least_left_out + place * step for place, one in enumerate(ranked)}
        return {one.client_id: shares.get(one.client_id, self.least_left_out) for one in chosen}

    def _passes(self, client: AvailableClient, idle_s: float) -> float:
        """How many times the usual epochs fill the fraction of its idle time."""
        measured_s = 0.0 if client.past is None or self.oort.durations == "expected" else client.past.train_s
        usual_s = measured_s or client.expected_training_s
        if usual_s <= 0:
            return 1.0
        return 1.0 + min(_MOST_PASSES, self.idle * idle_s / usual_s)

    def _remember(self, memory: Any, closed: ClosedRound) -> PyramidMemory:
        return PyramidMemory(oort=self.oort.remember(memory.oort, closed))


def _by_use(client: AvailableClient) -> tuple[float, str]:
    """The more useful a client's last update was, the earlier it comes."""
    past = client.past
    use = 0.0 if past is None else past.change_norm * past.sample_count
    return -use, client.client_id


def _for_client(settings: TrainingSettings, trainee: Trainee) -> TrainingSettings:
    passes = max(trainee.draw.memory.passes.get(trainee.draw.client_id, 1.0), 1.0)
    if settings.local_steps:
        return replace(settings, local_steps=math.floor(settings.local_steps * passes))
    return replace(settings, epochs=math.floor(settings.epochs * passes))


def _sent_tensors(trainee: Trainee) -> frozenset[str]:
    """All but a drawn fraction of the tensors; one at least."""
    share = trainee.draw.memory.left_out.get(trainee.draw.client_id, 0.0)
    count = max(1, len(trainee.tensors) - math.floor(share * len(trainee.tensors)))
    return frozenset(trainee.draw.stream("sent").sample(trainee.tensors, count))
