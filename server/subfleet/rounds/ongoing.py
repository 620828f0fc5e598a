"""Clients whose tasks go on from one asynchronous round to the next. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from subfleet.rounds.signals import Outcome, Withdraw
from subfleet.rounds.state import ClientState, RunState


def list_ongoing(state: RunState) -> Mapping[str, ClientState]:
    """The clients that are not done with what they were asked for; none at the end of a round that is not asynchronous.

    See `ClientState.open`.
    """
    return MappingProxyType({name: client for name, client in state.clients.items() if client.open})


def compute_staleness(round_number: int, client: ClientState) -> int:
    """The versions of the model between the one that a client began with and the one that a round changes."""
    return 0 if client.task is None else round_number - client.task.round


def begin_clients(state: RunState, names: Iterable[str], now_s: float) -> RunState:
    """The state in which the time of these clients begins now."""
    known = {name: begun_s for name, begun_s in state.live.begun_s.items() if name in state.clients}
    begun_s = MappingProxyType({**known, **dict.fromkeys(names, now_s)})
    return replace(state, live=replace(state.live, begun_s=begun_s))


def end_ongoing(state: RunState) -> Outcome:
    """End all tasks after the last round."""
    tasks = [client.task for client in state.clients.values() if client.task is not None]
    state = replace(state, clients=MappingProxyType({}), live=replace(state.live, begun_s=MappingProxyType({})))
    return state, tuple(Withdraw(task_id=task.task_id) for task in tasks)
