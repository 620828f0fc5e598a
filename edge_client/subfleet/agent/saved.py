"""What of an agent outlives its process: plain, frozen data."""

from dataclasses import dataclass, field

from subfleet.agent.survival import Survival
from subfleet.protocol.answers import Answer, Deployed, Evaluated, Refusal, Scores, Update
from subfleet.protocol.messages import RoundInfo
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.task import Task

__all__ = ["Saved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What outlives the process.

    Attributes:
        round: the last announcement of the run that the device takes part in.
        task: the task that has no answer yet.
        updates: without a receipt, as are refusals, deployed, scores and evaluated.
        done: ids of the last tasks that were answered or replaced.
        programs: digests of the last programs that trained or evaluated, the newest last.
        survival: which works processes of this device did not survive, and what follows.
    """

    round: RoundInfo | None = None
    task: Task | None = None
    updates: tuple[Update, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    deployed: tuple[Deployed, ...] = ()
    scores: tuple[Scores, ...] = ()
    done: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    evaluated: tuple[Evaluated, ...] = field(default=(), metadata=ADDED_LATER)
    survival: Survival = field(default=Survival(), metadata=ADDED_LATER)

    def answers(self) -> tuple[Answer, ...]:
        """Every answer without a receipt."""
        return (*self.updates, *self.refusals, *self.deployed, *self.scores, *self.evaluated)

    def blobs(self) -> frozenset[str]:
        """Digests of what is worth its room: programs for later tasks, and what is pinned."""
        return frozenset(self.programs) | self.pinned()

    def pinned(self) -> frozenset[str]:
        """Digests of what must stay, however short room is: what the task names, and updates without a receipt."""
        of_task = () if self.task is None else self.task.blobs
        return frozenset(blob.sha256 for blob in (*of_task, *(update.blob for update in self.updates)))
