"""Programs and models of a run that were written. Plain data."""

from dataclasses import dataclass

from subfleet.protocol.chains import Chain
from subfleet.protocol.memory_plan import Packing
from subfleet.protocol.programs import ProgramManifest
from subfleet.search.fitting import INFINITE_BYTES
from subfleet.search.queue import SizedProgram

__all__ = ["ModelFile", "ProgramFacts", "WrittenProgram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One inference model of a client.

    Attributes:
        file: its path.
        max_abs_diff: largest difference from PyTorch; None where the exporter did not tell.
        quantised_accuracy: of a model in 8-bit integers, on evaluation samples; else None.
        float_accuracy: of the same model in float32, on the same samples.
    """

    target: str
    file: str
    max_abs_diff: float | None
    quantised_accuracy: float | None = None
    float_accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What is known of a written program.

    Attributes:
        planned_peak_bytes: from its manifest; `INFINITE_BYTES` where the target cannot train the size.
        operators: that its runtime must have; empty where it is not told.
        packings: what of the plan differs between processors.
        chain: of a supernet's program, what its links take; the plan is then that of the largest path.
        program_bytes: of the program as it is sent; 0 is unknown.
        problem: why the target cannot train the size, where that is so.
    """

    planned_peak_bytes: int
    operators: tuple[str, ...] = ()
    packings: tuple[Packing, ...] = ()
    chain: Chain | None = None
    program_bytes: int = 0
    problem: str = ""

    @property
    def trainable(self) -> bool:
        """Whether the target can train the size at all."""
        return self.planned_peak_bytes < INFINITE_BYTES

    @classmethod
    def of(cls, manifest: ProgramManifest, program_bytes: int) -> "ProgramFacts":
        """What a program's manifest tells, and its size."""
        return cls(
            planned_peak_bytes=manifest.planned_peak_bytes,
            operators=manifest.operators,
            packings=manifest.memory.packings,
            chain=manifest.chain,
            program_bytes=program_bytes,
        )

    @classmethod
    def none(cls, problem: str) -> "ProgramFacts":
        """Of a size that its target cannot train."""
        return cls(planned_peak_bytes=INFINITE_BYTES, problem=problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenProgram:
    """A program that was written, or found not to be writable.

    Attributes:
        program: which one; with a student, its plan is of both networks.
        facts: what is known of it.
        turn: in which it was learned; later turns may count on it, whatever came first within the turn.
    """

    program: SizedProgram
    facts: ProgramFacts
    turn: int
