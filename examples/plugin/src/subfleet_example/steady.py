"""Steady: a device's size grows by one step a round at most, however rich the moment; it shrinks at once.

Client half: train the given subnet with the given objective.
Server half: a mean over the clients that hold an element, weighted by the square root of samples.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from subfleet.methods.describing import MethodInfo, Setting
from subfleet.methods.policies import Ask, Assigned, Policies
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.messages import Update

__all__ = ["Steady"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Parameters of the method.

    Attributes:
        step: how many sizes larger than its last one a device may be given, 1 or more.
    """

    TYPE: ClassVar[str] = "steady"
    INFO: ClassVar[MethodInfo] = MethodInfo(title="Steady", paper="an example", varies=("width", "depth"))
    step: int = 1

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ConfigError(f"step is {self.step}, but must be 1 or more")

    def departures(self, setting: Setting) -> tuple[str, ...]:
        """See `subfleet.methods.policies.Method`."""
        return ()

    def policies(self) -> Policies:
        """Sizes that grow slowly."""
        return Policies(assign=self._assign, weigh=_by_root)

    def _assign(self, ask: Ask) -> Assigned:
        ids = [one.spec.spec_id for one in ask.candidates]
        last = ids.index(ask.previous.spec_id) if ask.previous is not None else 0
        within = ask.candidates[: last + self.step + 1]
        return Assigned(candidate=next((one for one in reversed(within) if ask.allows(one)), None))


def _by_root(update: Update) -> float:
    return math.sqrt(update.sample_count)
