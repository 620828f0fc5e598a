"""A device whose agent is killed and started again, for the tests of what it learns from that."""

from dataclasses import dataclass, field, replace

from agent.agent_cases import Agent, announce, one, profile, train_task

from subfleet.agent.actions import Action, Keep, MeasureForRound, Publish, Save, StartWork
from subfleet.agent.events import LinkUp, Stopping, TimePassed
from subfleet.agent.states import AgentSettings, Saved
from subfleet.protocol.messages import Refusal, Task, Telemetry
from subfleet.protocol.readings import LogLow

BUDGET_BYTES = 1000
"""What the agent of the tests offers of its memory: a half of 2,000 bytes."""


@dataclass
class Board:
    """A device whose supervisor starts the agent again however it ends. Only what was saved outlives a process."""

    disk: Saved = field(default_factory=Saved)
    starts: int = 0
    begun: list[str] = field(default_factory=list)
    told: list[Refusal] = field(default_factory=list)
    agent: Agent = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.agent = Agent(saved=self.disk, settings=AgentSettings(profile=profile(f"s{self.starts}")))
        self.note(self.agent.first)
        self.note(self.agent.see(LinkUp()))

    def note(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """Do what actions ask for in their order, and look at what stood on the disk by then."""
        for action in actions:
            if isinstance(action, Save):
                self.disk = action.saved
            elif isinstance(action, StartWork):
                assert self.disk.survival.working is not None, "a work is written down before it is begun"
                assert self.disk.survival.working.task_id == action.task.task_id
                self.begun.append(action.task.task_id)
            elif isinstance(action, Keep) and isinstance(action.message, Refusal):
                assert action.message in self.disk.refusals, "a refusal is on the disk before it is sent"
                self.told = [*(known for known in self.told if known != action.message), action.message]
        assert self.agent.state.saved == self.disk
        return actions

    def begin(self, task: Task) -> None:
        """Bring a task to its work, as far as the device lets it come."""
        self.note(self.agent.train(task))

    def measure(self, number: int, log_low_bytes: int | None = None) -> Telemetry:
        """What the device tells at the announcement of a round."""
        actions = self.note(self.agent.step_heard(announce(number)))
        measured = self.agent.measured(one(actions, MeasureForRound))
        if log_low_bytes is not None:
            measured = replace(measured, log_low=LogLow(memory_budget_bytes=log_low_bytes))
        message = one(self.note(self.agent.step(measured)), Keep).message
        assert isinstance(message, Telemetry)
        return message

    def killed(self) -> None:
        """The system kills the process, and its supervisor starts it again; blobs are here from before."""
        self.start()
        self.note(self.agent.fetch_all())

    def stopped(self) -> None:
        """Somebody stops the process on purpose, and starts it again later."""
        self.note(self.agent.step(Stopping()))
        self.killed()

    def offered_bytes(self) -> int:
        """What it tells outside rounds."""
        self.agent.now_s += 100.0
        live = [action for action in self.note(self.agent.see(TimePassed())) if isinstance(action, Publish)]
        (message,) = [action.message for action in live if isinstance(action.message, Telemetry)]
        return message.memory_budget_bytes


def twice_killed(task: Task | None = None) -> Board:
    board = Board()
    board.begin(task or train_task())
    board.killed()
    board.killed()
    return board
