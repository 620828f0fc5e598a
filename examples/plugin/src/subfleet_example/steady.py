"""Steady: a device's size grows by a few steps a round at most, whatever its budget; it shrinks at once.

Client half: train the given submodel with the given objective.
Server half: a mean over the clients that hold an element, weighted by the square root of samples.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from subfleet.methods.aggregator import Aggregator
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext
from subfleet.methods.describing import MethodInfo
from subfleet.methods.roles import Roles
from subfleet.protocol.bounds import Range, checked

__all__ = ["Steady"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Steady:
    """A device's size grows by `step` sizes a round at most, 1 or more."""

    TYPE: ClassVar[str] = "steady"
    INFO: ClassVar[MethodInfo] = MethodInfo(title="Steady", paper="an example", varies=("width", "depth"))
    step: Annotated[int, Range(least=1)] = 1

    def roles(self) -> Roles:
        """Sizes that grow slowly."""
        aggregator = Aggregator(weigh=lambda update: math.sqrt(update.sample_count))
        return Roles(assigner=Assigner(assign=self._assign), aggregator=aggregator)

    def _assign(self, context: AssignmentContext) -> Assignment:
        ids = [candidate.architecture.architecture_id for candidate in context.candidates]
        last = ids.index(context.previous.architecture_id) if context.previous else 0
        fitting = filter(context.allows, reversed(context.candidates[: last + self.step + 1]))
        return Assignment(candidate=next(fitting, None))
