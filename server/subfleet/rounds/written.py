"""Programs and models of a run: what was written, and what is being written. Plain data."""

from dataclasses import dataclass

from subfleet.protocol.memory import Packing
from subfleet.protocol.subnet import SubnetSpec
from subfleet.search.queue import plan_key

__all__ = ["NO_PROGRAM_BYTES", "KnownPlan", "ModelFile", "Queued"]

NO_PROGRAM_BYTES = 2**62
"""The planned peak of a size that a target cannot train: more than any budget."""


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
class KnownPlan:
    """A written program.

    Attributes:
        size: that it trains.
        target: that it is for.
        planned_peak_bytes: from its manifest; `NO_PROGRAM_BYTES` where the target cannot train the size.
        turn: in which it was learned; later turns may count on it, whatever came first within the turn.
        operators: that its runtime must have; empty where it is not told.
        packings: what of the plan differs between processors.
        student: nested in the size and trained with it, so that the plan is of both; None where there is none.
    """

    size: SubnetSpec
    target: str
    planned_peak_bytes: int
    turn: int
    operators: tuple[str, ...] = ()
    packings: tuple[Packing, ...] = ()
    student: SubnetSpec | None = None

    @property
    def key(self) -> str:
        """Names the program among those of a run."""
        return plan_key(self.target, self.size, self.student)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A size whose program is being written for later rounds."""

    size: SubnetSpec
    target: str

    @property
    def key(self) -> str:
        """Names the program among those of a run."""
        return plan_key(self.target, self.size)
