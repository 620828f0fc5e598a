"""Asynchronous rounds: a full buffer of updates is a round, and no client waits for another. Pure.

FedBuff (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, algorithm 1):
`concurrency` clients have a task at the same time, each from the model that was the newest when it began. Once `buffer`
updates are there, their mean makes the next version, with each change multiplied by a factor for its staleness, see
`AsynchronousSettings`. A client that is done is replaced at once.

    waiting   --> train      enough clients are present; clients with a task go on with it
    train     --> aggregate  the buffer is full, or no client is left to ask
    train     --> waiting    no client is left to ask, and none has an update: the round is attempted again
    aggregate --> waiting    the new model is on disk; clients with a task keep it

The round of a task is the version of its weights: version n is the model before round n. A client counts once in a
buffer, so that a fast one has no larger fraction of it than `Run.max_client_fraction`: when it is done, others are
asked, and it is asked again in the next round.

Deadlines count from each client's own time, see `LiveState.begun_s`. What arrives for a client while a buffer is
aggregated is postponed until the next round is open, and counts there.
"""

from collections.abc import Iterator
from dataclasses import replace

from subfleet.methods.selector import draw_at_random
from subfleet.protocol.answers import Answer, Update
from subfleet.rounds.announcing import build_ask
from subfleet.rounds.awaiting import (
    NO_SIZE,
    close_clients,
    drop_departed,
    explain_missing,
    find_sent_s,
    get_limit_s,
    get_punctuality,
    record_missing,
)
from subfleet.rounds.closing import begin_aggregation, fail_attempt
from subfleet.rounds.context import RunContext
from subfleet.rounds.live import Duty
from subfleet.rounds.measuring import apply_exclusion
from subfleet.rounds.members import holds_lease, list_expected
from subfleet.rounds.ongoing import begin_clients, compute_staleness, list_ongoing
from subfleet.rounds.progress import Waiting
from subfleet.rounds.signals import Action, Outcome, RequestDone, RequestFailed, SendTask, SingleEvent
from subfleet.rounds.sizing import give_sizes
from subfleet.rounds.state import ClientState, RunState
from subfleet.rounds.tasks import request_tasks
from subfleet.rounds.work import CheckRequest, TaskRequest
from subfleet.settings.sections import AsynchronousSettings


def advance_buffer(context: RunContext, state: RunState, settings: AsynchronousSettings, now_s: float) -> Outcome:
    """Give clients sizes, give up those that take too long, and ask others; aggregate once the buffer is full."""
    state, sizing = give_sizes(context, state)
    state, parted = drop_departed(context, state, now_s)
    state, stale = _drop_stale(state, settings)
    state, late = _give_up(context, state, now_s)
    actions = (*sizing, *parted, *stale, *late)
    done = sum(client.stage == "done" for client in state.clients.values())
    asked: tuple[Action, ...] = ()
    if done < settings.buffer:
        state, asked = _ask(context, state, settings, now_s)
        if list_ongoing(state) or _may_return(context, state, now_s):
            return state, (*actions, *asked)
    if done:
        state, last = begin_aggregation(context, state, now_s)
        return state, (*actions, *asked, *last)
    if not state.clients:  # all have left
        return state.enter(Waiting(), now_s), actions
    return fail_attempt(context, state, now_s), actions


def repeat_requests(context: RunContext, state: RunState) -> tuple[Action, ...]:
    """Ask again for what clients wait for: their tasks, and in asynchronous rounds their telemetry for a new round."""
    asked = sorted(name for name, client in state.clients.items() if client.stage == "asked")
    again = (build_ask(context, state, name) for name in asked)
    return (*again, *request_tasks(state, state.clients.values()))


def resend_tasks(state: RunState) -> tuple[Action, ...]:
    """Send again, by a restarted server, the tasks that clients may be working on."""
    tasks = (client.task for client in state.clients.values() if client.stage in ("scoring", "out"))
    return tuple(SendTask(task=task) for task in tasks if task is not None)


def is_postponed(context: RunContext, state: RunState, event: SingleEvent) -> bool:
    """Whether an event concerns a client with a task, but no asynchronous round is open."""
    if context.config.asynchronous is None or state.phase not in ("aggregate", "waiting"):
        return False
    client = state.clients.get(_find_client_id(event))
    return client is not None and client.open


def postpone(state: RunState, event: SingleEvent) -> RunState:
    """The state that applies an event once a round is open.

    A repetition changes nothing, and of several messages of a client the last one counts.
    """
    known = state.live.postponed
    if event in known:
        return state
    if isinstance(event, Answer):
        known = tuple(
            other for other in known if not (isinstance(other, Answer) and other.client_id == event.client_id)
        )
    return replace(state, live=replace(state.live, postponed=(*known, event)))


def _find_client_id(event: SingleEvent) -> str:
    """The client whose answer, checked update or prepared task this is; empty for all other events."""
    if isinstance(event, Answer):
        return event.client_id
    if isinstance(event, RequestDone | RequestFailed):
        if isinstance(event.request, CheckRequest):
            return event.request.update.client_id
        if isinstance(event.request, TaskRequest):
            return event.request.participant.client_id
    return ""


def list_postponed_updates(state: RunState) -> Iterator[Update]:
    """The updates that have arrived and count once a round is open."""
    for event in state.live.postponed:
        if isinstance(event, Update):
            yield event
        elif isinstance(event, RequestDone) and isinstance(event.request, CheckRequest):
            yield event.request.update


def _drop_stale(state: RunState, settings: AsynchronousSettings) -> Outcome:
    """Refuse the updates that began too many versions ago, whenever they come."""
    ages = {name: compute_staleness(state.round, client) for name, client in list_ongoing(state).items()}
    most = settings.max_staleness
    reasons = {
        name: f"its update would be {age} versions old, but asynchronous.max_staleness is {most}"
        for name, age in sorted(ages.items())
        if age > most
    }
    state, withdrawn = close_clients(state, reasons)
    refused = [replace(state.clients[name], stage="refused") for name in reasons]
    return (state.with_clients(*refused), withdrawn) if refused else (state, ())


def _give_up(context: RunContext, state: RunState, now_s: float) -> Outcome:
    """Close the clients whose deadline is over, counted from their own question or task."""
    late = {client.client_id: duty for client, duty in _list_late(context, state, now_s)}
    if not late:
        return state, ()
    reasons = {
        name: NO_SIZE
        if state.clients[name].stage == "answered"
        else explain_missing(context, state, name, duty, now_s, late=True)
        for name, duty in late.items()
    }
    silent = [name for name, duty in late.items() if duty == "telemetry"]
    sent = [name for name in late if state.clients[name].stage == "out"]
    state, withdrawn = close_clients(state, reasons)
    members = state.live.members
    members = members.with_items(
        {name: replace(members[name], silent_since=state.round) for name in silent if name in members}
    )
    state = replace(state, live=replace(state.live, members=members))
    return record_missing(record_missing(state, silent, "telemetry"), sent, "training"), withdrawn


def _list_late(context: RunContext, state: RunState, now_s: float) -> Iterator[tuple[ClientState, Duty]]:
    heard = {_find_client_id(event) for event in state.live.postponed}  # in time, while a buffer was aggregated
    for _, client in sorted(list_ongoing(state).items()):
        if client.client_id in heard:
            continue
        duty: Duty = "telemetry" if client.stage == "asked" else "training"
        if now_s - find_sent_s(context, state, client, duty) >= get_limit_s(context, duty):
            yield client, duty


def _ask(context: RunContext, state: RunState, settings: AsynchronousSettings, now_s: float) -> Outcome:
    """Ask as many clients as may train beside the others, drawn at random; those that do not answer come last."""
    free = settings.concurrency - len(list_ongoing(state))
    idle = [*_list_idle(context, state, now_s)] if free > 0 else []
    if not idle:
        return state, ()
    excluded = {name for name, exclusion in state.outliers.excluded.items() if state.round <= exclusion.until_round}
    able = [name for name in idle if name not in excluded]
    awaited = [name for name in able if get_punctuality(state, name, "training").awaited]
    key = {"seed": context.config.seed, "round_number": state.round, "attempt": state.attempt}
    drawn = sorted(draw_at_random(awaited or able, free, **key))
    left_out = [name for name in idle if name in excluded]
    new = [
        ClientState(client_id=name, device=state.profiles[name].device, stage="asked") for name in (*left_out, *drawn)
    ]
    state = state.with_clients(*(apply_exclusion(state, client) for client in new))
    return begin_clients(state, drawn, now_s), tuple(build_ask(context, state, name) for name in drawn)


def _list_idle(context: RunContext, state: RunState, now_s: float) -> Iterator[str]:
    """The present clients that have had no part in the round yet."""
    for name in list_expected(context, state, now_s):
        if name not in state.clients and holds_lease(context, state.live.members[name], now_s):
            yield name


def _may_return(context: RunContext, state: RunState, now_s: float) -> bool:
    """Whether clients may be there that this server has not heard since it was started again."""
    if now_s - state.live.entered_s >= context.config.deadlines.lease_s:
        return False
    members = ((name, state.live.members.get(name)) for name in state.profiles if name not in state.clients)
    return any(member is not None and member.heard_s is None and not member.departure for _, member in members)
