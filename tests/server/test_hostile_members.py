"""After any sequence of valid messages from one member, the run goes on, and its records can be encoded."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast, get_args

import pytest
import sqlalchemy as sql
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from matrices import examples, mostly_long
from server.coordinator_cases import profile, telemetry
from server.hostile_cases import NUMBERS, distort, rename_parts, with_number
from server.random_cases import VARIANTS, answers, build_contexts, build_evaluation, build_update, declare_network
from server.test_coordinator_random import HELD_OUT, Fleet

from subfleet.journal.database import METADATA
from subfleet.journal.journal import Journal, begin_run
from subfleet.journal.rows import build_record
from subfleet.link.traffic import Traffic
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.messages import (
    Deployed,
    Evaluated,
    Message,
    Presence,
    Profile,
    Refusal,
    Scores,
    Task,
    Telemetry,
    Update,
    encode,
)
from subfleet.rounds.announcing import build_round_info
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import (
    Action,
    AggregationRequest,
    Close,
    CloseEvaluation,
    CloseGeneration,
    Event,
    FromDevice,
    RequestDone,
    SendTask,
    Tick,
)
from subfleet.rounds.weights import weigh_round
from subfleet.rounds.work import CheckRequest

pytestmark = pytest.mark.slow

EVE = "eve"
FEW = (
    *("heterofl", "oort", "dynamic_selection", "sattler", "fedtrans", "fedfa by scores", "fedadp by networks"),
    "fedoras by devices",
)
"""One for each kind of input that methods take from members: sizes, losses, budgets, scores, networks, paths."""
NUMERIC = ("oort", "dynamic_selection", "fedtrans", "fedfa by scores", "fedoras by devices")
"""Methods that use numbers from members."""
TEXTS = ("", "unknown", "x" * 600)
FEW_NUMBERS = (2**63 - 1, 5e-324, 1.7976931348623157e308)


class WithEve(Fleet):
    """A fleet with one more member, which sends any valid message; a journal saves every step."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = sql.create_engine("sqlite://")
        METADATA.create_all(self.engine)
        run_id = begin_run(self.engine, name="run", settings="{}", round_count=3)
        self.journal = Journal(self.engine, run_id, first_memory=self.context.roles.memory.initial)
        self.numbers = itertools.count()

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Take one step; that it is the same when repeated is tested with random events."""
        before = self.state
        self.state, actions = step(self.context, before, event, self.now_s)
        for action in actions:
            self.perform(action)
        close = next(
            (action for action in actions if isinstance(action, Close | CloseEvaluation | CloseGeneration)), None
        )
        record = None if close is None else build_record(self.context, close, Traffic())
        self.journal.save(before, self.state, close=close, record=record)
        if (info := build_round_info(self.context, self.state, self.now_s)) is not None:
            encode(info)
        return actions

    def perform(self, action: Action) -> None:
        super().perform(action)
        if isinstance(action, SendTask):
            encode(action.task)
        elif isinstance(action, AggregationRequest):
            weights = weigh_round(
                self.context.weigh(action.round), action.clients, self.context.config.max_client_fraction
            )
            assert 0.99 < sum(weight.share for weight in weights.values()) < 1.01

    def hear(self, data: st.DataObject, message: Message) -> None:
        distorted = data.draw(distort(self.with_message_id(message)))
        event(f"{message.KIND} {'is valid' if distorted is not None else 'is not valid'}")
        if distorted is not None:
            for _ in range(data.draw(st.integers(1, 2))):
                self.take(distorted)

    def with_message_id(self, message: Message) -> Message:
        return replace(message, message_id=f"eve.{next(self.numbers)}")

    def take(self, message: Message) -> None:
        assert isinstance(message, get_args(FromDevice))
        actions = self.apply(cast("FromDevice", message))
        accepted = "accepted" in answers(actions, message.message_id)
        if isinstance(message, Update):
            actions = self.apply(RequestDone(request=CheckRequest(update=message), result=ChangeSize()))
            if "accepted" in answers(actions, message.message_id):
                self.accepted[message.task_id] = message
        elif isinstance(message, Evaluated) and accepted:
            (self.accepted_scores if message.scores else self.accepted_evaluations).add(message.task_id)

    @rule(data=st.data(), life=st.integers(1, 2), online=st.booleans())
    def eve_comes_or_goes(self, data: st.DataObject, life: int, online: bool) -> None:
        self.hear(data, Presence(client_id=EVE, session_id=f"eve-{life}", online=online))

    @rule(data=st.data(), index=st.integers(0, 2))
    def eve_describes_herself(self, data: st.DataObject, index: int) -> None:
        self.hear(data, self.build_profile(index))

    def build_profile(self, index: int) -> Profile:
        shape, declared = self.context.config.model.input_shape, declare_network(self.context, index)
        return replace(profile(EVE), held_out_count=HELD_OUT, input_shape=shape, network=declared, macs_per_s=1e9)

    @rule(data=st.data())
    def eve_measures(self, data: st.DataObject) -> None:
        self.hear(data, self.build_telemetry())

    def build_telemetry(self) -> Telemetry:
        known = telemetry(self.context, EVE, max(self.state.round, 1), attempt=self.state.attempt)
        reading = replace(known.reading, downlink_bps=1e6, uplink_bps=1e6, latency_s=0.1)
        return replace(known, reading=reading, disk_budget_bytes=10**9)

    @rule(data=st.data(), kind=st.integers(0, 4), any_task=st.booleans())
    @precondition(lambda self: self.tasks)
    def eve_answers(self, data: st.DataObject, kind: int, any_task: bool) -> None:
        own = [task for task in self.tasks.values() if any_task or task.client_id == EVE]
        if own:
            task = data.draw(st.sampled_from(sorted(own, key=lambda task: task.task_id)))
            self.hear(data, ANSWERS[kind](self, task))

    @rule(data=st.data())
    def eve_takes_part(self, data: st.DataObject) -> None:
        """Take part until her answers are counted."""
        self.eve_comes_or_goes(data, 1, online=True)
        self.eve_describes_herself(data, 0)
        self.everyone_is_there()
        self.eve_measures(data)
        self.prepare_all()
        for task in [task for task in self.tasks.values() if task.client_id == EVE]:
            for answer in ANSWERS[:3]:
                self.hear(data, answer(self, task))

    def presence(self, name: str, life: int, online: bool) -> None:
        """Not a rule here: the others stay."""
        Fleet.presence(self, name, life, online)

    def telemetry(self, name: str, memory: int, back: int) -> None:
        """They always have enough memory."""

    def prepare(self, data: st.DataObject, planned: int, fails: int) -> None:
        """Their programs and weights are always made."""

    def refuse(self, data: st.DataObject, available: int | None) -> None:
        """They never refuse a task."""

    @rule(seconds=st.sampled_from([1.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.a_round_goes_well()
        self.now_s += seconds
        self.apply(Tick())

    def teardown(self) -> None:
        """The others bring the run to its end, whether she answers or not."""
        self.restart()
        for _ in range(60):
            if self.state.phase in ("finished", "failed"):
                break
            self.time_passes(11.0)
        assert self.state.phase == "finished", (self.state.phase, self.state.failure)
        assert len(self.journal.records()) == self.context.config.rounds
        self.engine.dispose()


def _update(machine: WithEve, task: Task) -> Update:
    return replace(build_update(machine.context, task), client_id=EVE)


def _evaluation(machine: WithEve, task: Task) -> Evaluated:
    return replace(build_evaluation(task, HELD_OUT), client_id=EVE)


def _scores(machine: WithEve, task: Task) -> Scores:
    scores = tuple(CandidateScore(score=float(index)) for index in range(max(len(task.programs), 1)))
    return Scores(
        task_id=task.task_id, run_id=task.run_id, round=task.round, client_id=EVE, scores=scores[:16], seconds=0.0
    )


def _refusal(machine: WithEve, task: Task) -> Refusal:
    return Refusal(
        task_id=task.task_id,
        run_id=task.run_id,
        round=task.round,
        client_id=EVE,
        reason="memory",
        detail="as told",
        available_bytes=10,
    )


def _deployed(machine: WithEve, task: Task) -> Deployed:
    return Deployed(task_id=task.task_id, run_id=task.run_id, client_id=EVE, files=())


ANSWERS: tuple[Callable[[WithEve, Task], Message], ...] = (_update, _evaluation, _scores, _refusal, _deployed)


@pytest.mark.parametrize("name", mostly_long(VARIANTS, *NUMERIC))
def test_one_number_wherever_it_is_valid_ends_no_run(name: str) -> None:
    _send_numbers(name, FEW_NUMBERS)


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_any_other_number_ends_no_run(name: str) -> None:
    _send_numbers(name, [number for number in NUMBERS if number not in FEW_NUMBERS])


def _send_numbers(name: str, numbers: Iterable[float]) -> None:
    """In one kind of message at a time: a member with an odd link may get no task that an odd pace could affect."""
    for number, distorted_kind in itertools.product(numbers, ("profile", "telemetry", "answer")):
        _take_part(name, lambda kind, message: [with_number(message, number) if kind == distorted_kind else message])  # noqa: B023


@pytest.mark.parametrize(
    ("name", "text"),
    # Each text in some test, and some text for each kind of input of a method.
    mostly_long(itertools.product(VARIANTS, TEXTS), *zip(FEW, itertools.cycle(TEXTS), strict=False)),
    ids=lambda value: "long" if len(value) > 99 else value or "empty",
)
def test_one_text_wherever_it_is_valid_ends_no_run(name: str, text: str) -> None:
    _take_part(name, lambda _, message: [*rename_parts(message, text), message])


def _take_part(name: str, list_variants: Callable[[str, Message], Iterable[Message]]) -> None:
    """Eve takes part in each round, with messages that are made of her regular ones."""
    context, _ = build_contexts(VARIANTS[name])
    fleet = _machine(context)

    def take(kind: str, message: Message) -> None:
        for variant in list_variants(kind, fleet.with_message_id(message)):
            fleet.take(variant)

    for _ in range(context.config.rounds + 1):
        fleet.take(Presence(client_id=EVE, session_id="eve-1", online=True))
        take("profile", fleet.build_profile(0))
        fleet.everyone_is_there()
        take("telemetry", fleet.build_telemetry())
        fleet.prepare_all()
        for task in [task for task in fleet.tasks.values() if task.client_id == EVE]:
            for answer in ANSWERS[:3]:
                take("answer", answer(fleet, task))
        fleet.a_round_goes_well()
    fleet.teardown()


def _machine(context: RunContext) -> WithEve:
    class OfContext(WithEve):
        every_context = (context,)

    return OfContext()


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", mostly_long(VARIANTS, *FEW))
def test_nothing_that_one_member_says_ends_a_run(name: str) -> None:
    class FleetOfMethod(WithEve):
        every_context = build_contexts(VARIANTS[name])

    run_state_machine_as_test(FleetOfMethod, settings=examples(4, stateful_step_count=40, deadline=None))
