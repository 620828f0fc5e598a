"""Which searched submodels become programs, and what a device gets until its own is ready. Pure, plain data.

A task needs an exported program whose exact plan fits. A search finds more submodels than can be exported, so a round
starts a limited number of exports, those first whose lack loses most over all devices, each loss being a fraction of
the parameters that a device would have had. Until its submodel is exported, a device gets the largest exported one that
fits.
"""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from subfleet.protocol.chains import Chain
from subfleet.protocol.memory_plan import Packing, PackingWidth, planned_for
from subfleet.protocol.programs import ProgramManifest
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate

__all__ = [
    "LEAST_GAIN",
    "ProgramFacts",
    "RequestedProgram",
    "SizedProgram",
    "WrittenProgram",
    "given_now",
    "most_wanted",
    "requested_program_of",
]

LEAST_GAIN = 0.01
"""fraction of its parameters that a device must lose before a program is wanted: nearly the same program is no gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedProgram:
    """The program that trains a size on a target, written or not.

    Attributes:
        size: that it trains.
        target: that it is for.
        student: nested in the size and trained with it; None where there is none.
    """

    size: Architecture
    target: str
    student: Architecture | None = None

    @property
    def key(self) -> str:
        """Names the program among those of a run, such as "onnx/0123456789abcdef"."""
        alone = f"{self.target}/{self.size.architecture_id}"
        return alone if self.student is None else f"{alone}/{self.student.architecture_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What is known of a written program.

    Attributes:
        planned_peak_bytes: planned memory, from its manifest; None if the target cannot train the size.
        operators: that its runtime must have; empty if the program does not list them.
        packings: what of the plan differs between processors.
        chain: of a supernet's program, what its links take; the plan is then that of the largest path.
        program_bytes: of the program as it is sent; 0 is unknown.
        problem: why the target cannot train the size.
    """

    planned_peak_bytes: int | None
    operators: tuple[str, ...] = ()
    packings: tuple[Packing, ...] = ()
    chain: Chain | None = None
    program_bytes: int = 0
    problem: str = ""

    @classmethod
    def of(cls, manifest: ProgramManifest, program_bytes: int) -> "ProgramFacts":
        """The facts in a program's manifest, and its size."""
        return cls(
            planned_peak_bytes=manifest.planned_peak_bytes,
            operators=manifest.operators,
            packings=manifest.memory.packings,
            chain=manifest.chain,
            program_bytes=program_bytes,
        )

    @classmethod
    def untrainable(cls, problem: str) -> "ProgramFacts":
        """The facts of a size that its target cannot train."""
        return cls(planned_peak_bytes=None, problem=problem)

    def planned_for(self, width: PackingWidth | None) -> "ProgramFacts":
        """The facts with the memory that is planned on a device with this packing width; None is the usual one."""
        if self.planned_peak_bytes is None or not self.packings:
            return self
        return replace(self, planned_peak_bytes=planned_for(self.planned_peak_bytes, self.packings, width), packings=())


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenProgram:
    """A program that was written, or could not be.

    Attributes:
        program: identifies it; with a student, its plan is of both networks.
        facts: what is known of it.
        turn: the round attempt in which it was written; it can be given from the next one on.
    """

    program: SizedProgram
    facts: ProgramFacts
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedProgram:
    """A size that would have been given, had its program been written.

    Attributes:
        program: that would train it.
        lost: fraction of its parameters that is lost without it, 0 to 1: of one device, or the sum over several.
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


def requested_program_of(chosen: Candidate, given: Candidate, target: str) -> RequestedProgram | None:
    """The program that a device lacked when it was given another size than chosen; None where it would gain little.

    Args:
        chosen: what its search chose.
        given: what it gets now.
        target: that its program would be for.
    """
    lost = 1 - given.parameters / chosen.parameters
    return (
        RequestedProgram(program=SizedProgram(size=chosen.architecture, target=target), lost=lost)
        if lost >= LEAST_GAIN
        else None
    )


def most_wanted(
    requested_programs: Iterable[RequestedProgram], known: Container[str], limit: int
) -> tuple[RequestedProgram, ...]:
    """The programs that a round starts: those without which all devices together lose most, then by key.

    Args:
        requested_programs: of the round's devices, in any order.
        known: keys of programs that are written, are being written or cannot be.
        limit: of the answer's length.
    """
    alike: dict[str, list[RequestedProgram]] = {}
    for requested_program in requested_programs:
        if requested_program.program.key not in known:
            alike.setdefault(requested_program.program.key, []).append(requested_program)
    # Summed exactly, so that the order of devices takes no part.
    summed = [replace(same[0], lost=math.fsum(one.lost for one in same)) for same in alike.values()]
    return tuple(
        sorted(summed, key=lambda requested_program: (-requested_program.lost, requested_program.program.key))[:limit]
    )
