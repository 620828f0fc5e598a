"""The clients that a phase waits for, and when and how it closes. Pure.

One rule closes every phase in which clients work (training, evaluation, scoring of paths):

- It is open as long as it waits for a client, see `list_awaited`, and at most until its deadline.
- Unless the run is strict, it closes earlier at the quorum: at least one client has done the work, and the clients that
  have answered are at least the fraction `Run.quorum` of these and the awaited clients. A refusal is an answer, since
  waiting longer would not change it.

Whether the phase waits for a client follows from its punctuality, see `live`. Until one client has answered, a training
waits for all clients until its deadline, since a round without an update is no round; an evaluation, which can be left
out, waits for extras as long as for clients that have missed one task.

A miss is a task that was sent and not answered in its time, for whatever reason. If no client has answered, perhaps the
server was unreachable: then no training is missed, and at most one evaluation in a row.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Literal

from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import PUNCTUAL, Duty, FleetMember, Punctuality
from subfleet.rounds.members import explain_away, has_left
from subfleet.rounds.signals import Outcome, Withdraw
from subfleet.rounds.state import ClientState, RunState

_SCORES_FRACTION = 0.5
"""Of a round's time: clients without scores by then are given a size that fits, and can still train."""
NO_SIZE = "no size was chosen for it in time"
"""Why a client is missing although it has answered: cost estimates or the search were not ready at the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DutyTerms:
    """The terms of one kind of duty in a phase.

    Attributes:
        name: name of the message that requests it.
        deadline: the field of `Deadlines` that ends it, counted from the beginning of the phase.
        share: the fraction of that deadline after which it ends.
        works: kinds of work that request it; empty if no task does.
        at_quorum: why a client's answer is missing if the phase has closed at its quorum.
    """

    name: str
    deadline: Literal["measure_s", "round_s", "evaluate_s"]
    share: float = 1.0
    works: tuple[type, ...] = ()
    at_quorum: str = ""


DUTY_TERMS: Mapping[Duty, DutyTerms] = MappingProxyType(
    {
        "telemetry": DutyTerms(name="announcement", deadline="measure_s", at_quorum="no telemetry came in time"),
        "training": DutyTerms(
            name="task",
            deadline="round_s",
            works=(Train, Calibrate),
            at_quorum="the round closed at its quorum",
        ),
        "scores": DutyTerms(name="score task", deadline="round_s", share=_SCORES_FRACTION, works=(Score,)),
        "evaluation": DutyTerms(
            name="evaluation task",
            deadline="evaluate_s",
            works=(Evaluate,),
            at_quorum="the evaluation closed at its quorum",
        ),
        "paths": DutyTerms(
            name="path score task",
            deadline="evaluate_s",
            works=(Evaluate,),
            at_quorum="the round of scoring closed at its quorum",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """The progress of a phase that collects answers.

    Attributes:
        late: whether its deadline is over.
        waits_for: the open client states that it waits for; in a strict run, which closes only without any, the first.
        closes: whether it waits for no client, or the quorum is reached.
    """

    late: bool
    waits_for: tuple[ClientState, ...]
    closes: bool


def get_limit_s(context: RunContext, duty: Duty) -> float:
    """The deadline of a duty, in seconds from the beginning of the phase."""
    work = DUTY_TERMS[duty]
    seconds: float = getattr(context.config.deadlines, work.deadline)
    return work.share * seconds


def collect(context: RunContext, state: RunState, duty: Duty, now_s: float) -> Collection:
    """The progress of the open phase; see the rule at the top of this module."""
    strict = context.config.strict
    late = now_s - state.live.entered_s >= get_limit_s(context, duty)
    waits_for = () if late else tuple(islice(list_awaited(context, state, duty, now_s), 1 if strict else None))
    done = sum(client.stage == "done" for client in state.clients.values())
    answered = done + sum(client.stage == "refused" for client in state.clients.values())
    quorum = not strict and done > 0 and answered >= context.config.quorum * (answered + len(waits_for))
    return Collection(late=late, waits_for=waits_for, closes=not waits_for or quorum)


def close_phase(context: RunContext, state: RunState, duty: Duty, collection: Collection, now_s: float) -> Outcome:
    """Close a phase: open clients are missing, each for its reason; their tasks are withdrawn and count as missed."""
    reasons = {
        name: NO_SIZE
        if client.stage == "answered"
        else explain_missing(context, state, name, duty, now_s, collection.late)
        for name, client in state.clients.items()
        if client.open
    }
    state, withdrawn = close_clients(state, reasons)
    return record_misses(state, duty, spared=(client.client_id for client in collection.waits_for)), withdrawn


def explain_missing(context: RunContext, state: RunState, client_id: str, duty: Duty, now_s: float, late: bool) -> str:
    """Why a client's answer is missing when the phase closes, and why the client is away, if it is.

    Args:
        context: the run context.
        state: the state before the miss is counted.
        client_id: the client's id.
        duty: the kind of duty.
        now_s: monotonic time.
        late: whether the deadline of the phase is over.
    """
    known = get_punctuality(state, client_id, duty)
    missed = f"it has not answered {name_last(known.missed, duty)}"
    if late:
        reason = "no telemetry came in time" if duty == "telemetry" else "no answer came in time"
    elif not known.missed:
        reason = DUTY_TERMS[duty].at_quorum
    elif not known.awaited:
        reason = f"{missed}, and the round does not wait for it"
    else:
        waited_s = known.patience_s(get_limit_s(context, duty))
        reason = f"no answer came in {waited_s:.3g} s; {missed}, and the round waits no longer"
    return add_absence(context, state, client_id, reason, now_s)


def drop_departed(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Close the client states of open clients that have said goodbye, see `members.has_left`."""
    found = ((name, state.live.members.get(name)) for name, client in state.clients.items() if client.open)
    departed = {name: member for name, member in found if member is not None and has_left(context, member, now_s)}
    if not departed:
        return state, ()
    return close_clients(state, {name: explain_away(context, departed[name], now_s) for name in sorted(departed)})


def close_clients(state: RunState, reasons: Mapping[str, str]) -> Outcome:
    """Mark these clients as missing, each for its reason, and withdraw their tasks."""
    closed = {name: replace(state.clients[name], stage="missing", reason=reason) for name, reason in reasons.items()}
    actions = tuple(Withdraw(task_id=client.task.task_id) for client in closed.values() if client.task is not None)
    return replace(state, clients=MappingProxyType({**state.clients, **closed})), actions


def add_absence(context: RunContext, state: RunState, client_id: str, reason: str, now_s: float) -> str:
    """The reason why a client is missing, and why the client is away, if it is."""
    member = state.live.members.get(client_id)
    away = "" if member is None else explain_away(context, member, now_s)
    return f"{reason}: {away}" if away else reason


def get_punctuality(state: RunState, client_id: str, duty: Duty) -> Punctuality:
    """The punctuality of a client; `PUNCTUAL` if it is unknown."""
    member = state.live.members.get(client_id)
    return PUNCTUAL if member is None else member.punctuality.get(duty, PUNCTUAL)


def find_sent_s(context: RunContext, state: RunState, client: ClientState, duty: Duty) -> float:
    """Monotonic time at which a client's task was sent: its deadline is the rest of the phase at that time.

    Without a task, the time at which the phase began. In asynchronous rounds, each client has its own time.
    """
    if (begun_s := state.live.begun_s.get(client.client_id)) is not None:
        return begun_s
    if client.task is None:
        return state.live.entered_s
    return state.live.entered_s + get_limit_s(context, duty) - client.task.deadline_s


def list_awaited(context: RunContext, state: RunState, duty: Duty, now_s: float) -> Iterator[ClientState]:
    """The open client states that the phase waits for before its deadline."""
    clients, scored = state.clients.values(), duty == "scores"
    answered = has_scores(state) if scored else _has_done(state)
    for client in clients:
        if not client.open or (scored and client.stage != "scoring"):
            continue
        known = get_punctuality(state, client.client_id, duty)
        punctual = not known.missed or (duty == "training" and not answered)
        if punctual or ((known.awaited or not answered) and _is_in_time(context, state, client, duty, now_s)):
            yield client


def _is_in_time(context: RunContext, state: RunState, client: ClientState, duty: Duty, now_s: float) -> bool:
    """Whether a client that has missed a task may still answer, or was not sent a task yet."""
    if client.task is None or client.stage != ("scoring" if duty == "scores" else "out"):
        return True
    patience_s = get_punctuality(state, client.client_id, duty).patience_s(get_limit_s(context, duty))
    return now_s - find_sent_s(context, state, client, duty) < patience_s


def has_scores(state: RunState) -> bool:
    """Whether a client has sent scores in the open round."""
    return any(client.proposals and client.stage in ("preparing", "out", "done") for client in state.clients.values())


def list_awaited_scores(context: RunContext, state: RunState, now_s: float) -> frozenset[str]:
    """The clients that the round waits for to send scores; for extras as long as others may still send theirs."""
    names = frozenset(client.client_id for client in list_awaited(context, state, "scores", now_s))
    scoring = (name for name, client in state.clients.items() if client.stage == "scoring")
    extras = frozenset(name for name in scoring if not get_punctuality(state, name, "scores").awaited)
    more = names - extras or any(client.stage == "answered" for client in state.clients.values())
    return names | extras if more else names


def list_awaited_models(context: RunContext, state: RunState, now_s: float) -> Iterator[ClientState]:
    """The open clients that the deploy phase waits for; briefly, if one has not answered its last training."""
    limit = context.config.deadlines.deploy_s
    for client in state.clients.values():
        known = get_punctuality(state, client.client_id, "training")
        if client.open and now_s - state.live.entered_s < replace(known, took_s=()).patience_s(limit):
            yield client


def record_answer(context: RunContext, state: RunState, client: ClientState, duty: Duty, now_s: float) -> RunState:
    """The state after an accepted answer of a client."""
    member = state.live.members.get(client.client_id)
    if member is None:
        return state
    members = {client.client_id: note_answer(context, state, member, client, duty, now_s)}
    return replace(state, live=replace(state.live, members=state.live.members.with_items(members)))


def note_answer(
    context: RunContext, state: RunState, member: FleetMember, client: ClientState, duty: Duty, now_s: float
) -> FleetMember:
    """The member after an accepted answer of its client."""
    took_s = now_s - find_sent_s(context, state, client, duty)
    known = member.punctuality.get(duty, PUNCTUAL).after_answer(took_s)
    return replace(member, punctuality=MappingProxyType({**member.punctuality, duty: known}))


def record_missing(state: RunState, names: Iterable[str], duty: Duty, *, most: int | None = None) -> RunState:
    """The state after these clients did not answer.

    Args:
        state: the state before.
        names: ids of the clients.
        duty: the kind of duty.
        most: the most misses in a row that this one may raise a client to; None is no limit.
    """
    known = {name: get_punctuality(state, name, duty) for name in names}
    fewer = {name: record for name, record in known.items() if most is None or record.missed < most}
    return _replace_punctuality(state, {name: record.after_miss() for name, record in fewer.items()}, duty)


def record_misses(state: RunState, duty: Duty, *, spared: Iterable[str] = ()) -> RunState:
    """The state after a phase has closed, with a miss for each task that was sent and not answered.

    Args:
        state: the state with the phase's client states.
        duty: the phase's kind of duty.
        spared: clients that the phase has not waited for to the end of their time, if it closed at its quorum.
    """
    done = _has_done(state)
    if duty == "training" and not done:
        return state
    excused = set(spared)
    names = [
        name
        for name, client in sorted(state.clients.items())
        if name not in excused
        and (client.open or client.stage == "missing")
        and client.task is not None
        and isinstance(client.task.work, DUTY_TERMS[duty].works)
    ]
    return record_missing(state, names, duty, most=None if done else 1)


def _has_done(state: RunState) -> bool:
    return any(client.stage == "done" for client in state.clients.values())


def _replace_punctuality(state: RunState, known: Mapping[str, Punctuality], duty: Duty) -> RunState:
    members = {
        name: replace(member, punctuality=MappingProxyType({**member.punctuality, duty: answered}))
        for name, answered in known.items()
        if (member := state.live.members.get(name)) is not None
    }
    live = replace(state.live, members=state.live.members.with_items(members))
    return replace(state, live=live) if members else state


def name_last(count: int, duty: Duty) -> str:
    """Name the last tasks of a kind, such as "its last 2 tasks"."""
    article, name = "the" if duty == "telemetry" else "its", DUTY_TERMS[duty].name
    return f"{article} last {name}" if count == 1 else f"{article} last {count} {name}s"
