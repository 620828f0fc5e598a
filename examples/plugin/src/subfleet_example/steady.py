"""Steady: a device's size grows by one step a round at most, however rich the moment; it shrinks at once.

Client half: train the given submodel with the given objective.
Server half: a mean over the clients that hold an element, weighted by the square root of samples.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from subfleet.methods.aggregator import Aggregator
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext
from subfleet.methods.describing import MethodInfo, Setting
from subfleet.methods.roles import Roles
from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.messages import Update

__all__ = ["Steady"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Steady:
    """Parameters of the method.

    Attributes:
        step: how many sizes larger than its last one a device may be given, 1 or more.
    """

    TYPE: ClassVar[str] = "steady"
    INFO: ClassVar[MethodInfo] = MethodInfo(title="Steady", paper="an example", varies=("width", "depth"))
    step: Annotated[int, Range(least=1)] = 1

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.roles.Method`."""
        return ()

    def roles(self) -> Roles:
        """Sizes that grow slowly."""
        return Roles(assigner=Assigner(assign=self._assign), aggregator=Aggregator(weigh=_by_root))

    def _assign(self, context: AssignmentContext) -> Assignment:
        ids = [one.architecture.architecture_id for one in context.candidates]
        last = ids.index(context.previous.architecture_id) if context.previous is not None else 0
        within = context.candidates[: last + self.step + 1]
        return Assignment(candidate=next((one for one in reversed(within) if context.allows(one)), None))


def _by_root(update: Update) -> float:
    return math.sqrt(update.sample_count)
