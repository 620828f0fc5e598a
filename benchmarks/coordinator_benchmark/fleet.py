"""Simulated devices and an exporter that answers at once; they drive the pure coordinator."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.network import Network
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Deployed, Evaluated, Presence, Profile, Refusal, Task, Telemetry, Update
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Reading
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Deploy, Evaluate, Train
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import get_estimates
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import Action, AggregationRequest, Event, GoOn, RequestDone, SendTask, Tick
from subfleet.rounds.state import RunState
from subfleet.rounds.work import (
    AggregatedRound,
    CheckRequest,
    CostRequest,
    EvaluationRequest,
    ExportedModels,
    ModelsRequest,
    PreparedTask,
    ProgramRequest,
    ScoringRequest,
    TaskRequest,
)
from subfleet.search.queue import ProgramFacts

__all__ = ["EstimatesOf", "Fleet", "make_presence", "make_profile"]

_BLOB = BlobRef(sha256="0" * 64, size_bytes=1000)
_PROGRAM = ProgramRef(program_id="program", target="onnx", blob=_BLOB)
_OVER = 1.03
"""Ratio of plans to cost estimates."""
_HELD_OUT = 20
"""Held-out samples of each device."""
EstimatesOf = Callable[[Network, TrainingSettings], MemoryEstimates]
"""The exporter's memory estimates for a network and its training settings."""
_Supplied = TaskRequest | ScoringRequest | EvaluationRequest | ModelsRequest | ProgramRequest | CostRequest
_REFUSE = 20
"""One in this many devices refuses its first task of a round for lack of memory."""


def make_presence(name: str) -> Presence:
    """Make a heartbeat."""
    return Presence(client_id=name, session_id=f"{name}-1", online=True)


def make_profile(context: RunContext, name: str) -> Profile:
    """Make the profile of a simulated device."""
    classes = context.config.model.class_count
    return Profile(
        client_id=name,
        session_id=f"{name}-1",
        device="simulated",
        runtimes=("onnx",),
        sample_count=100,
        held_out_count=_HELD_OUT,
        class_counts=(100 // classes,) * classes,
        input_shape=context.config.model.input_shape,
        memory_total_bytes=2**40,
        memory_fraction=1.0,
        message_id=f"{name}/profile",
    )


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Answers the coordinator's tasks and its requests to the exporter.

    Attributes:
        estimates: memory estimates for the target of all devices.
        names: ids of the devices.
        waiting: the events to come.
    """

    context: RunContext
    estimates: EstimatesOf
    names: tuple[str, ...]
    waiting: deque[Event] = field(default_factory=deque)
    _reported: tuple[int, int] = (0, 0)
    _planned: dict[str, int] = field(default_factory=dict)

    def join(self) -> Iterator[Event]:
        """The events with which all devices join."""
        for name in self.names:
            yield make_presence(name)
            yield make_profile(self.context, name)

    def report_telemetry(self, state: RunState) -> None:
        """Queue every device's telemetry once per attempt of a round, and heartbeats of every tenth."""
        if state.phase != "measure" or self._reported == (state.round, state.attempt):
            return
        self._reported = (state.round, state.attempt)
        for index, name in enumerate(self.names):
            self.waiting.append(self._create_telemetry(state, name))
            if index % 10 == 0:
                self.waiting.append(make_presence(name))

    def _create_telemetry(self, state: RunState, name: str) -> Telemetry:
        """Memory and links of all magnitudes, from below the smallest submodel to above the largest."""
        rng = Random(f"{name}/{state.round}")  # noqa: S311 - no secret
        low, high = (
            candidate.training_memory_bytes["onnx"]
            for candidate in (self.context.first.candidates[0], self.context.first.candidates[-1])
        )
        memory_bytes = int(low * (1.5 * high / low) ** rng.random())
        rate_bps = 16 * self.context.first.candidates[-1].weight_bytes * (0.05 + rng.random())
        link_bps = rate_bps / self.context.config.communication_s
        reading = Reading(memory_free_bytes=memory_bytes, downlink_bps=link_bps, uplink_bps=link_bps)
        return Telemetry(
            client_id=name,
            session_id=f"{name}-1",
            run_id=self.context.run_id,
            round=state.round,
            log_time_s=0.0,
            reading=reading,
            memory_budget_bytes=memory_bytes,
            attempt=state.attempt,
        )

    def handle(self, state: RunState, action: Action) -> None:
        """Queue the answer to an action; the caller runs searches, which take seconds."""
        if isinstance(action, SendTask):
            self.waiting.append(self._answer(action.task))
        elif isinstance(action, CheckRequest):
            self.waiting.append(RequestDone(request=action, result=ChangeSize(weights=1.0)))
        elif isinstance(action, AggregationRequest):
            answer = RequestDone(
                request=action,
                result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}, lineages=action.lineages),
            )
            self.waiting.append(answer)
        elif isinstance(action, GoOn):
            self.waiting.appendleft(Tick())
        elif isinstance(action, _Supplied):
            self.waiting.append(self._answer_request(state, action))

    def _answer(self, task: Task) -> Event:
        name = task.client_id
        if isinstance(task.work, Deploy):
            return Deployed(task_id=task.task_id, run_id=task.run_id, client_id=name, files=())
        if isinstance(task.work, Evaluate):
            return Evaluated(
                task_id=task.task_id,
                run_id=task.run_id,
                round=task.round,
                client_id=name,
                loss=1.0,
                accuracy=0.5,
                sample_count=_HELD_OUT,
                label_count=_HELD_OUT,
                measured_peak_bytes=0,
                seconds=1.0,
            )
        number = int(name.removeprefix("client"))
        if number % _REFUSE == task.round and task.task_id.endswith("/0"):
            return Refusal(
                task_id=task.task_id,
                run_id=task.run_id,
                round=task.round,
                client_id=name,
                reason="memory",
                detail="something else came",
                available_bytes=task.planned_peak_bytes - 1,
            )
        return Update(
            task_id=task.task_id,
            run_id=task.run_id,
            round=task.round,
            client_id=name,
            blob=replace(_BLOB, size_bytes=10),
            sample_count=100,
            step_count=1,
            loss=1.0,
            accuracy=0.5,
            measured_peak_bytes=1,
            train_seconds=0.0,
            seconds=0.0,
            operator_examples=self._count_operator_examples(task),
        )

    def _count_operator_examples(self, task: Task) -> OperatorExamples:
        """All samples for the first operator of each choice; empty if the task trains one network."""
        if not isinstance(task.work, Train) or task.work.paths is None:
            return ()
        operators = dict(task.architecture.choices)
        choices = self.context.network.choices
        return tuple((name, ((operators.get(name, choice.operators)[0], 100),)) for name, choice in choices.items())

    def _answer_request(self, state: RunState, request: _Supplied) -> RequestDone:
        match request:
            case TaskRequest():
                facts = self._plan_program(state, request.participant.size, request.target)
                result: Any = PreparedTask(program=_PROGRAM, weights=_BLOB, facts=facts)
            case ScoringRequest():
                result = ()
            case EvaluationRequest():
                facts = ProgramFacts(planned_peak_bytes=1)
                result = PreparedTask(program=_PROGRAM, weights=_BLOB, facts=facts)
            case ModelsRequest():
                result = ExportedModels(programs=(_PROGRAM,), models=())
            case ProgramRequest():
                result = self._plan_program(state, request.program.size, request.program.target)
            case CostRequest():
                network = self.context.get_declared(request.lineage).network
                result = self.estimates(network, self.context.training(1))
            case _:
                never(request)
        return RequestDone(request=request, result=result)

    def _plan_program(self, state: RunState, size: Architecture, target: str) -> ProgramFacts:
        """Plan a little more memory than the cost estimate."""
        if size.architecture_id not in self._planned:
            estimate = get_estimates(self.context, state, target)(size)
            self._planned[size.architecture_id] = int(_OVER * estimate.training_memory_bytes[target])
        return ProgramFacts(planned_peak_bytes=self._planned[size.architecture_id])
