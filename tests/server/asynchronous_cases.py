"""Runs with asynchronous rounds that tests move on, event by event."""

from collections.abc import Iterable
from typing import Any

from server.coordinator_cases import CLIENTS, context_of, join_client, prepared, telemetry
from server.random_cases import build_update, reload_state

from subfleet.protocol.messages import Ack, Presence, Update
from subfleet.rounds.closing import resume_state
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import (
    Action,
    AggregationRequest,
    Ask,
    Close,
    Event,
    Reply,
    RequestDone,
)
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest
from subfleet.settings.sections import AsynchronousSettings

ALLOWED = {
    "fedadam",
    "fedavg",
    "federated_dropout",
    "fedprox",
    "fedrolex",
    "fedyogi",
    "fjord",
    "heterofl",
    "nefl",
}


def buffered(buffer: int = 1, concurrency: int = 2, **changes: Any) -> AsynchronousSettings:
    return AsynchronousSettings(buffer=buffer, concurrency=concurrency, **changes)


class Run:
    """A run that a test moves on, event by event."""

    def __init__(self, settings: AsynchronousSettings, *, clients: Iterable[str] = CLIENTS, **changes: Any) -> None:
        names = tuple(clients)
        self.context: RunContext = context_of(asynchronous=settings, min_clients=len(names), rounds=9, **changes)
        self.state, self.now_s = RunState(), 1.0
        self.actions: tuple[Action, ...] = ()
        for name in names:
            self.apply(Presence(client_id=name, session_id=f"{name}-1", online=True))
            self.state = join_client(self.context, self.state, name, self.now_s)

    def apply(self, event: Event, seconds: float = 0.0) -> tuple[Action, ...]:
        self.now_s += seconds
        self.state, self.actions = step(self.context, self.state, event, self.now_s)
        return self.actions

    def stages(self) -> dict[str, str]:
        return {name: client.stage for name, client in self.state.clients.items()}

    def in_stage(self, stage: str) -> list[str]:
        return sorted(name for name, known in self.stages().items() if known == stage)

    def measure(self, name: str) -> None:
        self.apply(telemetry(self.context, name, self.state.round, attempt=self.state.attempt))

    def send(self, *names: str) -> None:
        """Have these clients, or all that were asked, answer and get their tasks."""
        for name in names or self.in_stage("asked"):
            self.measure(name)
            self.apply(prepared(self.context, self.state, name))
            assert self.state.clients[name].stage == "out"

    def update(self, name: str) -> Update:
        task = self.state.clients[name].task
        assert task is not None
        return build_update(self.context, task)

    def train(self, name: str) -> tuple[Action, ...]:
        """Have a client's update arrive, be checked and accepted."""
        return self.apply(checked(self.update(name)))

    def aggregate(self) -> Close:
        """Close the round that is aggregated."""
        result = AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={})
        request = AggregationRequest(round=self.state.round, clients=())
        actions = self.apply(RequestDone(request=request, result=result))
        (close,) = (action for action in actions if isinstance(action, Close))
        return close

    def restart(self) -> tuple[Action, ...]:
        """Continue from the journal in a new process."""
        self.state = resume_state(self.context, reload_state(self.state, self.now_s))
        return list_resume_actions(self.context, self.state)


def checked(update: Update) -> RequestDone:
    return RequestDone(request=CheckRequest(update=update), result=ChangeSize())


def asked(actions: Iterable[Action]) -> list[str]:
    return [action.client_id for action in actions if isinstance(action, Ask)]


def find_request(actions: Iterable[Action]) -> AggregationRequest:
    (request,) = (action for action in actions if isinstance(action, AggregationRequest))
    return request


def acks(actions: Iterable[Action]) -> list[Ack]:
    return [action.ack for action in actions if isinstance(action, Reply)]
