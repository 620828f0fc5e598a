"""The coordinator under random sequences of events, restarts included."""

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from server.coordinator_cases import CLIENTS, blob, measured, plan_of, profile, telemetry

from subfleet.methods.fedfa import FedFA
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.messages import Deployed, Presence, Refusal, Scores, Task, Update
from subfleet.protocol.programs import ProgramRef
from subfleet.rounds.actions import Action, Close, Fetch, Fold, Prepare, PrepareModels, PrepareScoring, Reply, SendTask
from subfleet.rounds.coordinator import resume_actions, round_info, step
from subfleet.rounds.events import (
    DeployPrepared,
    Event,
    Folded,
    Heard,
    Measured,
    Prepared,
    PrepareFailed,
    Profiled,
    Refused,
    Reported,
    Scorable,
    Scored,
    ScoringPrepared,
    Tick,
    UpdateOffered,
    UpdateStored,
)
from subfleet.rounds.state import Member, Plan, RunState
from subfleet.settings.timing import Deadlines

pytestmark = pytest.mark.slow

names = st.sampled_from(CLIENTS)
PLANS = tuple(
    plan_of(
        rounds=2,
        min_clients=2,
        quorum=quorum,
        method=method,
        deadlines=Deadlines(join_s=40, measure_s=10, round_s=30, deploy_s=20, lease_s=15, linger_s=0),
    )
    for method in (HeteroFL(), FedFA(choice="score"))
    for quorum in (1.0, 0.5)
)


Job = Prepare | PrepareScoring | PrepareModels


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.plan = PLANS[0]
        self.state = RunState()
        self.now_s = 0.0
        self.jobs: list[Job] = []
        self.tasks: dict[str, Task] = {}
        self.fold: Fold | None = None
        self.accepted: dict[str, Update] = {}  # by task
        self.counted: dict[str, int] = {}  # task to round
        self.closed: list[int] = []

    def apply(self, event: Event) -> tuple[Action, ...]:
        before = self.state
        self.state, actions = step(self.plan, before, event, self.now_s)
        assert step(self.plan, before, event, self.now_s) == (self.state, actions)
        for action in actions:
            self.perform(action)
        return actions

    def perform(self, action: Action) -> None:
        if isinstance(action, Job):
            self.jobs.append(action)
        elif isinstance(action, SendTask):
            known = self.tasks.setdefault(action.task.task_id, action.task)
            assert known == action.task, "a task is sent again unchanged"
            if action.task.work != "deploy":
                assert action.task.planned_peak_bytes <= action.task.budget.memory_bytes
        elif isinstance(action, Fold):
            self.fold = action
        elif isinstance(action, Close):
            self.closed.append(action.round)

    @rule(plan=st.sampled_from(PLANS))
    @precondition(lambda self: self.state == RunState())
    def choose(self, plan: Plan) -> None:
        self.plan = plan

    @rule(name=names, life=st.integers(1, 2), online=st.booleans())
    def presence(self, name: str, life: int, online: bool) -> None:
        self.apply(Heard(presence=Presence(client_id=name, session_id=f"{name}-{life}", online=online)))

    @rule(name=names)
    def profile(self, name: str) -> None:
        self.apply(Profiled(profile=profile(name)))

    @rule(name=names, memory=st.sampled_from([10, 3000, 14_000, 10**9]), back=st.integers(0, 1))
    def telemetry(self, name: str, memory: int, back: int) -> None:
        number = max(self.state.round - back, 1)
        self.apply(Measured(telemetry=telemetry(self.plan, name, number, memory, retry=self.state.retry)))

    @rule()
    def everyone_is_there(self) -> None:
        for name in CLIENTS:
            self.presence(name, 1, online=True)
            self.profile(name)
            self.apply(measured(self.plan, name, max(self.state.round, 1), retry=self.state.retry))

    @rule(
        data=st.data(),
        planned=st.sampled_from([1000, 1000, 12_000, 20_000, 10**10]),
        fails=st.sampled_from([0, 0, 0, 1]),
    )
    @precondition(lambda self: self.jobs)
    def prepare(self, data: st.DataObject, planned: int, fails: int) -> None:
        self.finish_job(self.jobs[data.draw(st.integers(0, len(self.jobs) - 1))], planned, bool(fails))

    @rule()
    def prepare_all(self) -> None:
        while self.jobs:
            self.finish_job(self.jobs[0], 1000, False)

    def finish_job(self, job: Job, planned: int, fails: bool) -> None:
        self.jobs.remove(job)
        program = ProgramRef(program_id="p", target="onnx", blob=blob("p"))
        if isinstance(job, PrepareScoring):
            made = [
                Scorable(size=size, program=program, weights=blob("f"), planned_peak_bytes=planned)
                for size in job.sizes[fails:]
            ]
            self.apply(ScoringPrepared(client_id=job.client_id, round=job.round, candidates=tuple(made)))
        elif fails:
            attempt = job.attempt if isinstance(job, Prepare) else 0
            self.apply(PrepareFailed(client_id=job.client_id, round=job.round, attempt=attempt, reason="no"))
        elif isinstance(job, PrepareModels):
            self.apply(DeployPrepared(client_id=job.client_id, programs=(program,), models=()))
        else:
            self.apply(
                Prepared(
                    client_id=job.client_id,
                    round=job.round,
                    attempt=job.attempt,
                    size_id=job.participant.size.spec_id,
                    program=program,
                    weights=blob(f"w{job.participant.size.spec_id}"),
                    planned_peak_bytes=planned,
                )
            )

    @rule(data=st.data(), stored=st.booleans())
    @precondition(lambda self: self.tasks)
    def update(self, data: st.DataObject, stored: bool) -> None:
        self.answer(data.draw(st.sampled_from(sorted(self.tasks.values(), key=lambda one: one.task_id))), stored)

    @rule()
    def answer_all(self) -> None:
        for task in list(self.tasks.values()):
            self.answer(task, stored=True)

    def answer(self, task: Task, stored: bool) -> None:
        update = Update(
            task_id=task.task_id,
            run_id=task.run_id,
            round=task.round,
            client_id=task.client_id,
            blob=blob(task.task_id),
            sample_count=5,
            step_count=1,
            loss=1.0,
            accuracy=0.5,
            measured_peak_bytes=1,
            train_seconds=0.0,
            seconds=0.0,
        )
        seats = self.state.seats
        actions = self.apply(UpdateStored(update=update) if stored else UpdateOffered(update=update))
        statuses = answers(actions, update.message_id)
        assert len(statuses) + sum(isinstance(action, Fetch) for action in actions) == 1
        if "accepted" in statuses:
            assert task.task_id not in self.accepted, "no update is counted twice"
            assert seats[task.client_id].task == task
            self.accepted[task.task_id] = update
        elif not stored:
            assert self.state.seats == seats

    @rule(data=st.data(), missing=st.booleans(), short=st.sampled_from([0, 0, 0, 1]))
    @precondition(lambda self: self.tasks)
    def score(self, data: st.DataObject, missing: bool, short: int) -> None:
        task = data.draw(st.sampled_from(sorted(self.tasks.values(), key=lambda one: one.task_id)))
        found = CandidateScore(score=None, reason="no") if missing else CandidateScore(score=1.0)
        self.say(task, (found,) * max(len(task.programs) - short, 1))

    @rule()
    def score_all(self) -> None:
        for task in list(self.tasks.values()):
            self.say(task, tuple(CandidateScore(score=float(place)) for place in range(len(task.programs))))

    def say(self, task: Task, found: tuple[CandidateScore, ...]) -> None:
        scores = Scores(
            task_id=task.task_id,
            run_id=task.run_id,
            round=task.round,
            client_id=task.client_id,
            scores=found,
            seconds=0.0,
        )
        seats = self.state.seats
        actions = self.apply(Scored(scores=scores))
        (status,) = answers(actions, scores.message_id)
        if status == "accepted":
            assert (seats[task.client_id].stage, seats[task.client_id].task) == ("scoring", task)
            assert self.state.seats[task.client_id].stage in ("preparing", "skipped")
        else:
            assert self.state.seats == seats

    @rule(data=st.data(), available=st.sampled_from([None, 10, 12_000]))
    @precondition(lambda self: self.tasks)
    def refuse(self, data: st.DataObject, available: int | None) -> None:
        task = data.draw(st.sampled_from(sorted(self.tasks.values(), key=lambda one: one.task_id)))
        refusal = Refusal(
            task_id=task.task_id,
            run_id=task.run_id,
            round=task.round,
            client_id=task.client_id,
            reason="memory",
            detail="as told",
            available_bytes=available,
        )
        actions = self.apply(Refused(refusal=refusal))
        assert len(answers(actions, refusal.message_id)) == 1

    @rule(data=st.data())
    @precondition(lambda self: self.tasks)
    def report(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.tasks.values(), key=lambda one: one.task_id)))
        report = Deployed(task_id=task.task_id, run_id=task.run_id, client_id=task.client_id, files=())
        self.apply(Reported(deployed=report))

    @rule()
    @precondition(lambda self: self.fold is not None)
    def folded(self) -> None:
        assert self.fold is not None
        fold, self.fold = self.fold, None
        for seat in fold.seats:
            assert seat.result is not None
            assert self.accepted[seat.result.task_id] == seat.result
            assert self.counted.setdefault(seat.result.task_id, fold.round) == fold.round
        self.apply(Folded(round=fold.round, accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}))
        accepted = {name for name, update in self.accepted.items() if update.round == fold.round}
        assert accepted == {seat.task.task_id for seat in fold.seats if seat.task is not None}

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.apply(Tick())

    @rule()
    def restart(self) -> None:
        """What survives is what the journal keeps."""
        members = {
            name: Member(profile=member.profile) for name, member in self.state.members.items() if member.profile
        }
        self.state = replace(self.state, members=MappingProxyType(members), entered_s=self.now_s, opened_s=self.now_s)
        self.jobs.clear()
        self.fold = None
        for action in resume_actions(self.plan, self.state):
            self.perform(action)

    @invariant()
    def one_open_round(self) -> None:
        assert self.state.folded_round <= self.state.round <= self.state.folded_round + 1
        assert self.closed == list(range(1, len(self.closed) + 1))
        assert len(self.closed) == self.state.folded_round <= self.plan.config.rounds
        info = round_info(self.plan, self.state, self.now_s)
        assert info is None or info.round == self.state.round

    @invariant()
    def what_is_awaited_is_under_way(self) -> None:
        """Every open seat has a job at work or a task out, so that only devices and deadlines are waited for."""
        for seat in self.state.seats.values():
            if seat.stage == "preparing":
                assert any(getattr(job, "participant", None) == seat.participant for job in self.jobs)
            if seat.stage == "scoring" and seat.task is None:
                assert any(isinstance(job, PrepareScoring) and job.client_id == seat.client_id for job in self.jobs)
            if seat.stage == "out" or (seat.stage == "scoring" and seat.task is not None):
                assert seat.task is not None
                assert seat.task.task_id in self.tasks
        assert (self.state.phase == "fold") == (self.fold is not None)

    def teardown(self) -> None:
        """With nobody answering any more, deadlines alone bring the run to its end."""
        event(f"{self.state.phase} after {self.state.folded_round} rounds with {len(self.accepted)} updates")
        for _ in range(20):
            if self.state.phase in ("finished", "failed"):
                return
            self.time_passes(50.0)
            if self.fold is not None:
                self.folded()
        raise AssertionError(f"the run waits for ever in phase {self.state.phase}")


def answers(actions: tuple[Action, ...], message_id: str) -> list[str]:
    """What a message was answered; the step may tell the client besides that it is skipped."""
    replies = (action for action in actions if isinstance(action, Reply))
    return [reply.receipt.status for reply in replies if reply.receipt.of == message_id]


def test_random_events_keep_the_invariants() -> None:
    run_state_machine_as_test(Fleet, settings=settings(max_examples=100, stateful_step_count=60, deadline=None))
