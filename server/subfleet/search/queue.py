"""Which searched subnets become programs, and what a device gets until its own is ready. Pure, plain data.

A task needs an exported program whose exact plan fits. A search finds more subnets than can be exported, so a round
starts a limited number of exports, those first whose lack loses most over all devices, each loss being a share of the
parameters that a device would have had. Until its subnet is exported, a device gets the largest exported one that fits.
"""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from subfleet.protocol.subnet import SubnetSpec
from subfleet.search.candidates import Candidate

__all__ = ["LEAST_GAIN", "SizedProgram", "Wish", "given_now", "most_wanted", "wish_of"]

LEAST_GAIN = 0.01
"""Share of its parameters that a device must lose before a program is wanted: nearly the same program is no gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedProgram:
    """The program that trains a size on a target, written or not.

    Attributes:
        size: that it trains.
        target: that it is for.
        student: nested in the size and trained with it; None where there is none.
    """

    size: SubnetSpec
    target: str
    student: SubnetSpec | None = None

    @property
    def key(self) -> str:
        """Names the program among those of a run, such as "onnx/0123456789abcdef"."""
        alone = f"{self.target}/{self.size.spec_id}"
        return alone if self.student is None else f"{alone}/{self.student.spec_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A size that would have been given, had its program been written.

    Attributes:
        program: that would train it.
        lost: share of its parameters that is lost without it, 0 to 1: of one device, or the sum over several.
    """

    program: SizedProgram
    lost: float


def given_now(
    written: Iterable[Candidate], space: Sequence[Candidate], allows: Callable[[Candidate], bool]
) -> Candidate | None:
    """What a device gets in place of a size without a program; None where nothing fits.

    Args:
        written: sizes with programs, each with its exact plan as its memory: the largest that fits is given.
        space: the enumerated sizes, from smallest to largest: the largest that fits is given where no written one does.
        allows: whether a size fits the device.
    """
    ready = max(filter(allows, written), key=lambda one: one.order, default=None)
    return ready or next(filter(allows, reversed(space)), None)


def wish_of(chosen: Candidate, given: Candidate, target: str) -> Wish | None:
    """What a device wishes for that was given another size than was chosen; None where it would gain next to nothing.

    Args:
        chosen: what its search chose.
        given: what it gets now.
        target: that its program would be for.
    """
    lost = 1 - given.parameters / chosen.parameters
    return Wish(program=SizedProgram(size=chosen.spec, target=target), lost=lost) if lost >= LEAST_GAIN else None


def most_wanted(wishes: Iterable[Wish], known: Container[str], limit: int) -> tuple[Wish, ...]:
    """The programs that a round starts: those without which all devices together lose most, then by key.

    Args:
        wishes: of the round's devices, in any order.
        known: keys of programs that are written, are being written or cannot be.
        limit: of the answer's length.
    """
    alike: dict[str, list[Wish]] = {}
    for wish in wishes:
        if wish.program.key not in known:
            alike.setdefault(wish.program.key, []).append(wish)
    # Summed exactly, so that the order of devices takes no part.
    summed = [replace(same[0], lost=math.fsum(one.lost for one in same)) for same in alike.values()]
    return tuple(sorted(summed, key=lambda wish: (-wish.lost, wish.program.key))[:limit])
