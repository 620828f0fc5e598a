"""Searches between two rounds: a supernet is trained for one round, and then searched for two tiers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from server.coordinator_cases import (
    CLIENTS,
    blob,
    context_of,
    prepared,
    profile,
    score_generation,
    select_requests,
    task,
    telemetry,
    update,
)
from server.fake_device import CLASSES

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.tier_search import TierSearch
from subfleet.protocol.answers import Evaluated
from subfleet.protocol.messages import Presence
from subfleet.protocol.paths import PathScore
from subfleet.protocol.programs import ProgramRef
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import Action, AggregationRequest, CloseGeneration, Event, RequestDone
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest, EvaluationRequest, GenerationRequest, PreparedTask
from subfleet.search.queue import ProgramFacts
from subfleet.search.supernets import EvolutionSettings
from subfleet.settings.samples import DataSettings
from subfleet.testing.rounds import SUPERNET

HELD_OUT = 10
Outcome = tuple[RunState, tuple[Action, ...]]
EVOLUTION = EvolutionSettings(evaluations=6, population=3, offspring=3)


def context_with(search: TierSearch, **changes: Any) -> RunContext:
    """Return a run context with one supernet round and then two tiers."""
    method = FedorAS(supernet_rounds=1, tiers=2, search=search, min_contributors=1)
    data = DataSettings(test="server.server_rig:evaluation", validation_samples=5)
    model = replace(SUPERNET, class_count=CLASSES)
    return context_of(**{"method": method, "model": model, "data": data, "rounds": 3, **changes})


BY_SERVER = context_with(TierSearch(evolution=EVOLUTION))
SCORING = TierSearch(evolution=EVOLUTION, scoring="devices", scoring_clients=2, scoring_rounds=1)
BY_DEVICES = context_with(replace(SCORING, scoring_rounds=2))
NOBODY = "no device that can compute its paths has scored them; let some devices hold out samples"


def supernet_round(context: RunContext, held_out: int = HELD_OUT) -> Outcome:
    """The supernet's only round was aggregated at second 5, with all clients."""
    state = RunState()
    for name in CLIENTS:
        state, _ = step(context, state, Presence(client_id=name, session_id=f"{name}-1", online=True), 1.0)
        state, _ = step(
            context, state, replace(profile(name), input_shape=SUPERNET.input_shape, held_out_count=held_out), 1.0
        )
    for name in CLIENTS:
        state, _ = step(context, state, telemetry(context, name, state.round), 2.0)
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), 2.0)
    for name in CLIENTS:
        choices = dict(task(state, name).architecture.choices)
        operators = {
            choice_name: choices.get(choice_name, choice.operators)
            for choice_name, choice in context.network.choices.items()
        }
        examples = tuple((choice, ((available[0], HELD_OUT),)) for choice, available in operators.items())
        answer = replace(update(context, state, name), operator_examples=examples)
        state, _ = step(context, state, RequestDone(request=CheckRequest(update=answer), result=ChangeSize()), 3.0)
    return step(
        context,
        state,
        RequestDone(
            request=AggregationRequest(round=1, clients=()),
            result=AggregatedRound(accuracy=0.2, loss=1.0, sha256="0" * 64, refused={}),
        ),
        5.0,
    )


def journal_in(folder: Path, context: RunContext) -> Journal:
    engine = open_database(folder)
    run_id = begin_run(engine, name="test", settings="{}", round_count=3)
    return Journal(engine, run_id, first_memory=context.roles.memory.initial)


def complete_generation(context: RunContext, state: RunState, actions: tuple[Action, ...]) -> RequestDone:
    (request,) = select_requests(GenerationRequest, actions)
    return RequestDone(request=request, result=score_generation(context, state))


def run_search(
    context: RunContext, state: RunState, actions: tuple[Action, ...]
) -> tuple[RunState, list[CloseGeneration]]:
    """Run the whole search on the server; return the state and the recorded generations."""
    closed = list[CloseGeneration]()
    while state.phase == "search":
        result = complete_generation(context, state, actions)
        state, actions = step(context, state, result, 6.0)
        closed += [action for action in actions if isinstance(action, CloseGeneration)]
    return state, closed


def send_scoring_tasks(state: RunState, actions: tuple[Action, ...], context: RunContext, now_s: float) -> RunState:
    """Send each selected device its scoring task."""
    program = ProgramRef(program_id="scores", target="onnx", blob=blob("scores"))
    for request in select_requests(EvaluationRequest, actions):
        facts = ProgramFacts(planned_peak_bytes=1000)
        result: Event = RequestDone(
            request=request, result=PreparedTask(program=program, weights=blob("w"), facts=facts)
        )
        state, _ = step(context, state, result, now_s)
    return state


def report_scores(
    state: RunState, context: RunContext, name: str, accuracies: tuple[float, ...], labels: int = HELD_OUT
) -> Evaluated:
    sent_task = task(state, name)
    return Evaluated(
        task_id=sent_task.task_id,
        run_id=context.run_id,
        round=state.round,
        client_id=name,
        loss=1.0,
        accuracy=sum(accuracies) / len(accuracies),
        sample_count=HELD_OUT,
        label_count=labels,
        measured_peak_bytes=10,
        seconds=0.1,
        message_id=f"scores.{sent_task.task_id}",
        scores=tuple(PathScore(loss=1.0, accuracy=accuracy) for accuracy in accuracies),
    )
