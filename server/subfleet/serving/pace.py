"""How far a run is: what those are told of who watch it while its rounds go on."""

from collections.abc import Callable

from subfleet.journal.records import Progress
from subfleet.rounds.state import RunState

__all__ = ["Pace"]


class Pace:
    """Tells how far a run is whenever that has changed, and by the rounds that it saw how long the rest will take.

    Args:
        round_count: of the run.
        clock: seconds that only grow.
    """

    def __init__(self, round_count: int, clock: Callable[[], float]) -> None:
        self._round_count = round_count
        self._clock = clock
        self._first: tuple[int, float] | None = None  # the first round that was seen to begin, and when
        self._begins = False  # what was seen last came before a round's tasks
        self._round = 0
        self._begun_s = 0.0
        self._told: tuple[int, int, int, tuple[str, ...]] | None = None

    def progress(self, state: RunState, away: tuple[str, ...] = ()) -> Progress | None:
        """How far the run is; None where nothing has changed that is worth telling.

        Args:
            state: of the run.
            away: those that have not answered and are away, in words.
        """
        if state.phase not in ("train", "fold") or not state.seats:
            self._begins = True
            return None
        if state.round != self._round:
            self._round, self._begun_s = state.round, self._clock()
            # A run may have been taken up in the midst of a round.
            self._first = self._first or ((self._round, self._begun_s) if self._begins else None)
        taking_part = [seat for seat in state.seats.values() if seat.stage not in ("skipped", "missing")]
        answered = sum(not seat.open for seat in taking_part)
        told = (state.round, answered, len(taking_part), away)
        if told == self._told:
            return None
        self._told = told
        return Progress(
            round=state.round,
            round_count=self._round_count,
            answered=answered,
            devices=len(taking_part),
            left_s=self._left_s(state.round),
            away=away,
        )

    def _left_s(self, round_number: int) -> float | None:
        """By the mean of the rounds that ended here; None before there is one."""
        if self._first is None or round_number == self._first[0]:
            return None
        each_s = (self._begun_s - self._first[1]) / (round_number - self._first[0])
        return max(0.0, each_s * (self._round_count - round_number + 1) - (self._clock() - self._begun_s))
