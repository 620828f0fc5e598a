"""Which searched submodels get programs, and what a device gets until its own is ready. Pure, plain data.

A task needs an exported program with an exact plan that fits. A search finds more submodels than can be exported, so a
round starts a limited number of exports: those without which all devices together lose most, where a loss is the
fraction of the parameters that a device would have had. Until then, a device gets the largest exported one that fits.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from subfleet.protocol.chains import Chain
from subfleet.protocol.memory_plan import Packing, PackingWidth, compute_peak_bytes
from subfleet.protocol.programs import ProgramManifest
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.search.candidates import Candidate, Obstacle, list_lacking_operators

LEAST_GAIN = 0.01
"""The fraction of its parameters that a device must lose for a program to be requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedProgram:
    """The program that trains a size on a target, written or not.

    Attributes:
        size: that it trains.
        target: the program target.
        student: the nested size that is trained with it, if any.
    """

    size: Architecture
    target: str
    student: Architecture | None = None

    @property
    def key(self) -> str:
        """The name of the program within a run, such as "onnx/0123456789abcdef"."""
        alone = f"{self.target}/{self.size.architecture_id}"
        return alone if self.student is None else f"{alone}/{self.student.architecture_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What is known of a written program.

    Attributes:
        planned_peak_bytes: planned memory, from its manifest; None if the target cannot train the size.
        operators: operators that its runtime must have; empty if the program does not list them.
        packings: the part of the plan that differs between processors.
        chain: of a supernet's program, the costs of its links; the plan is then that of the largest path.
        program_bytes: of the program as it is sent; 0 is unknown.
        problem: why the target cannot train the size.
    """

    planned_peak_bytes: int | None = None
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

    def plan_for(self, width: PackingWidth | None) -> "ProgramFacts":
        """The facts with the memory that is planned on a device with this packing width; None is the usual one."""
        if self.planned_peak_bytes is None or not self.packings:
            return self
        return replace(
            self, planned_peak_bytes=compute_peak_bytes(self.planned_peak_bytes, self.packings, width), packings=()
        )


def find_program_obstacles(
    facts: ProgramFacts, candidate: Candidate, target: str, budget: Budget, operators: Sequence[str]
) -> Iterator[Obstacle]:
    """What keeps a submodel from a device, by the program that trains it.

    Args:
        facts: of the program, with its memory as planned for the device.
        candidate: the submodel.
        target: of the program.
        budget: of the device.
        operators: that the device's runtime has; empty if it lists none.
    """
    if lacking := list_lacking_operators(facts.operators, operators):
        yield Obstacle(limit="runtime", why=f"calls {', '.join(lacking)}, which the device's runtime {target!r} lacks")
    if facts.planned_peak_bytes is None:
        why = f"cannot be trained on {target!r}" + (f": {facts.problem}" if facts.problem else "")
        yield Obstacle(limit="runtime", why=why)
    elif facts.planned_peak_bytes > budget.memory_bytes:
        why = f"needs {facts.planned_peak_bytes} bytes of memory and the budget is {budget.memory_bytes}"
        yield Obstacle(limit="memory", why=why)
    disk_bytes = candidate.disk_bytes + facts.program_bytes
    if budget.disk_bytes is not None and disk_bytes > budget.disk_bytes:
        yield Obstacle(limit="disk", why=f"takes {disk_bytes} bytes of disk and the budget is {budget.disk_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenProgram:
    """A program that was written, or could not be.

    Attributes:
        program: identifies it; with a student, its plan is of both networks.
        facts: what is known of it.
        run_attempt: the attempt, counted over the run, in which it was written; it can be given from the next one on.
    """

    program: SizedProgram
    facts: ProgramFacts
    run_attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedProgram:
    """A program that a device would have got if it were written.

    Attributes:
        lost: the fraction of its parameters that a device loses without it, 0 to 1, or the sum over several devices.
    """

    program: SizedProgram
    lost: float


def give_written(
    written: Iterable[Candidate], space: Sequence[Candidate], allows: Callable[[Candidate], bool]
) -> Candidate | None:
    """The size that a device gets in place of one without a program: the largest written one that fits, if any.

    Args:
        written: sizes with programs, with the exact plan as their memory.
        space: the enumerated sizes, from smallest to largest; used if no written one fits.
        allows: whether a size fits the device.
    """
    ready = max(filter(allows, written), key=lambda candidate: candidate.order, default=None)
    return ready or next(filter(allows, reversed(space)), None)


def request_program(chosen: Candidate, assigned: Candidate, target: str) -> RequestedProgram | None:
    """Request the program of a chosen size; None if the device loses little without it.

    Args:
        chosen: by the device's search.
        assigned: what the device gets now.
        target: the program target.
    """
    lost = 1 - assigned.parameters / chosen.parameters
    if lost < LEAST_GAIN:
        return None
    return RequestedProgram(program=SizedProgram(size=chosen.architecture, target=target), lost=lost)


def rank_requested(
    requested: Iterable[RequestedProgram], known: Container[str], limit: int
) -> tuple[RequestedProgram, ...]:
    """The programs that a round starts: those without which all devices together lose most, then by key.

    Args:
        requested: by the round's devices, in any order.
        known: keys of programs that are written, being written, or impossible.
        limit: the most programs.
    """
    by_key: dict[str, list[RequestedProgram]] = {}
    for request in requested:
        if request.program.key not in known:
            by_key.setdefault(request.program.key, []).append(request)
    # Summed exactly, so that the order of devices does not matter.
    summed = [
        replace(requests[0], lost=math.fsum(request.lost for request in requests)) for requests in by_key.values()
    ]
    return tuple(sorted(summed, key=lambda request: (-request.lost, request.program.key))[:limit])
