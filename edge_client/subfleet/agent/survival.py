"""How the agent adapts when a process dies during work, as it does when the system runs out of memory. Pure.

A killed process reports nothing. So work is recorded before it starts, and the record is removed when it ends or is
stopped on purpose: a new process that finds a record knows that its predecessor died. One death may be a power cut, and
the task is repeated. Two in a row, without work in between that ended, are taken for a lack of memory: from then on the
device offers half of what the leaner of the two was to take, and a little more after each round that it survives.
"""

from dataclasses import dataclass, replace

from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count
from subfleet.protocol.messages import RoundInfo
from subfleet.protocol.task import Task, Train

FATAL_DEATHS = 2
"""Number of consecutive deaths that lower the ceiling."""
REGAINED_FRACTION = 16
"""A ceiling grows by one part in this many after a round that the process survived."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Begun:
    """Work that was started.

    Attributes:
        task_id: of its task.
        memory_bytes: its largest memory: the planned peak, or the whole budget if paths are drawn by it.
    """

    task_id: str
    memory_bytes: Count

    @classmethod
    def of(cls, task: Task, memory_limit_bytes: int) -> "Begun":
        """Make the record of a task's work."""
        draws = isinstance(task.work, Train) and task.work.paths is not None
        return cls(task_id=task.task_id, memory_bytes=memory_limit_bytes if draws else task.planned_peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Ceiling:
    """The largest budget that the device offers, after its process died with a larger one.

    Attributes:
        memory_bytes: the largest budget that it offers.
        free_bytes: what it would offer without a ceiling: the memory of the fatal work, or the largest budget measured
            since. A ceiling that has grown to it is removed; a temporarily small budget does not remove it.
        run_id: of the newest measured round, as is round; empty before the first.
        survived: whether the process has survived that round so far.
    """

    memory_bytes: Count
    free_bytes: Count
    run_id: str = ""
    round: int = 0
    survived: bool = False

    def enter_round(self, run_id: str, number: int) -> "Ceiling":
        """Begin a round: a sixteenth higher if the process survived the previous one."""
        if (run_id, number) == (self.run_id, self.round):
            return self
        gained_bytes = max(1, self.memory_bytes // REGAINED_FRACTION) if self.survived else 0
        return replace(self, memory_bytes=self.memory_bytes + gained_bytes, run_id=run_id, round=number, survived=True)

    def note_death(self, info: RoundInfo | None) -> "Ceiling":
        """Note a death in a round: the round does not raise the ceiling."""
        run_id, number = ("", 0) if info is None else (info.run_id, info.round)
        return replace(self, run_id=run_id, round=number, survived=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Deaths of the agent's processes during work, and the ceiling that follows.

    Attributes:
        working: the current work.
        deaths: work that processes died at since the last work that ended, the oldest first.
        ceiling: None before any consequence.
    """

    working: Begun | None = None
    deaths: tuple[Begun, ...] = ()
    ceiling: Ceiling | None = None

    def start_work(self, task: Task, memory_limit_bytes: int) -> "Survival":
        """Record work that is about to start; this is written to disk first."""
        return replace(self, working=Begun.of(task, memory_limit_bytes))

    def end_work(self) -> "Survival":
        """Note that the work ended, successfully or not: the process survived it."""
        return replace(self, working=None, deaths=())

    def stop_work(self) -> "Survival":
        """Note that the work was stopped on purpose, which proves nothing."""
        return replace(self, working=None)

    def list_fatal(self) -> tuple[Begun, ...]:
        """Deaths that lower the ceiling at the next start; empty if there are too few."""
        lost = self._list_deaths()
        return lost if self.working is not None and len(lost) >= FATAL_DEATHS else ()

    def restart(self, info: RoundInfo | None) -> "Survival":
        """Adapt at the start of a process. `info` is the last announcement of the previous one."""
        if self.working is None:
            return self
        if fatal := self.list_fatal():
            return self._lower_ceiling(fatal, info)
        ceiling = None if self.ceiling is None else self.ceiling.note_death(info)
        return Survival(deaths=self._list_deaths(), ceiling=ceiling)

    def note_kill(self, info: RoundInfo | None) -> "Survival":
        """Note that the system killed the worker process: as this was no power cut, one death is enough."""
        return self if self.working is None else self._lower_ceiling((self.working,), info)

    def enter_round(self, run_id: str, number: int, budget_bytes: int) -> "Survival":
        """Note the measured budget of a round: the ceiling grows until it reaches what the device has.

        Args:
            run_id: of the round.
            number: of the round.
            budget_bytes: the budget without a ceiling.
        """
        if self.ceiling is None:
            return self
        ceiling = self.ceiling.enter_round(run_id, number)
        ceiling = replace(ceiling, free_bytes=max(ceiling.free_bytes, budget_bytes))
        return replace(self, ceiling=None if ceiling.memory_bytes >= ceiling.free_bytes else ceiling)

    def limit_budget(self, budget_bytes: int) -> int:
        """Limit a measured budget to the ceiling."""
        return budget_bytes if self.ceiling is None else min(budget_bytes, self.ceiling.memory_bytes)

    def _lower_ceiling(self, fatal: tuple[Begun, ...], info: RoundInfo | None) -> "Survival":
        least_bytes = min(begun.memory_bytes for begun in fatal)
        known = self.ceiling or Ceiling(memory_bytes=least_bytes, free_bytes=least_bytes)
        lower = replace(known, memory_bytes=min(known.memory_bytes, least_bytes // 2))
        return Survival(ceiling=lower.note_death(info))

    def _list_deaths(self) -> tuple[Begun, ...]:
        return self.deaths if self.working is None else (*self.deaths, self.working)
