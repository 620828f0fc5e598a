"""A device on which the agent is killed and restarted, for the tests of its reaction."""

from dataclasses import dataclass, field, replace

from agent.agent_cases import Agent, announce, find_action, profile, train_task

from subfleet.agent.actions import Action, Keep, MeasureForRound, Publish, Save, StartWork
from subfleet.agent.events import LinkUp, Stopping, TimePassed
from subfleet.agent.states import AgentSettings, Saved
from subfleet.protocol.messages import Refusal, Task, Telemetry
from subfleet.protocol.readings import LogLow

BUDGET_BYTES = 1000
"""The memory budget of the agent in the tests: half of 2,000 bytes."""


@dataclass
class Board:
    """A device with a supervisor that restarts the agent however it ends. Only saved state outlives a process."""

    disk: Saved = field(default_factory=Saved)
    starts: int = 0
    begun: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    agent: Agent = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.agent = Agent(saved=self.disk, settings=AgentSettings(profile=profile(f"s{self.starts}")))
        self.note(self.agent.first)
        self.note(self.agent.see(LinkUp()))

    def note(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """Apply actions in order, and check what was saved on the disk before each."""
        for action in actions:
            if isinstance(action, Save):
                self.disk = action.saved
            elif isinstance(action, StartWork):
                assert self.disk.survival.working is not None, "work is saved before it begins"
                assert self.disk.survival.working.task_id == action.task.task_id
                self.begun.append(action.task.task_id)
            elif isinstance(action, Keep) and isinstance(action.message, Refusal):
                assert action.message in self.disk.refusals, "a refusal is on the disk before it is sent"
                self.refusals = [*(known for known in self.refusals if known != action.message), action.message]
        assert self.agent.state.saved == self.disk
        return actions

    def begin(self, task: Task) -> None:
        """Take a task as far towards its work as the device permits."""
        self.note(self.agent.train(task))

    def measure(self, number: int, log_low_bytes: int | None = None) -> Telemetry:
        """The telemetry of the device at the announcement of a round."""
        actions = self.note(self.agent.step_heard(announce(number)))
        measured = self.agent.measured(find_action(actions, MeasureForRound))
        if log_low_bytes is not None:
            measured = replace(measured, log_low=LogLow(memory_budget_bytes=log_low_bytes))
        message = find_action(self.note(self.agent.step(measured)), Keep).message
        assert isinstance(message, Telemetry)
        return message

    def kill(self) -> None:
        """Let the system kill the process and the supervisor restart it; fetched blobs remain."""
        self.start()
        self.note(self.agent.fetch_all())

    def stop(self) -> None:
        """Stop the process on purpose, and start it again later."""
        self.note(self.agent.step(Stopping()))
        self.kill()

    def offered_bytes(self) -> int:
        """The memory budget that the agent reports outside rounds."""
        self.agent.now_s += 100.0
        live = [action for action in self.note(self.agent.see(TimePassed())) if isinstance(action, Publish)]
        (message,) = [action.message for action in live if isinstance(action.message, Telemetry)]
        return message.memory_budget_bytes


def board_killed_twice(task: Task | None = None) -> Board:
    board = Board()
    board.begin(task or train_task())
    board.kill()
    board.kill()
    return board
