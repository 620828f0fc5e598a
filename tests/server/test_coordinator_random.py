"""The coordinator under random sequences of events, restarts included."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from matrices import examples
from server.coordinator_cases import CLIENTS, perform_search, profile, score_generation, telemetry
from server.random_cases import (
    VARIANTS,
    answers,
    build_contexts,
    build_evaluation,
    build_scores,
    build_update,
    complete_request,
    declare_network,
    evolve_lineages,
    reload_state,
)

from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.messages import Deployed, Presence, Refusal, Scores, Task, Update
from subfleet.rounds import work
from subfleet.rounds.announcing import build_round_info
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.networks import find_standing, list_living_lineages
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import (
    Action,
    AggregationRequest,
    Close,
    CloseEvaluation,
    CloseGeneration,
    Event,
    Messages,
    Request,
    RequestDone,
    RequestFailed,
    SendTask,
    Tick,
)
from subfleet.rounds.sizing import list_lacking
from subfleet.rounds.state import RunState

pytestmark = pytest.mark.slow
HELD_OUT = 10
names = st.sampled_from(CLIENTS)


class Fleet(RuleBasedStateMachine):
    every_context: Sequence[RunContext]

    def __init__(self) -> None:
        super().__init__()
        self.context = self.every_context[0]
        self.state = RunState()
        self.now_s = 0.0
        self.jobs: list[Request] = []
        self.seen: dict[work.SearchRequest | work.NetworksRequest | work.GenerationRequest, RunState] = {}
        self.tasks: dict[str, Task] = {}
        self.aggregate: AggregationRequest | None = None
        self.accepted: dict[str, Update] = {}  # by task id
        self.counted: dict[str, int] = {}  # task id to round
        self.closed: list[int] = []
        self.accepted_evaluations = set[str]()  # task ids
        self.evaluations: dict[int, set[str]] = {}  # recorded task ids by round
        self.accepted_scores = set[str]()  # task ids
        self.generations: list[CloseGeneration] = []

    def apply(self, event: Event) -> tuple[Action, ...]:
        before = self.state
        self.state, actions = step(self.context, before, event, self.now_s)
        assert step(self.context, before, event, self.now_s) == (self.state, actions)
        for action in actions:
            self.perform(action)
        return actions

    def perform(self, action: Action) -> None:
        if isinstance(action, AggregationRequest):
            self.aggregate = action
        elif isinstance(action, Request) and not isinstance(action, work.CheckRequest):
            self.jobs.append(action)
            if isinstance(action, work.SearchRequest | work.NetworksRequest | work.GenerationRequest):
                self.seen[action] = self.state
        elif isinstance(action, SendTask):
            assert self.tasks.setdefault(action.task.task_id, action.task) == action.task, "sent again unchanged"
            if action.task.work.TYPE != "deploy":
                assert action.task.planned_peak_bytes <= action.task.budget.memory_bytes
        elif isinstance(action, Close):
            self.closed.append(action.round)
        elif isinstance(action, CloseEvaluation):
            done = {client.task.task_id for client in action.clients if client.stage == "done" and client.task}
            assert action.round not in self.evaluations
            self.evaluations[action.round] = done
            assert not any(client.open for client in action.clients)
        elif isinstance(action, CloseGeneration):
            self.generations.append(action)

    @rule(index=st.integers(0, 1))
    @precondition(lambda self: self.state == RunState())
    def choose(self, index: int) -> None:
        self.context = self.every_context[index]

    @rule(name=names, life=st.integers(1, 2), online=st.booleans())
    def presence(self, name: str, life: int, online: bool) -> None:
        self.apply(Presence(client_id=name, session_id=f"{name}-{life}", online=online))

    @rule(name=names, index=st.integers(0, 2))
    def profile(self, name: str, index: int = 0) -> None:
        shape = self.context.config.model.input_shape
        network = declare_network(self.context, index)
        self.apply(replace(profile(name), held_out_count=HELD_OUT, input_shape=shape, network=network))

    @rule(name=names, memory=st.sampled_from([10, 3000, 14_000, 10**9]), back=st.integers(0, 1))
    def telemetry(self, name: str, memory: int, back: int) -> None:
        number = max(self.state.round - back, 1)
        self.apply(telemetry(self.context, name, number, memory, attempt=self.state.attempt))

    @rule()
    def everyone_is_there(self) -> None:
        for name in CLIENTS:
            self.presence(name, 1, online=True)
            self.profile(name, CLIENTS.index(name))
        number, attempt = max(self.state.round, 1), self.state.attempt
        self.apply(Messages(messages=tuple(telemetry(self.context, name, number, attempt=attempt) for name in CLIENTS)))

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

    def finish_job(self, job: Request, planned: int, fails: bool) -> None:
        self.jobs.remove(job)
        if fails and not isinstance(job, work.ScoringRequest):
            self.apply(RequestFailed(request=job, reason="no"))
        else:
            self.apply(self.complete(job, planned, fails))

    def complete(self, job: Request, planned: int, fails: bool) -> RequestDone:
        if isinstance(job, work.GenerationRequest):
            return RequestDone(request=job, result=score_generation(self.context, self.seen[job]))
        if isinstance(job, work.SearchRequest | work.NetworksRequest):
            return perform_search(self.context, self.seen[job], job)
        assert not isinstance(job, work.CheckRequest | AggregationRequest)
        return complete_request(job, planned, fails)

    @rule(data=st.data(), stored=st.booleans())
    @precondition(lambda self: self.tasks)
    def update(self, data: st.DataObject, stored: bool) -> None:
        self.answer(data.draw(st.sampled_from(sorted(self.tasks.values(), key=lambda known: known.task_id))), stored)

    @rule()
    def answer_all(self) -> None:
        for task in list(self.tasks.values()):
            self.answer(task, stored=True)

    def answer(self, task: Task, stored: bool) -> None:
        update = build_update(self.context, task)
        self.apply(Tick())  # as in `say`
        clients = self.state.clients
        actions = self.apply(
            RequestDone(request=work.CheckRequest(update=update), result=ChangeSize()) if stored else update
        )
        statuses = answers(actions, update.message_id)
        assert len(statuses) + sum(isinstance(action, work.CheckRequest) for action in actions) == 1
        if "accepted" in statuses:
            assert task.task_id not in self.accepted, "no update is counted twice"
            assert clients[task.client_id].task == task
            self.accepted[task.task_id] = update
        elif not stored:
            assert self.state.clients == clients

    @rule(data=st.data(), odd=st.booleans())
    @precondition(lambda self: self.tasks)
    def evaluate(self, data: st.DataObject, odd: bool) -> None:
        task = data.draw(st.sampled_from(sorted(self.tasks.values(), key=lambda known: known.task_id)))
        self.find(task, HELD_OUT + odd)

    def find(self, task: Task, samples: int) -> None:
        """Answer a task with an evaluation: it counts once, and not if it is impossible."""
        self.apply(Tick())  # as in `say`
        evaluation, clients = build_evaluation(task, samples), self.state.clients
        (status,) = answers(self.apply(evaluation), evaluation.message_id)
        if status == "accepted":
            accepted_ids = self.accepted_scores if evaluation.scores else self.accepted_evaluations
            assert task.task_id not in accepted_ids
            assert (task.work.TYPE, samples) == ("evaluate", HELD_OUT)
            accepted_ids.add(task.task_id)
        elif self.state.phase in ("evaluate", "search"):
            assert self.state.clients == clients

    @rule(data=st.data(), missing=st.booleans(), short=st.sampled_from([0, 0, 0, 1]))
    @precondition(lambda self: self.tasks)
    def score(self, data: st.DataObject, missing: bool, short: int) -> None:
        task = data.draw(st.sampled_from(sorted(self.tasks.values(), key=lambda known: known.task_id)))
        candidate_score = CandidateScore(score=None, reason="no") if missing else CandidateScore(score=1.0)
        self.say(task, build_scores(task, (candidate_score,) * max(len(task.programs) - short, 1)))

    @rule()
    def score_all(self) -> None:
        for task in list(self.tasks.values()):
            self.say(task, build_scores(task))

    def say(self, task: Task, scores: Scores) -> None:
        self.apply(Tick())  # actions due since a restart come first
        clients = self.state.clients
        actions = self.apply(scores)
        (status,) = answers(actions, scores.message_id)
        if status == "accepted":
            assert (clients[task.client_id].stage, clients[task.client_id].task) == ("scoring", task)
            assert self.state.clients[task.client_id].stage in ("preparing", "skipped")
        else:
            assert self.state.clients == clients

    @rule(data=st.data(), available=st.sampled_from([None, 10, 12_000]))
    @precondition(lambda self: self.tasks)
    def refuse(self, data: st.DataObject, available: int | None) -> None:
        task = data.draw(st.sampled_from(sorted(self.tasks.values(), key=lambda known: known.task_id)))
        refusal = Refusal(
            task_id=task.task_id,
            run_id=task.run_id,
            round=task.round,
            client_id=task.client_id,
            reason="memory",
            detail="as told",
            available_bytes=available,
        )
        before, lacks = self.state, self.state.phase == "train" and list_lacking(self.context, self.state)
        statuses = answers(self.apply(refusal), refusal.message_id)
        if lacks and not statuses:
            assert self.state.clients == before.clients, "an unanswered message changes nothing, since it is sent again"
        else:
            assert len(statuses) == 1

    @rule(data=st.data())
    @precondition(lambda self: self.tasks)
    def report(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.tasks.values(), key=lambda known: known.task_id)))
        deployed = Deployed(task_id=task.task_id, run_id=task.run_id, client_id=task.client_id, files=())
        self.apply(deployed)

    @rule()
    @precondition(lambda self: self.aggregate is not None)
    def aggregated(self) -> None:
        assert self.aggregate is not None
        aggregate, self.aggregate = self.aggregate, None
        for client in aggregate.clients:
            assert client.update is not None
            assert self.accepted[client.update.task_id] == client.update
            assert self.counted.setdefault(client.update.task_id, aggregate.round) == aggregate.round
        observation, lineages = evolve_lineages(self.context, aggregate)
        result = work.AggregatedRound(
            accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}, observation=observation, lineages=lineages
        )
        self.apply(RequestDone(request=AggregationRequest(round=aggregate.round, clients=()), result=result))
        accepted = {name for name, update in self.accepted.items() if update.round == aggregate.round}
        assert accepted == {client.task.task_id for client in aggregate.clients if client.task is not None}

    @rule()
    def a_round_goes_well(self) -> None:
        """Complete a whole round, so that later rounds are reached often."""
        self.everyone_is_there()
        for _ in range(2):  # scoring, then training
            self.prepare_all()
            for task in self.open_tasks():
                self.say(task, build_scores(task))
        self.prepare_all()
        for task in self.open_tasks():
            self.answer(task, stored=True)
        if self.aggregate is not None:
            self.aggregated()
        while self.state.phase in ("evaluate", "search") and self.jobs:
            self.prepare_all()
            for task in self.open_tasks():
                self.find(task, HELD_OUT)

    def open_tasks(self) -> list[Task]:
        """Return the tasks at which clients are; other rules answer older ones."""
        return [client.task for client in self.state.clients.values() if client.task is not None and client.open]

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.apply(Tick())

    @rule()
    def restart(self) -> None:
        """Restart the server with the state that the journal keeps."""
        self.state = reload_state(self.state, self.now_s)
        self.jobs.clear()
        self.aggregate = None
        for action in list_resume_actions(self.context, self.state):
            self.perform(action)
        if self.state.phase == "search":
            self.apply(Tick())

    @invariant()
    def one_open_round(self) -> None:
        assert self.state.aggregated_round <= self.state.round <= self.state.aggregated_round + 1
        assert self.closed == list(range(1, len(self.closed) + 1))
        assert len(self.closed) == self.state.aggregated_round <= self.context.config.rounds
        info = build_round_info(self.context, self.state, self.now_s)
        assert info is None or info.round == self.state.round

    @invariant()
    def evaluations_are_recorded_once(self) -> None:
        for number, done in self.evaluations.items():
            assert done == {name for name in self.accepted_evaluations if f"/r{number}/" in name}
        recorded = {record.task_id for record in self.state.evaluated.values()}
        assert recorded <= set[str]().union(*self.evaluations.values())

    @invariant()
    def a_search_scores_each_path_once_and_counts_no_score_twice(self) -> None:
        """A server restarted in a search continues after the last generation, and has lost only open scores."""
        assert [close.generation.number for close in self.generations] == list(range(1, len(self.generations) + 1))
        paths = [path for close in self.generations for path in close.generation.paths]
        assert len(paths) == len(set(paths))
        answer_counts = [close.devices.answers for close in self.generations if close.devices is not None]
        assert sum(answer_counts) <= len(self.accepted_scores)
        if self.state.phase == "search":
            assert self.state.generations == len(self.generations)
            assert self.state.live.scores is not None or any(
                isinstance(job, work.GenerationRequest) for job in self.jobs
            )

    @invariant()
    def no_retired_network_is_in_use(self) -> None:
        in_use = {lineage.id for lineage in list_living_lineages(self.context, self.state)}
        assert in_use
        if self.state.phase == "train":
            assigned = {
                client.architecture.network for client in self.state.clients.values() if client.architecture is not None
            }
            assert assigned <= in_use
        assert {written.program.size.network for written in self.state.written.values()} <= in_use
        assert {queued.size.network for queued in self.state.queue} <= in_use
        for client in self.state.last.values():
            successor = find_standing(self.context, self.state, client)
            if successor is None:  # no client has a network of its own before a supernet has been searched
                assert self.context.network.choices
                assert not self.state.lineages
            else:
                assert successor.architecture.network in in_use

    @invariant()
    def every_open_client_has_pending_work(self) -> None:
        """Every open client has a pending job or a task, so that the run waits only for devices and deadlines."""
        lacks = self.state.phase == "train" and list_lacking(self.context, self.state)
        for client in self.state.clients.values():
            if lacks and client.stage in ("preparing", "answered"):
                assert any(isinstance(job, work.CostRequest | work.SearchRequest) for job in self.jobs)
            elif client.stage == "preparing":
                assert any(getattr(job, "participant", None) == client.participant for job in self.jobs)
            elif client.stage == "answered":
                assert self.state.phase == "measure", "every client that can be assigned a size has one"
            if client.stage == "scoring" and client.task is None:
                assert any(
                    isinstance(job, work.ScoringRequest) and job.client_id == client.client_id for job in self.jobs
                )
            if client.stage == "out" or (client.stage == "scoring" and client.task is not None):
                assert client.task is not None
                assert client.task.task_id in self.tasks
        assert (self.state.phase == "aggregate") == (self.aggregate is not None)

    def teardown(self) -> None:
        """If no client answers any more, the deadlines end the run."""
        event(f"{self.state.phase} after {self.state.aggregated_round} rounds with {len(self.accepted)} updates")
        event(f"{len(list_living_lineages(self.context, self.state))} networks")
        for _ in range(20):
            if self.state.phase in ("finished", "failed"):
                return
            self.time_passes(50.0)
            if self.aggregate is not None:
                self.aggregated()
            for job in [job for job in self.jobs if isinstance(job, work.GenerationRequest)]:
                self.finish_job(job, 0, False)
        raise AssertionError(f"the run hangs in phase {self.state.phase}")


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", VARIANTS)
def test_random_events_keep_the_invariants(name: str) -> None:
    class FleetOfMethod(Fleet):
        every_context = build_contexts(VARIANTS[name])

    run_state_machine_as_test(FleetOfMethod, settings=examples(4, stateful_step_count=50, deadline=None))
