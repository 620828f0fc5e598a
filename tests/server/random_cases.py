"""Parts of random runs: every method, two run contexts, and the networks that an aggregation leaves."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from server.coordinator_cases import blob, context_of
from server.fake_device import CLASSES
from server.methods.method_cases import OF_ONE_NETWORK
from server.server_rig import MODEL, estimates_of

from subfleet.elastic.building import network_of
from subfleet.elastic.lineage import Copied, Lineage
from subfleet.elastic.unions import unite_families
from subfleet.journal.stored_state import build_state, list_changes
from subfleet.methods import AnyMethod
from subfleet.methods.fedadp import FedADP
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.fedtrans import Growth
from subfleet.methods.sattler import Clustering, SattlerMemory
from subfleet.methods.tier_search import TierSearch
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.exhaustive import never
from subfleet.protocol.messages import Evaluated, Scores, Task, Update
from subfleet.protocol.paths import OperatorExamples, PathScore
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.task import Evaluate, Train
from subfleet.rounds.context import RunContext
from subfleet.rounds.networks import list_lineages
from subfleet.rounds.progress import Searching
from subfleet.rounds.signals import Action, AggregationRequest, Reply, RequestDone
from subfleet.rounds.state import RunState
from subfleet.rounds.work import (
    CostRequest,
    EvaluationRequest,
    ExportedModels,
    ModelsRequest,
    PreparedTask,
    ProgramRequest,
    Scorable,
    ScoringRequest,
    TaskRequest,
)
from subfleet.search.queue import ProgramFacts
from subfleet.search.supernets import EvolutionSettings
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import Deadlines, Evaluations
from subfleet.testing.rounds import SUPERNET

ESTIMATES = estimates_of(network_of(MODEL))
_SMALL = replace(MODEL, widths=(4,), depths=(1,), norm="none")
_NETWORKS = (_SMALL, replace(_SMALL, depths=(2,)), replace(_SMALL, widths=(8,)))
Supplied = TaskRequest | ScoringRequest | EvaluationRequest | ModelsRequest | ProgramRequest | CostRequest
_EVOLUTION = EvolutionSettings(evaluations=6, population=3, offspring=3)
_BY_SERVER = TierSearch(evolution=_EVOLUTION)
_BY_DEVICES = replace(_BY_SERVER, scoring="devices", scoring_clients=2, scoring_rounds=2)
VARIANTS: Mapping[str, AnyMethod] = {
    **{name: kind() for name, kind in OF_ONE_NETWORK.items()},
    "fedfa by scores": FedFA(choice="score"),
    "fedadp by networks": FedADP(choice="declared"),
    "fedoras": FedorAS(supernet_rounds=1, tiers=2, search=_BY_SERVER),
    "fedoras by devices": FedorAS(supernet_rounds=1, tiers=2, search=_BY_DEVICES),
}


def build_contexts(method: AnyMethod) -> tuple[RunContext, ...]:
    limits = {"join_s": 40, "measure_s": 10, "round_s": 30, "evaluate_s": 20, "deploy_s": 20}
    settings: dict[str, Any] = {
        "rounds": 3,
        "min_clients": 2,
        "deadlines": Deadlines(lease_s=15, linger_s=0, **limits),
    }
    if method.roles().training.draws_paths:
        data = DataSettings(test="server.server_rig:evaluation", validation_samples=5)
        settings |= {"model": replace(SUPERNET, class_count=CLASSES), "data": data}
    return tuple(
        context_of(
            quorum=quorum, clients_per_round=count, method=method, evaluation=Evaluations(every=every), **settings
        )
        for quorum, count, every in ((1.0, 0, 1), (0.5, 2, 2))
    )


def evolve_lineages(context: RunContext, aggregate: AggregationRequest) -> tuple[Any, tuple[Lineage, ...]]:
    """Return the observation and the lineages of an aggregation in which as many networks appear as possible."""
    if context.roles.networks.evolve is None:
        return None, aggregate.lineages
    if context.roles.assigner.declarations:
        return None, _unite_networks(context, aggregate)
    return (
        _split_clusters(context, aggregate)
        if isinstance(aggregate.memory, SattlerMemory)
        else _grow_network(context, aggregate)
    )


def declare_network(context: RunContext, index: int) -> str:
    """Return the network that a client declares, or nothing if the method uses no declarations."""
    return canonical_json(_NETWORKS[index]).decode() if context.roles.assigner.declarations else ""


def _unite_networks(context: RunContext, aggregate: AggregationRequest) -> tuple[Lineage, ...]:
    """A union contains the networks brought to this round and those of the union before it."""
    before = list_lineages(context, aggregate.lineages)
    if not aggregate.brought:
        return aggregate.lineages
    unions = [union for union in before if union.living and union.members]
    members = (*(family for union in unions for family in union.members), *aggregate.brought)
    lineages = (replace(lineage, retired_round=aggregate.round) if lineage in unions else lineage for lineage in before)
    new_union = Lineage(
        id=f"union{len(before)}", config=unite_families(members), born_round=aggregate.round, members=members
    )
    return (*lineages, new_union)


def _split_clusters(context: RunContext, aggregate: AggregationRequest) -> tuple[Clustering, tuple[Lineage, ...]]:
    """Sattler splits each cluster with at least two clients."""
    clusters: dict[str, list[str]] = {}
    for client in aggregate.clients:
        assert client.architecture is not None
        clusters.setdefault(client.architecture.network, []).append(client.client_id)
    memory: SattlerMemory = aggregate.memory
    splits = {
        parent: (
            (f"c{2 * (memory.split_count + index) + 1}", tuple(clients[:-1])),
            (f"c{2 * (memory.split_count + index) + 2}", tuple(clients[-1:])),
        )
        for index, (parent, clients) in enumerate(sorted(clusters.items()))
        if len(clients) > 1
    }
    before = list_lineages(context, aggregate.lineages)
    lineages = (
        replace(lineage, retired_round=aggregate.round) if lineage.id in splits else lineage for lineage in before
    )
    new_lineages = (
        Lineage(id=name, config=MODEL, parent=parent, map=Copied(), born_round=aggregate.round)
        for parent, halves in splits.items()
        for name, _ in halves
    )
    return Clustering(splits=splits), (*lineages, *new_lineages) if splits else aggregate.lineages


def _grow_network(context: RunContext, aggregate: AggregationRequest) -> tuple[Growth, tuple[Lineage, ...]]:
    """FedTrans grows a network from the newest one in every other round."""
    before = list_lineages(context, aggregate.lineages)
    living = [lineage.id for lineage in before if lineage.living]
    new_id = f"m{len(living)}" if aggregate.round % 2 else ""
    growth = Growth(parameters=dict(zip(living, range(1, 9), strict=False)), newest=living[-1], born=new_id)
    if not new_id:
        return growth, aggregate.lineages
    child = Lineage(id=new_id, config=MODEL, parent=living[-1], map=Copied(), born_round=aggregate.round)
    return growth, (*before, child)


def _list_operator_examples(context: RunContext, task: Task, samples: int) -> OperatorExamples:
    """Report the paths that a device drew, if any: the first operator available for each choice."""
    if not isinstance(task.work, Train) or task.work.paths is None:
        return ()
    choices = dict(task.architecture.choices)
    return tuple(
        (name, ((choices.get(name, choice.operators)[0], samples),)) for name, choice in context.network.choices.items()
    )


def answers(actions: tuple[Action, ...], message_id: str) -> list[str]:
    """Return the answers to a message; a step may also tell the client that it is skipped."""
    replies = (action for action in actions if isinstance(action, Reply))
    return [reply.ack.status for reply in replies if reply.ack.of == message_id]


def build_evaluation(task: Task, samples: int) -> Evaluated:
    """Build a device's answer to an evaluation task or any other task, with a score for each path."""
    paths = task.work.settings.population if isinstance(task.work, Evaluate) else ()
    return Evaluated(
        task_id=task.task_id,
        run_id=task.run_id,
        round=task.round,
        client_id=task.client_id,
        loss=1.0,
        accuracy=0.5,
        sample_count=samples,
        label_count=samples,
        measured_peak_bytes=0,
        seconds=1.0,
        message_id=f"evaluated.{task.task_id}.{samples}",
        scores=tuple(PathScore(loss=1.0, accuracy=1 / rank) for rank, _ in enumerate(paths, start=1)),
    )


def build_scores(task: Task, scores: tuple[CandidateScore, ...] = ()) -> Scores:
    """Build a device's answer to a scoring task: these scores, or one for each program, the last the best."""
    candidate_scores = scores or tuple(CandidateScore(score=float(index)) for index in range(len(task.programs)))
    return Scores(
        task_id=task.task_id,
        run_id=task.run_id,
        round=task.round,
        client_id=task.client_id,
        scores=candidate_scores,
        seconds=0.0,
    )


def complete_request(job: Supplied, planned: int, fails: bool) -> RequestDone:
    """Build the result of a background request other than a search."""
    program = ProgramRef(program_id="p", target="onnx", blob=blob("p"))
    match job:
        case TaskRequest():
            weights = blob(f"w{job.participant.size.architecture_id}")
            facts = ProgramFacts(planned_peak_bytes=planned)
            result: Any = PreparedTask(program=program, weights=weights, facts=facts)
        case ScoringRequest():
            result = tuple(
                Scorable(size=size, program=program, weights=blob("f"), planned_peak_bytes=planned)
                for size in job.sizes[fails:]
            )
        case EvaluationRequest():
            facts = ProgramFacts(planned_peak_bytes=planned)
            result = PreparedTask(program=program, weights=blob("use"), facts=facts)
        case ModelsRequest():
            result = ExportedModels(programs=(program,), models=())
        case ProgramRequest():
            result = ProgramFacts(planned_peak_bytes=planned)
        case CostRequest():
            result = ESTIMATES
        case _:
            never(job)
    return RequestDone(request=job, result=result)


def build_update(context: RunContext, task: Task) -> Update:
    """Build a device's answer to a training task."""
    return Update(
        task_id=task.task_id,
        run_id=task.run_id,
        round=task.round,
        client_id=task.client_id,
        blob=blob(task.task_id),
        sample_count=5,
        step_count=1,
        loss=1.0,
        accuracy=0.5,
        measured_peak_bytes=1,
        train_seconds=0.0,
        seconds=0.0,
        operator_examples=_list_operator_examples(context, task, 5),
    )


def reload_state(state: RunState, now_s: float) -> RunState:
    """Return the part of a state that the journal keeps over a restart of the server."""
    changes = list_changes(RunState(), state)
    loaded = build_state(
        [(change.part, change.key, change.text) for change in changes if change.text is not None], type(state.memory)
    )
    assert loaded.lineages == state.lineages, "the journal has the run's networks"
    assert loaded.memory == state.memory, "the journal has the memory of the method"
    scoring = isinstance(state.at, Searching)  # a search starts again
    return replace(loaded.restart(now_s), clients=MappingProxyType({}) if scoring else loaded.clients)
