"""A journal in memory, for servers that are never resumed."""

from collections.abc import Callable, Iterable

from subfleet.journal.base import AbsenceRecord, AnyRecord, Bytes
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.networks import GenerationRecord
from subfleet.journal.records import RoundRecord
from subfleet.rounds.signals import AnyClose, Close
from subfleet.rounds.state import RunState


class MemoryJournal:
    """See `RunJournal`. It keeps the records of a run, and of its state only the last one.

    Args:
        run_id: of the run.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._state = RunState()
        self._records: list[AnyRecord] = []
        self._checkpoints: dict[int, str] = {}

    def close(self) -> None:
        """See `RunJournal.close`."""

    def load(self, now_s: float) -> RunState:
        """See `RunJournal.load`; the run begins."""
        return self._state.restart(now_s)

    def records(self) -> tuple[RoundRecord, ...]:
        """See `RunJournal.records`."""
        return tuple(record for record in self._records if isinstance(record, RoundRecord))

    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        """See `RunJournal.evaluations`."""
        return tuple(record for record in self._records if isinstance(record, EvaluationRecord))

    def generations(self) -> tuple[GenerationRecord, ...]:
        """See `RunJournal.generations`."""
        return tuple(record for record in self._records if isinstance(record, GenerationRecord))

    def checkpoint_sha256(self, round_number: int) -> str | None:
        """See `RunJournal.checkpoint_sha256`."""
        return self._checkpoints.get(round_number)

    def update_digests(self, *, since_round: int) -> set[str]:
        """See `RunJournal.update_digests`; without a resumed round, those of the open one are enough."""
        del since_round
        return list_open_digests(self._state)

    def load_bytes(self, at: RunState) -> dict[str, Bytes]:
        """See `RunJournal.load_bytes`."""
        del at
        return {}

    def save_absences(self, away: Iterable[AbsenceRecord]) -> None:
        """See `RunJournal.save_absences`; nobody asks for them."""

    def save(
        self,
        before: RunState,
        after: RunState,
        *,
        counted: Callable[[str], Bytes] = lambda client_id: (0, 0),
        close: AnyClose | None = None,
        record: AnyRecord | None = None,
    ) -> None:
        """See `RunJournal.save`."""
        del before, counted
        self._state = after
        if record is not None:
            self._records.append(record)
        if isinstance(close, Close):
            self._checkpoints[close.round] = close.result.sha256


def list_open_digests(state: RunState) -> set[str]:
    """The digests of the updates of the open round."""
    return {client.update.blob.sha256 for client in state.clients.values() if client.update is not None}
