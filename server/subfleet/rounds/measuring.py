"""What a round's clients offer: their telemetry, one by one or as a survey. Pure.

Clients of asynchronous rounds are asked one by one, so that no survey answers for them.

A client's state is built from its telemetry as soon as that arrives. A survey has the telemetry of many clients, of
which a round needs a few: it is kept, and read for the clients that are drawn. If a decision depends on all clients, a
survey is read at once.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from subfleet.methods.selector import select_at_random
from subfleet.protocol.messages import Telemetry
from subfleet.rounds.awaiting import note_answer
from subfleet.rounds.context import RunContext
from subfleet.rounds.judging import reply
from subfleet.rounds.live import FleetMember, Suitability, Survey
from subfleet.rounds.members import mark_heard, with_members
from subfleet.rounds.networks import request_estimates
from subfleet.rounds.offers import build_client, find_profile_problem, find_runtime, remember_network
from subfleet.rounds.signals import Action, Outcome
from subfleet.rounds.sizing import request_new
from subfleet.rounds.state import ClientState, RunState


def receive_telemetry(context: RunContext, state: RunState, messages: Sequence[Telemetry], now_s: float) -> Outcome:
    """Apply telemetry that has arrived together."""
    members, clients, actions = dict[str, FleetMember](), dict[str, ClientState](), list[Action]()
    for telemetry in messages:
        name = telemetry.client_id
        known = members.get(name) or state.live.members.get(name, FleetMember())
        members[name] = mark_heard(known, telemetry.session_id, now_s)
        status, reason = _judge_telemetry(context, state, telemetry, clients)
        if status == "accepted":
            clients[name] = _build_state(context, state, telemetry)
            members[name] = note_answer(context, state, members[name], clients[name], "telemetry", now_s)
        if status != "waiting":
            actions.append(reply(name, telemetry.message_id, status, reason))
    state, requests = _add_clients(context, with_members(state, members), clients)
    return state, (*actions, *requests)


def receive_survey(context: RunContext, state: RunState, survey: Survey) -> Outcome:
    """Keep a survey of the open round, or read it."""
    if state.phase != "measure" or not _is_current(context, state, survey):
        return state, ()
    suitability = _judge_profiles(context, state)
    state = replace(state, live=replace(state.live, suitability=suitability))
    if _needs_all(context, state):
        return _add_clients(context, state, read_survey(context, state, survey, sorted(survey.names)))
    state = replace(state, live=replace(state.live, survey=survey))
    suited = frozenset[str]().union(*suitability.runtimes.values())
    unable = (survey.names - suited) | _list_excluded(state, survey.names)
    state, requests = _add_clients(context, state, read_survey(context, state, survey, sorted(unable)))
    able = list_unread(state)
    there = [runtime for runtime, names in suitability.runtimes.items() if not names.isdisjoint(able)]
    state, more = request_new(state, (request for name in there for request in request_estimates(context, state, name)))
    return state, (*requests, *more)


def list_answered(state: RunState) -> Set[str]:
    """The clients that have answered in the open round, while it measures."""
    survey = state.live.survey
    return state.clients.keys() if survey is None else survey.names | state.clients.keys()


def list_unread(state: RunState) -> frozenset[str]:
    """The available clients whose telemetry has not been read yet."""
    survey = state.live.survey
    return frozenset() if survey is None else survey.names - survey.away - state.clients.keys()


def list_away(state: RunState) -> frozenset[str]:
    """The clients whose telemetry has not been read yet, because they are not available."""
    survey = state.live.survey
    return frozenset() if survey is None else survey.away - state.clients.keys()


def read_survey(
    context: RunContext, state: RunState, survey: Survey | None, names: Iterable[str]
) -> dict[str, ClientState]:
    """The states of some clients of a survey, in their order; of none without a survey."""
    if survey is None:
        return {}
    suited = frozenset[str]().union(*state.live.suitability.runtimes.values())
    return {name: _build_state(context, state, survey.read(name), suited=name in suited) for name in names}


def _build_state(context: RunContext, state: RunState, telemetry: Telemetry, *, suited: bool = False) -> ClientState:
    """The state of a client that has answered."""
    client = build_client(context, state, state.profiles[telemetry.client_id], telemetry, suited=suited)
    return apply_exclusion(state, client)


def apply_exclusion(state: RunState, client: ClientState) -> ClientState:
    """A client's state; skipped if an earlier update has excluded the client from this round."""
    excluded = state.outliers.excluded.get(client.client_id)
    if excluded is None or state.round > excluded.until_round:
        return client
    return replace(client, stage="skipped", reason=excluded.reason, outlier=excluded.reason)


def _list_excluded(state: RunState, names: frozenset[str]) -> frozenset[str]:
    excluded = state.outliers.excluded.items()
    return names.intersection(name for name, entry in excluded if state.round <= entry.until_round)


def _add_clients(context: RunContext, state: RunState, clients: Mapping[str, ClientState]) -> Outcome:
    """Add the states of clients that have answered, and request what their sizes are chosen by."""
    if not clients:
        return state, ()
    state = state.with_clients(*clients.values())
    for client in clients.values():
        state = remember_network(state, client)
    runtimes = dict.fromkeys(client.offer.runtime for client in clients.values() if client.stage == "answered")
    return request_new(state, (request for name in runtimes for request in request_estimates(context, state, name)))


def _judge_telemetry(
    context: RunContext, state: RunState, telemetry: Telemetry, new: Mapping[str, ClientState]
) -> tuple[Literal["accepted", "duplicate", "refused", "waiting"], str]:
    """The ack of a telemetry, and why; "waiting" for none: outside rounds, or before the profile has arrived.

    Args:
        context: of the run.
        state: of the run.
        telemetry: of a client.
        new: the clients whose telemetry of this round has arrived together with it.
    """
    name = telemetry.client_id
    if telemetry.round is None:
        return "waiting", ""
    if not _is_current(context, state, telemetry):
        return "refused", f"round {telemetry.round} of that run is not open"
    client = new.get(name) or state.clients.get(name)
    survey = state.live.survey
    idle = any(name in names for names in (*state.idle.values(), () if survey is None else survey.names))
    asked = client is not None and client.stage == "asked"
    if idle or (client is not None and not asked and client.stage != "missing"):
        return "duplicate", ""
    if state.phase != "measure" and not asked:
        return "refused", f"round {state.round} has started without this client"
    # Until its profile arrives, the client repeats the telemetry: it is not acknowledged.
    return ("accepted" if name in state.profiles else "waiting"), ""


def _is_current(context: RunContext, state: RunState, answer: Telemetry | Survey) -> bool:
    return (answer.run_id, answer.round, answer.attempt) == (context.run_id, state.round, state.attempt)


def _needs_all(context: RunContext, state: RunState) -> bool:
    """Whether a decision of the round depends on what every client offers."""
    roles = context.roles
    return (
        roles.selector.select is not select_at_random
        or roles.assigner.declarations
        or roles.networks.begin is not None
        or context.config.calibrates(state.round)
    )


def _judge_profiles(context: RunContext, state: RunState) -> Suitability:
    """Which clients suit the run; only profiles that are new are judged."""
    known, profiles = state.live.suitability, state.profiles
    if known.profiles is profiles:
        return known
    changed = {*profiles.find_changed(known.profiles), *known.profiles.find_changed(profiles)}
    new: dict[str, set[str]] = {}
    for name in changed & profiles.keys():
        profile = profiles[name]
        if not find_profile_problem(context, profile):
            new.setdefault(find_runtime(context, profile), set()).add(name)
    runtimes = {
        runtime: (known.runtimes.get(runtime, frozenset()) - changed) | new.get(runtime, frozenset())
        for runtime in sorted({*known.runtimes, *new})
    }
    return Suitability(profiles=profiles, runtimes=MappingProxyType(runtimes))
