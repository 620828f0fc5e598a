"""What a refusal leads to, by its reason: the one table that the server goes by. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from subfleet.methods.assigner import AssignmentContext
from subfleet.protocol.messages import RefusalReason
from subfleet.search.candidates import Candidate
from subfleet.search.fitting import Limit

__all__ = ["LASTING_LIMITS", "REFUSALS", "Course", "Lasts", "nothing_left"]

Lasts = Literal["passing", "unclear", "lasting"]
"""Whether another attempt comes to the same: "passing" may not, as what there is of a budget changes; "lasting" does,
as nothing that decides it changes between attempts; "unclear" does where the device says it again in the same words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What follows from a refusal.

    Attributes:
        limit: what kept the task from the device, so that one which takes less of it may be done; None where no other
            size changes anything.
        lasts: whether the same task would be refused again.
        of_program: whether it says something of the program, which the device is not given again.
    """

    limit: Limit | None
    lasts: Lasts
    of_program: bool = False


REFUSALS: Mapping[RefusalReason, Course] = MappingProxyType(
    {
        "memory": Course(limit="memory", lasts="passing"),
        "disk": Course(limit="disk", lasts="passing"),
        "link": Course(limit="link", lasts="passing"),
        "compute": Course(limit="compute", lasts="passing"),
        "runtime": Course(limit="runtime", lasts="lasting", of_program=True),
        "program": Course(limit="program", lasts="lasting", of_program=True),
        "data": Course(limit=None, lasts="lasting"),
        "diverged": Course(limit=None, lasts="lasting"),
        "failed": Course(limit=None, lasts="unclear"),
    }
)

LASTING_LIMITS: frozenset[Limit] = frozenset(
    course.limit for course in REFUSALS.values() if course.limit is not None and course.lasts == "lasting"
)


def nothing_left(ask: AssignmentContext, only: Candidate | None = None) -> bool:
    """Whether every size is kept from a client by what lasts, so that no attempt has anything for it.

    Args:
        ask: what the method was asked for the client; the sizes below one that was too large are no others.
        only: the one size that the method would give it.
    """
    asked = replace(ask, below=None)
    return all(asked.exceeded(one) & LASTING_LIMITS for one in (ask.candidates if only is None else (only,)))
