"""What the server's loop writes down about its run, and reads back."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.networks import GenerationRecord
from subfleet.journal.records import RoundRecord
from subfleet.protocol.bounds import Range, checked
from subfleet.rounds.signals import AnyClose
from subfleet.rounds.state import RunState

Bytes = tuple[int, int]
"""Bytes down and up."""
AnyRecord = RoundRecord | EvaluationRecord | GenerationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class AbsenceRecord:
    """A client that is away, or has refused its task in the open round.

    Attributes:
        kind: of the reason: "goodbye", "will", "unheard", "silent" or "refused".
        reason: in words.
        seen_at: POSIX time of its last sign of life; None if the server has not heard it since it started.
    """

    client_id: str
    kind: str
    reason: str
    seen_at: Annotated[float, Range(least=0, most=2**33)] | None

    def describe(self, now: float) -> str:
        """The reason at this POSIX time."""
        if self.kind != "silent" or self.seen_at is None:
            return self.reason
        return f"no heartbeat for {now - self.seen_at:.0f} s"


class RunJournal(Protocol):
    """The journal of one run.

    Attributes:
        run_id: unique id of the run.
    """

    run_id: str

    def close(self) -> None:
        """Close it."""
        ...

    def load(self, now_s: float) -> RunState:
        """The stored state of the run, with no client heard yet and its deadlines started anew."""
        ...

    def records(self) -> tuple[RoundRecord, ...]:
        """The finished rounds, in order."""
        ...

    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        """The evaluations by devices, in order."""
        ...

    def generations(self) -> tuple[GenerationRecord, ...]:
        """The generations of searches between rounds, in order."""
        ...

    def checkpoint_sha256(self, round_number: int) -> str | None:
        """Digest of a round's checkpoint."""
        ...

    def update_digests(self, *, since_round: int) -> set[str]:
        """Digests of the accepted updates of a round and those after it."""
        ...

    def load_bytes(self, at: RunState) -> dict[str, Bytes]:
        """Bytes counted so far for each client state of the open round."""
        ...

    def save_absences(self, away: Iterable[AbsenceRecord]) -> None:
        """Replace the clients that are away."""
        ...

    def save(
        self,
        before: RunState,
        after: RunState,
        *,
        counted: Callable[[str], Bytes] = lambda client_id: (0, 0),
        close: AnyClose | None = None,
        record: AnyRecord | None = None,
    ) -> None:
        """Write what a step changed, and the record of what it closed.

        Args:
            before: the state before the step.
            after: the state after it.
            counted: bytes of a client in this round.
            close: the closed round, evaluation or generation.
            record: of the same.
        """
        ...
