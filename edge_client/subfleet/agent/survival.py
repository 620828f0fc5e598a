"""What the agent learns when a process dies at work, as it does when the system has too little memory. Pure.

A process that is killed says nothing. So a work is written down before it is begun, and crossed out when it ends or is
stopped on purpose: what a new process finds there is a work that the process before it did not survive. One death may
be a power cut, and the task is begun again. Two in a row, in one task or in two, without a work in between that came to
its end, are taken for a lack of memory: from then on the device offers half of what the leaner of the two was to take,
and a little more after each round that it survives.
"""

from dataclasses import dataclass, replace

from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count
from subfleet.protocol.messages import RoundInfo
from subfleet.protocol.task import Task, Train

__all__ = ["FATAL_DEATHS", "Begun", "Ceiling", "Survival"]

FATAL_DEATHS = 2
"""How many deaths in a row teach something."""
REGAINED_FRACTION = 16
"""One part in so many is what a ceiling grows by after a round that the process survived."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Begun:
    """A work that was begun.

    Attributes:
        task_id: of its task.
        memory_bytes: that it was to take at most: the planned peak, or all that was free where paths are drawn by that.
    """

    task_id: str
    memory_bytes: Count

    @classmethod
    def of(cls, task: Task, memory_limit_bytes: int) -> "Begun":
        """The work of a task that may take so much."""
        draws = isinstance(task.work, Train) and task.work.paths is not None
        return cls(task_id=task.task_id, memory_bytes=memory_limit_bytes if draws else task.planned_peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Ceiling:
    """The most that the device offers, since its process died at more.

    Attributes:
        memory_bytes: what it offers at most.
        free_bytes: what it would have offered: what the fatal work was to take, or the largest budget measured since.
            A ceiling that has grown to it is forgotten. A budget that is small for a moment does not end it.
        run_id: of the newest round that was measured, as is round; empty before the first.
        survived: whether the process has lived through that round so far.
    """

    memory_bytes: Count
    free_bytes: Count
    run_id: str = ""
    round: int = 0
    survived: bool = False

    def in_round(self, run_id: str, number: int) -> "Ceiling":
        """As a round begins: a sixteenth higher where the process survived the round before."""
        if (run_id, number) == (self.run_id, self.round):
            return self
        gained_bytes = max(1, self.memory_bytes // REGAINED_FRACTION) if self.survived else 0
        return replace(self, memory_bytes=self.memory_bytes + gained_bytes, run_id=run_id, round=number, survived=True)

    def died_in(self, info: RoundInfo | None) -> "Ceiling":
        """As a work of a round is not survived: the round counts for nothing."""
        run_id, number = ("", 0) if info is None else (info.run_id, info.round)
        return replace(self, run_id=run_id, round=number, survived=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Which works the agent's processes survived, and what the device offers since one did not.

    Attributes:
        working: the work under way.
        deaths: works that a process did not survive, since one came to its end; the oldest first.
        ceiling: None while nothing is learned.
    """

    working: Begun | None = None
    deaths: tuple[Begun, ...] = ()
    ceiling: Ceiling | None = None

    def began(self, task: Task, memory_limit_bytes: int) -> "Survival":
        """A work is about to begin; this is on the disk before it does."""
        return replace(self, working=Begun.of(task, memory_limit_bytes))

    def ended(self) -> "Survival":
        """The work came to its end, well or not: the process survived it."""
        return replace(self, working=None, deaths=())

    def stopped(self) -> "Survival":
        """The work was stopped on purpose before its end, which shows nothing."""
        return replace(self, working=None)

    def fatal(self) -> tuple[Begun, ...]:
        """What the process that saved this, and those before it, died at, where a start is to learn from it."""
        lost = self._list_deaths()
        return lost if self.working is not None and len(lost) >= FATAL_DEATHS else ()

    def restarted(self, info: RoundInfo | None) -> "Survival":
        """What a new process makes of it. `info` is the announcement that the one before knew."""
        if self.working is None:
            return self
        if fatal := self.fatal():
            return self._lower_ceiling(fatal, info)
        ceiling = None if self.ceiling is None else self.ceiling.died_in(info)
        return Survival(deaths=self._list_deaths(), ceiling=ceiling)

    def killed(self, info: RoundInfo | None) -> "Survival":
        """The system killed what did the work, and this process lives on: that was no power cut, and once is enough."""
        return self if self.working is None else self._lower_ceiling((self.working,), info)

    def measured(self, run_id: str, number: int, budget_bytes: int) -> "Survival":
        """As the budget of a round is measured: the ceiling grows, until it is no less than what the device has.

        Args:
            run_id: of the round.
            number: of the round.
            budget_bytes: what the device would offer without a ceiling.
        """
        if self.ceiling is None:
            return self
        ceiling = self.ceiling.in_round(run_id, number)
        ceiling = replace(ceiling, free_bytes=max(ceiling.free_bytes, budget_bytes))
        return replace(self, ceiling=None if ceiling.memory_bytes >= ceiling.free_bytes else ceiling)

    def offered_bytes(self, budget_bytes: int) -> int:
        """What the device offers of a measured budget."""
        return budget_bytes if self.ceiling is None else min(budget_bytes, self.ceiling.memory_bytes)

    def _lower_ceiling(self, fatal: tuple[Begun, ...], info: RoundInfo | None) -> "Survival":
        least_bytes = min(begun.memory_bytes for begun in fatal)
        known = self.ceiling or Ceiling(memory_bytes=least_bytes, free_bytes=least_bytes)
        lower = replace(known, memory_bytes=min(known.memory_bytes, least_bytes // 2))
        return Survival(ceiling=lower.died_in(info))

    def _list_deaths(self) -> tuple[Begun, ...]:
        return self.deaths if self.working is None else (*self.deaths, self.working)
