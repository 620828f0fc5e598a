"""What a phase asks of clients, for whose answers it waits, and when and how it closes. Pure.

One rule closes every phase in which clients work (training, evaluation, scoring of paths):

- It is open as long as it waits for somebody, see `list_awaited`, and at most until its deadline.
- Unless the run is strict, it closes before that at the quorum: somebody has done the work, and the clients that have
  answered are at least `Run.quorum` of them and those that are waited for. A refusal is an answer: the client will not
  do the work, however long the others wait.

Who is waited for follows from what is remembered of each client, see `live`. As long as nobody has answered, a
training waits for everybody until its deadline, since a round without an update is no round; an evaluation, which can
be left out, waits for extras as long as for those that have missed one task.

A miss is a task that was sent and not answered by the end of its time, whatever the reason. Where nobody has answered,
it may be the server that was not heard: then no training is missed, and of an evaluation no more than one in a row.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Literal

from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import DUTIES, EXTRA_FROM, PUNCTUAL, Duty, FleetMember, Punctuality
from subfleet.rounds.members import explain_away, has_left, list_expected
from subfleet.rounds.signals import Outcome, Withdraw
from subfleet.rounds.state import ClientState, RunState

_SCORES_FRACTION = 0.5
"""Of a round's time: who has not told scores by then is given what fits without them, and can still train."""
NO_SIZE = "no size was chosen for it in time"
"""Why a client is missing that has answered: what is needed to choose one was not made before the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DutyTerms:
    """What clients are asked for in a phase, or in a part of it.

    Attributes:
        name: of the message that asks for it.
        deadline: the field of `Deadlines` that ends it, counted from the beginning of the phase.
        share: of that deadline, after which it ends.
        works: kinds of the tasks that ask for it; empty where no task does.
        at_quorum: why a client's answer is missing where the phase has closed at its quorum.
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
    """How far a phase is with the answers that it collects.

    Attributes:
        late: its deadline is over.
        waits_for: the open client states that it waits for; of a strict run, which closes without any, the first.
        closes: nothing more is waited for, or the quorum is there.
    """

    late: bool
    waits_for: tuple[ClientState, ...]
    closes: bool


def get_limit_s(context: RunContext, duty: Duty) -> float:
    """The deadline of a kind of task, in seconds from the beginning of the phase."""
    work = DUTY_TERMS[duty]
    seconds: float = getattr(context.config.deadlines, work.deadline)
    return work.share * seconds


def collect(context: RunContext, state: RunState, duty: Duty, now_s: float) -> Collection:
    """How far the open phase is; see the rule at the top of this module."""
    strict = context.config.strict
    late = now_s - state.live.entered_s >= get_limit_s(context, duty)
    waits_for = () if late else tuple(islice(list_awaited(context, state, duty, now_s), 1 if strict else None))
    done = sum(client.stage == "done" for client in state.clients.values())
    answered = done + sum(client.stage == "refused" for client in state.clients.values())
    quorum = not strict and done > 0 and answered >= context.config.quorum * (answered + len(waits_for))
    return Collection(late=late, waits_for=waits_for, closes=not waits_for or quorum)


def close_phase(context: RunContext, state: RunState, duty: Duty, collection: Collection, now_s: float) -> Outcome:
    """The state in which open clients are missing, each for its reason, and their tasks withdrawn and missed."""
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
    """Why a client's answer is missing when the phase closes, and where it is away, why that is so.

    Args:
        context: of the run.
        state: before the miss is counted.
        client_id: of the client.
        duty: what it was asked for.
        now_s: monotonic time.
        late: the deadline of the phase is over.
    """
    reason = _explain_closed(context, state, client_id, duty)
    if late:
        reason = "no telemetry came in time" if duty == "telemetry" else "no answer came in time"
    return add_absence(context, state, client_id, reason, now_s)


def drop_departed(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """The state in which open clients that have said goodbye are missing, see `members.has_left`."""
    members = state.live.members
    gone = (name for name, member in members.items() if has_left(context, member, now_s))
    left = [name for name in sorted(gone) if (client := state.clients.get(name)) is not None and client.open]
    return (
        close_clients(state, {name: explain_away(context, members[name], now_s) for name in left})
        if left
        else (state, ())
    )


def close_clients(state: RunState, reasons: Mapping[str, str]) -> Outcome:
    """The state in which these clients are missing, each for its reason, and their tasks withdrawn."""
    closed = {name: replace(state.clients[name], stage="missing", reason=reason) for name, reason in reasons.items()}
    actions = tuple(Withdraw(task_id=client.task.task_id) for client in closed.values() if client.task is not None)
    return replace(state, clients=MappingProxyType({**state.clients, **closed})), actions


def add_absence(context: RunContext, state: RunState, client_id: str, reason: str, now_s: float) -> str:
    """A reason why a client is missing, and where it is away, why that is so."""
    member = state.live.members.get(client_id)
    away = "" if member is None else explain_away(context, member, now_s)
    return f"{reason}: {away}" if away else reason


def get_punctuality(state: RunState, client_id: str, duty: Duty) -> Punctuality:
    """How a client has answered lately; `PUNCTUAL` of one that nothing is known of."""
    member = state.live.members.get(client_id)
    return PUNCTUAL if member is None else member.punctuality.get(duty, PUNCTUAL)


def find_sent_s(context: RunContext, state: RunState, client: ClientState, duty: Duty) -> float:
    """Monotonic time at which a client state's task was sent: its deadline is what was left of the phase then."""
    limit = get_limit_s(context, duty)
    return state.live.entered_s + limit - (limit if client.task is None else client.task.deadline_s)


def list_awaited(context: RunContext, state: RunState, duty: Duty, now_s: float) -> Iterator[ClientState]:
    """The open client states that the phase waits for, as long as its deadline is not over."""
    clients, scored = state.clients.values(), duty == "scores"
    others = has_scores(state) if scored else _has_done(state)
    for client in clients:
        if not client.open or (scored and client.stage != "scoring"):
            continue
        known = get_punctuality(state, client.client_id, duty)
        everyone = duty == "training" and not others
        if (
            not known.missed
            or everyone
            or ((known.awaited or not others) and _is_in_time(context, state, client, duty, now_s))
        ):
            yield client


def _is_in_time(context: RunContext, state: RunState, client: ClientState, duty: Duty, now_s: float) -> bool:
    """Whether a client that has missed a task may still answer, or has not been sent anything yet."""
    if client.task is None or client.stage != ("scoring" if duty == "scores" else "out"):
        return True
    patience_s = get_punctuality(state, client.client_id, duty).patience_s(get_limit_s(context, duty))
    return now_s - find_sent_s(context, state, client, duty) < patience_s


def has_scores(state: RunState) -> bool:
    """Whether a client has told scores in the open round."""
    return any(client.proposals and client.stage in ("preparing", "out", "done") for client in state.clients.values())


def list_awaited_scores(context: RunContext, state: RunState, now_s: float) -> frozenset[str]:
    """The clients whose scores are waited for: those of extras as long as others may still tell theirs."""
    names = frozenset(client.client_id for client in list_awaited(context, state, "scores", now_s))
    extras = frozenset(
        name
        for name, client in state.clients.items()
        if client.stage == "scoring" and not get_punctuality(state, name, "scores").awaited
    )
    more = names - extras or any(client.stage == "answered" for client in state.clients.values())
    return names | extras if more else names


def list_awaited_telemetry(context: RunContext, state: RunState, now_s: float) -> Iterator[str]:
    """The clients that a round's announcement still waits for, as long as its deadline is not over."""
    limit = get_limit_s(context, "telemetry")
    for name in list_expected(context, state, now_s):
        if name in state.clients:
            continue
        known = get_punctuality(state, name, "telemetry")
        if known.awaited and now_s - state.live.entered_s < known.patience_s(limit):
            yield name


def count_telemetry_extras(context: RunContext, state: RunState, now_s: float) -> int:
    """The clients that have not told what they can give, and are not waited for."""
    names = (name for name in list_expected(context, state, now_s) if name not in state.clients)
    return sum(not get_punctuality(state, name, "telemetry").awaited for name in names)


def list_awaited_models(context: RunContext, state: RunState, now_s: float) -> Iterator[ClientState]:
    """The open clients that the deploy phase waits for: briefly, where one has not answered its last training."""
    limit = context.config.deadlines.deploy_s
    for client in state.clients.values():
        known = get_punctuality(state, client.client_id, "training")
        if client.open and now_s - state.live.entered_s < replace(known, took_s=()).patience_s(limit):
            yield client


def record_answer(state: RunState, client_id: str, duty: Duty, took_s: float) -> RunState:
    """The state after an answer of a client was accepted, which came so many seconds after it was asked."""
    return _replace_punctuality(state, {client_id: get_punctuality(state, client_id, duty).after_answer(took_s)}, duty)


def record_missing(state: RunState, names: Iterable[str], duty: Duty, *, most: int | None = None) -> RunState:
    """The state after these clients did not answer.

    Args:
        state: before.
        names: of the clients.
        duty: what they were asked for.
        most: misses in a row that a client can come to by this one; None is no limit.
    """
    known = {name: get_punctuality(state, name, duty) for name in names}
    return _replace_punctuality(
        state, {name: one.after_miss() for name, one in known.items() if most is None or one.missed < most}, duty
    )


def record_misses(state: RunState, duty: Duty, *, spared: Iterable[str] = ()) -> RunState:
    """The state after a phase has closed without those whose task was sent and is not answered.

    Args:
        state: with the phase's client states.
        duty: what the phase was for.
        spared: clients that the phase has not waited for to the end of their time, as where it closed at a quorum.
    """
    done = _has_done(state)
    if duty == "training" and not done:
        return state
    left = set(spared)
    names = [
        name
        for name, client in sorted(state.clients.items())
        if name not in left
        and (client.open or client.stage == "missing")
        and client.task is not None
        and isinstance(client.task.work, DUTY_TERMS[duty].works)
    ]
    return record_missing(state, names, duty, most=None if done else 1)


def _has_done(state: RunState) -> bool:
    return any(client.stage == "done" for client in state.clients.values())


def _replace_punctuality(state: RunState, known: Mapping[str, Punctuality], duty: Duty) -> RunState:
    members = {
        name: replace(member, punctuality=MappingProxyType({**member.punctuality, duty: one}))
        for name, one in known.items()
        if (member := state.live.members.get(name)) is not None
    }
    live = replace(state.live, members=state.live.members.updated(members))
    return replace(state, live=live) if members else state


def _explain_closed(context: RunContext, state: RunState, client_id: str, duty: Duty) -> str:
    """Why a phase that is not at its deadline closes without a client's answer, in words."""
    known = get_punctuality(state, client_id, duty)
    if not known.missed:
        return DUTY_TERMS[duty].at_quorum
    missed = f"it has not answered {_name_last(known.missed, duty)}"
    if not known.awaited:
        return f"{missed}, and nobody waits for it"
    waited_s = known.patience_s(get_limit_s(context, duty))
    return f"no answer came in {waited_s:.3g} s; {missed}, and is not waited for any longer"


def _name_last(count: int, duty: Duty) -> str:
    whose = "the" if duty == "telemetry" else "its"
    return f"{whose} last {DUTY_TERMS[duty].name}" if count == 1 else f"{whose} last {count} {DUTY_TERMS[duty].name}s"


def is_unawaited(state: RunState, client_id: str) -> bool:
    """Whether the open phase does not wait for a client's answer once another has answered."""
    duties: Mapping[str, Duty] = {"train": "training", "evaluate": "evaluation", "search": "paths"}
    duty = duties.get(state.phase)
    return duty is not None and not get_punctuality(state, client_id, duty).awaited


def describe_waits(before: FleetMember, after: FleetMember) -> Iterator[str]:
    """What people are told of a client for which nobody waits any more, or for which somebody does again."""
    if before.punctuality is after.punctuality:
        return
    for duty in DUTIES:
        was, now = (one.punctuality.get(duty, PUNCTUAL) for one in (before, after))
        if was.missed < EXTRA_FROM <= now.missed:
            yield f"has not answered {_name_last(now.missed, duty)}; nobody waits for its answers until it gives one"
        elif was.missed >= EXTRA_FROM and not now.missed:
            yield f"has answered {_name_last(1, duty)}, and is waited for like the others again"
