"""Invariants of the agent under any sequence of events."""

from collections import Counter

import pytest
from agent.agent_cases import RESULT, SCORES, Agent, announce, blob, deploy_task, profile, score_task, train_task
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from matrices import examples

from subfleet.agent.actions import Action, Fetch, Keep, Leave, Measure, PlaceModels, Save, Settle, StartWork, Weigh
from subfleet.agent.events import BlobArrived, BlobFailed, Event, LinkDown, LinkUp, Received, Stopping, TimePassed
from subfleet.agent.outcomes import ModelsPlaced, ScoringEnded, TrainingEnded, WorkFailed
from subfleet.agent.states import AgentSettings, Saved
from subfleet.protocol.disk import needed_bytes
from subfleet.protocol.messages import Ack, Message, Refusal, RoundInfo, Scores, Task, Update

pytestmark = pytest.mark.slow

TASKS = [train_task(f"t{number}{part}", number) for number in (1, 2, 3) for part in "ab"] + [deploy_task()]
TASKS += [score_task(f"s{number}", number) for number in (1, 2, 3)]
ROUNDS = [announce(number, phase) for number in (1, 2, 3) for phase in ("measure", "train")] + [announce(3, "finished")]
MESSAGES: list[RoundInfo | Task] = [*TASKS, *ROUNDS, announce(1, run_id="next"), train_task("n1", 1, run_id="next")]


class AgentMachine(RuleBasedStateMachine):
    """Drives one agent and checks every action; a crash restarts it from the state saved last."""

    def __init__(self) -> None:
        super().__init__()
        self.agent = Agent(settings=AgentSettings(profile=profile(), leave_when_finished=True))
        self.on_disk = Saved()
        self.worker: str | None = None
        self.trained: set[str] = set()  # tasks that this process handed to its worker
        self.deaths: Counter[str] = Counter()  # by task, processes that ended during it without having been stopped
        self.outbox: dict[str, Message] = {}
        self.over: set[str] = set()  # runs in which no update is awaited
        self.weighed: Task | None = None
        self.do(LinkUp())

    def do(self, event: Event) -> None:
        for action in self.agent.step(event):
            self.check(action)
            if isinstance(action, Measure):
                self.do(self.agent.measured(action))
            elif isinstance(action, Weigh):
                self.do(self.agent.weighed(action))

    def check(self, action: Action) -> None:
        if isinstance(action, Save):
            self.on_disk = action.saved
        elif isinstance(action, StartWork):
            assert self.worker is None, "one task at a time"
            assert action.task.task_id not in self.trained, "no task is trained twice in one process"
            assert action.task.planned_peak_bytes <= action.memory_limit_bytes
            working = self.on_disk.survival.working
            assert working is not None, "work is saved before it begins"
            assert working.task_id == action.task.task_id
            assert self.deaths[action.task.task_id] < 2, "work on which two processes died does not begin again"
            self.worker = action.task.task_id
            self.trained.add(action.task.task_id)
        elif isinstance(action, (Weigh, Fetch)):
            self.check_room(action)
        elif isinstance(action, Keep):
            self.outbox[action.message.message_id] = action.message
            if not hasattr(action.message, "reading"):
                assert action.message in self.on_disk.answers, "an answer is on the disk before it is sent"
        elif isinstance(action, Settle):
            settled = self.outbox.pop(action.message_id)
            if isinstance(settled, Update):
                assert settled.run_id in self.over or action.message_id in self.acks, "kept until its ack"
        elif isinstance(action, PlaceModels):
            self.do(ModelsPlaced(task_id=action.task.task_id, files=("model.onnx",)))
        elif isinstance(action, Leave):
            assert self.agent.state.current is None

    def check_room(self, action: Weigh | Fetch) -> None:
        if isinstance(action, Weigh):
            updates = {update.blob.sha256 for update in self.on_disk.updates}
            assert action.pinned == {blob.sha256 for blob in action.task.blobs} | updates
            self.weighed = action.task
            return
        assert self.weighed is not None, "a task is weighed before its blobs are fetched"
        assert action.blob in self.weighed.blobs
        assert self.agent.room_bytes >= needed_bytes(self.weighed, {blob.sha256 for blob in self.weighed.blobs})

    acks: frozenset[str] = frozenset()

    @rule(message=st.sampled_from(MESSAGES))
    def receive(self, message: RoundInfo | Task) -> None:
        if isinstance(message, RoundInfo):
            current = {message.run_id} - ({message.run_id} if message.phase == "finished" else set())
            self.over = {"run", "next"} - current
        self.do(Received(message=message))

    @rule(index=st.integers(0, 5), status=st.sampled_from(["accepted", "duplicate", "refused"]))
    def ack(self, index: int, status: str) -> None:
        known = sorted(self.outbox) or ["nothing"]
        of = known[index % len(known)]
        self.acks = self.acks | {of}
        self.do(Received(message=Ack(of=of, status=status)))  # type: ignore[arg-type]  # one of its Literals
        assert of not in self.outbox

    @rule(arrives=st.booleans())
    def transfer(self, arrives: bool) -> None:
        for sha256 in sorted(self.agent.state.current.lacking) if self.agent.state.current else []:
            self.do(
                BlobArrived(sha256=sha256) if arrives else BlobFailed(sha256=sha256, reason="program", detail="missing")
            )

    @rule(well=st.booleans())
    def worker_ends(self, well: bool) -> None:
        if self.worker is None:
            return
        task_id, self.worker = self.worker, None
        if well and task_id.startswith("s"):
            self.do(ScoringEnded(task_id=task_id, scores=SCORES))
        elif well:
            self.do(TrainingEnded(task_id=task_id, result=RESULT, blob=blob(f"update {task_id}")))
        else:
            self.do(WorkFailed(task_id=task_id, reason="failed", detail="it broke"))

    @rule(free_bytes=st.sampled_from([500, 2000]))
    def memory_changes(self, free_bytes: int) -> None:
        self.agent.free_bytes = free_bytes

    @rule(room_bytes=st.sampled_from([20, 10**9]))
    def disk_changes(self, room_bytes: int) -> None:
        self.agent.room_bytes = room_bytes

    @rule(seconds=st.sampled_from([0.1, 3.0, 20.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.agent.now_s += seconds
        self.do(TimePassed())

    @rule()
    def link_breaks_and_mends(self) -> None:
        self.do(LinkDown())
        self.do(LinkUp())

    @rule(on_purpose=st.booleans())
    def crash(self, on_purpose: bool) -> None:
        if on_purpose:
            self.do(Stopping())
        elif self.worker is not None:
            self.deaths[self.worker] += 1
        self.agent = Agent(settings=self.agent.settings, saved=self.on_disk, now_s=self.agent.now_s)
        self.worker, self.trained, self.outbox = None, set(), {}
        for action in self.agent.first:
            self.check(action)
        self.do(LinkUp())

    @invariant()
    def what_waits_has_a_deadline(self) -> None:
        state = self.agent.state
        assert all(entry.until_s > self.agent.now_s for entry in state.pending if isinstance(entry.message, Update))
        assert {entry.message.message_id for entry in state.pending} == set(self.outbox)
        if state.current is not None:
            assert state.current.deadline_at_s <= self.agent.now_s + state.current.task.deadline_s

    @invariant()
    def the_disk_knows_what_the_agent_knows(self) -> None:
        assert self.on_disk == self.agent.state.saved

    @invariant()
    def an_answered_task_has_one_answer(self) -> None:
        answers = [
            entry.message.task_id
            for entry in self.agent.state.pending
            if isinstance(entry.message, Update | Refusal | Scores)
        ]
        assert len(answers) == len(set(answers))
        assert self.agent.state.current is None or self.agent.state.current.task.task_id not in answers


AgentMachine.TestCase.settings = examples(40, stateful_step_count=40)
TestAgentSequences = AgentMachine.TestCase
