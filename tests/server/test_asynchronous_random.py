"""Asynchronous rounds under random sequences of events, restarts included."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from matrices import examples
from server.coordinator_cases import CLIENTS, context_of, profile, telemetry
from server.random_cases import build_update, complete_request, reload_state

from subfleet.protocol.messages import Presence, Refusal, Task
from subfleet.rounds.closing import resume_state
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.ongoing import compute_staleness
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import (
    Action,
    AggregationRequest,
    Ask,
    Close,
    Event,
    Messages,
    RequestDone,
    RequestFailed,
    SendTask,
    Tick,
)
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest, ModelsRequest, TaskRequest
from subfleet.settings.sections import AsynchronousSettings, Deadlines

pytestmark = pytest.mark.slow

NAMES = (*CLIENTS, "dan", "eve")
names = st.sampled_from(NAMES)


class Fleet(RuleBasedStateMachine):
    settings: AsynchronousSettings

    def __init__(self) -> None:
        super().__init__()
        limits = Deadlines(join_s=40, measure_s=10, round_s=30, deploy_s=20, lease_s=15, linger_s=0)
        self.context = context_of(asynchronous=self.settings, rounds=5, min_clients=2, deadlines=limits)
        self.state, self.now_s = RunState(), 0.0
        self.jobs: list[TaskRequest | ModelsRequest] = []
        self.tasks: dict[str, Task] = {}
        self.asked: dict[str, Ask] = {}
        self.aggregate: AggregationRequest | None = None
        self.counted: dict[str, int] = {}  # task id to round
        self.closed: list[int] = []

    def apply(self, event: Event) -> None:
        before = self.state
        self.state, actions = step(self.context, before, event, self.now_s)
        for action in actions:
            self.perform(action)

    def perform(self, action: Action) -> None:
        match action:
            case AggregationRequest():
                self.aggregate = action
            case TaskRequest() | ModelsRequest():
                self.jobs.append(action)
            case SendTask(task=task):
                assert self.tasks.setdefault(task.task_id, task) == task, "sent again unchanged"
            case Ask():
                self.asked[action.client_id] = action
            case Close():
                self.closed.append(action.round)
                self.check_record(action)
            case _:
                pass

    def check_record(self, close: Close) -> None:
        done = [client for client in close.clients if client.stage == "done"]
        assert 0 < len(done) <= self.settings.buffer
        assert len({client.client_id for client in close.clients}) == len(close.clients)
        for client in done:
            assert client.task is not None
            assert self.counted.setdefault(client.task.task_id, close.round) == close.round, "no update counts twice"
            assert 0 <= compute_staleness(close.round, client) <= self.settings.max_staleness

    @rule(name=names, online=st.booleans())
    def presence(self, name: str, online: bool) -> None:
        self.apply(Presence(client_id=name, session_id=f"{name}-1", online=online))

    @rule()
    def everyone_is_there(self) -> None:
        for name in NAMES:
            self.presence(name, online=True)
            self.apply(profile(name))

    @rule(name=names, memory=st.sampled_from([10, 14_000, 10**9]), back=st.integers(0, 1))
    def telemetry(self, name: str, memory: int, back: int) -> None:
        number = max(self.state.round - back, 1)
        self.apply(telemetry(self.context, name, number, memory, attempt=self.state.attempt))

    @rule(planned=st.sampled_from([1000, 1000, 10**10]), fails=st.booleans())
    @precondition(lambda self: self.jobs)
    def prepare(self, planned: int, fails: bool) -> None:
        job = self.jobs.pop()
        self.apply(RequestFailed(request=job, reason="no") if fails else complete_request(job, planned, False))

    @rule()
    def all_asked_get_tasks(self) -> None:
        waiting = [name for name, client in self.state.clients.items() if client.stage == "asked"]
        telemetries = (
            telemetry(self.context, name, self.state.round, attempt=self.state.attempt) for name in sorted(waiting)
        )
        self.apply(Messages(messages=tuple(telemetries)))
        while self.jobs:
            self.apply(complete_request(self.jobs.pop(), 1000, False))

    @rule(data=st.data(), stored=st.booleans())
    @precondition(lambda self: self.tasks)
    def update(self, data: st.DataObject, stored: bool) -> None:
        update = build_update(self.context, self.tasks[data.draw(st.sampled_from(sorted(self.tasks)))])
        self.apply(RequestDone(request=CheckRequest(update=update), result=ChangeSize()) if stored else update)

    @rule(data=st.data())
    @precondition(lambda self: self.tasks)
    def refuse(self, data: st.DataObject) -> None:
        task = self.tasks[data.draw(st.sampled_from(sorted(self.tasks)))]
        about: dict[str, Any] = {"task_id": task.task_id, "run_id": task.run_id, "round": task.round}
        self.apply(Refusal(client_id=task.client_id, reason="memory", detail="as told", available_bytes=None, **about))

    @rule()
    @precondition(lambda self: self.aggregate is not None)
    def aggregated(self) -> None:
        assert self.aggregate is not None
        aggregate, self.aggregate = self.aggregate, None
        assert len(aggregate.clients) <= self.settings.buffer
        result = AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={})
        self.apply(RequestDone(request=AggregationRequest(round=aggregate.round, clients=()), result=result))

    @rule()
    def a_round_goes_well(self) -> None:
        self.everyone_is_there()
        self.all_asked_get_tasks()
        for client in list(self.state.clients.values()):
            if client.task is not None and client.stage == "out":
                update = build_update(self.context, client.task)
                self.apply(RequestDone(request=CheckRequest(update=update), result=ChangeSize()))
        if self.aggregate is not None:
            self.aggregated()

    @rule(seconds=st.sampled_from([0.0, 1.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.apply(Tick())

    @rule()
    def restart(self) -> None:
        self.state = resume_state(self.context, reload_state(self.state, self.now_s))
        self.jobs.clear()
        self.aggregate = None
        for action in list_resume_actions(self.context, self.state):
            self.perform(action)

    @invariant()
    def clients_are_bounded_and_have_something_to_do(self) -> None:
        assert self.closed == list(range(1, self.state.aggregated_round + 1))
        if self.state.phase not in ("train", "aggregate", "waiting"):
            return
        ongoing = [client for client in self.state.clients.values() if client.open]
        assert len(ongoing) <= self.settings.concurrency
        done = sum(client.stage == "done" for client in self.state.clients.values())
        assert done <= self.settings.buffer
        for client in ongoing:
            if client.stage == "out":
                assert client.task is not None
                assert client.task.task_id in self.tasks
                assert client.client_id in self.state.live.begun_s
            elif self.state.phase == "train" and client.stage == "asked":
                assert self.asked[client.client_id].info.round == self.state.round
            elif self.state.phase == "train" and client.stage == "preparing":
                assert any(job.participant == client.participant for job in self.jobs)

    def teardown(self) -> None:
        """If no client answers any more, the deadlines end the run."""
        for _ in range(30):
            if self.state.phase in ("finished", "failed"):
                return
            self.time_passes(50.0)
            if self.aggregate is not None:
                self.aggregated()
        raise AssertionError(f"the run hangs in phase {self.state.phase}")


@pytest.mark.hypothesis
@pytest.mark.parametrize(("buffer", "concurrency"), [(1, 2), (2, 3), (5, 5), (3, 9)])
def test_random_events_keep_the_invariants(buffer: int, concurrency: int) -> None:
    class FleetOfSettings(Fleet):
        settings = AsynchronousSettings(buffer=buffer, concurrency=concurrency, max_staleness=2)

    run_state_machine_as_test(FleetOfSettings, settings=examples(3, stateful_step_count=50, deadline=None))
