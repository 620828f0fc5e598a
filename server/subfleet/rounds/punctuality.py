"""What is remembered of a client's answers, and how long it is waited for after it let a task go unanswered. Pure.

A client that has missed nothing is waited for until the deadline. After a miss it is waited for once more, for a short
time that follows from how long its answers took before. After the second in a row it is an extra: it still gets its
tasks, and its answer counts when it comes before the others have all answered, but nobody waits for it. An answer that
is accepted makes it a client like any other.

An extra that is slower than the others would never get an answer in. Therefore it is waited for again, for the same
short time, after 8 misses in a row, after 16, and so on: a client that never answers costs a run of n rounds the
logarithm of n short waits.
"""

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["DUTIES", "EXTRA_FROM", "PUNCTUAL", "Duty", "Punctuality"]

Duty = Literal["telemetry", "training", "scores", "evaluation", "paths"]
"""What a client is asked for: what it can give in a round, an update, scores of candidates, how good the model is, and
scores of paths. Each is remembered by itself: a client that trains may hold no data that it could evaluate on."""

DUTIES: tuple[Duty, ...] = ("telemetry", "training", "scores", "evaluation", "paths")

EXTRA_FROM = 2
"""Misses in a row after which nobody waits."""
_AGAIN_FROM = 8
"""Misses in a row after which it is waited for once more; then after twice as many, and so on."""
_UNKNOWN_SHARE = 1 / 4
"""Of a deadline, where it is not known how long an answer takes."""
_LEAST_SHARE = 1 / 16
"""Of a deadline, however fast answers were: the next task may be a larger one."""
_GENEROUS = 2.0
"""In longest times: what an answer may take."""
_REMEMBERED = 3
"""Answers whose times are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Punctuality:
    """How a client has answered one kind of task lately.

    Attributes:
        missed: tasks in a row that it has not answered.
        took_s: seconds from the sending of a task until its answer was accepted, of the last few answers.
    """

    missed: int = 0
    took_s: tuple[float, ...] = ()

    @property
    def extra(self) -> bool:
        """Whether the client is asked beside the others and not in the place of one."""
        return self.missed >= EXTRA_FROM

    @property
    def awaited(self) -> bool:
        """Whether the client's next answer is waited for: that of an extra now and then."""
        again = self.missed >= _AGAIN_FROM and not self.missed & (self.missed - 1)
        return again or not self.extra

    def patience_s(self, deadline_s: float) -> float:
        """How long an answer is waited for, from the sending of the task.

        Args:
            deadline_s: of all such tasks, above 0.

        Returns:
            seconds, above 0 and at most the deadline.
        """
        if not self.missed:
            return deadline_s
        if not self.took_s:
            return _UNKNOWN_SHARE * deadline_s
        return min(deadline_s, max(_GENEROUS * max(self.took_s), _LEAST_SHARE * deadline_s))

    def after_answer(self, took_s: float) -> "Punctuality":
        """The record after an accepted answer, which makes up for all misses."""
        return replace(self, missed=0, took_s=(*self.took_s, max(0.0, took_s))[-_REMEMBERED:])

    def after_miss(self) -> "Punctuality":
        """The record after a task that was not answered."""
        return replace(self, missed=self.missed + 1)


PUNCTUAL = Punctuality()
"""A client of whom nothing is known."""
