"""States and events for tests of the coordinator."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from server.fake_device import CLASSES, PLENTY_BYTES, SHAPE
from server.server_rig import config

from subfleet.methods.assigner import open_stream
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.memory_plan import Packing
from subfleet.protocol.messages import Deployed, Presence, Profile, Refusal, Task, Telemetry, Update
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Reading
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.live import FleetMember, LiveState
from subfleet.rounds.networks import choose_networks, list_living_lineages
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.signals import Action, Event, Reply, RequestDone, RequestFailed
from subfleet.rounds.sizing import explore_sizes
from subfleet.rounds.state import ClientState, RunState, get_memory
from subfleet.rounds.tasks import request_task
from subfleet.rounds.work import (
    CostRequest,
    EvaluationRequest,
    ExportedModels,
    GenerationRequest,
    ModelsRequest,
    NetworksRequest,
    PreparedTask,
    ProgramRequest,
    ProposedGeneration,
    ScoringRequest,
    SearchRequest,
    TaskRequest,
)
from subfleet.search.queue import ProgramFacts, RequestedProgram, SizedProgram
from subfleet.serving.run_context import create_context as planned
from subfleet.settings.sections import Deadlines

CLIENTS = ("ada", "bob", "cyd")
PLAN_DEADLINES = Deadlines(lease_s=20.0)


def context_of(**changes: Any) -> RunContext:
    """Return the run context of the tests' configuration, with the product's default deadlines unless given."""
    settings = config(**{"deadlines": Deadlines(), **changes})
    return planned(settings, "run")


def profile(name: str) -> Profile:
    return Profile(
        client_id=name,
        session_id=f"{name}-1",
        device="fake",
        runtimes=("onnx",),
        sample_count=10,
        class_counts=(1,) * CLASSES,
        input_shape=SHAPE,
        memory_total_bytes=PLENTY_BYTES,
        memory_fraction=1.0,
    )


def run_with_members(*profiles: Profile, **member_fields: Any) -> RunState:
    """Return a run with these clients; `member_fields` are the fields of each `FleetMember`."""
    members = PersistentMap({client.client_id: FleetMember(**member_fields) for client in profiles})
    declared = PersistentMap({client.client_id: client for client in profiles})
    return RunState(profiles=declared, live=LiveState(members=members))


def join_client(context: RunContext, state: RunState, name: str, now_s: float) -> RunState:
    heard = Presence(client_id=name, session_id=f"{name}-1", online=True)
    state, _ = step(context, state, heard, now_s)
    return step(context, state, profile(name), now_s)[0]


def telemetry(
    context: RunContext, name: str, round_number: int = 1, memory_bytes: int = PLENTY_BYTES, *, attempt: int = 0
) -> Telemetry:
    return Telemetry(
        client_id=name,
        session_id=f"{name}-1",
        run_id=context.run_id,
        round=round_number,
        log_time_s=0.0,
        reading=Reading(memory_free_bytes=memory_bytes),
        memory_budget_bytes=memory_bytes,
        attempt=attempt,
    )


def measuring(context: RunContext) -> RunState:
    """Round 1 was announced at second 1."""
    state = RunState()
    for name in CLIENTS:
        state = join_client(context, state, name, 1.0)
    assert state.phase == "measure"
    return state


def blob(text: str, size_bytes: int = 1000) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(text.encode()).hexdigest(), size_bytes=size_bytes)


def prepared(
    context: RunContext,
    state: RunState,
    name: str,
    *,
    planned_peak_bytes: int = 1000,
    packings: tuple[Packing, ...] = (),
    operators: tuple[str, ...] = (),
    models: bool = False,
) -> Event:
    program = ProgramRef(program_id="program", target="onnx", blob=blob("program"))
    client = state.clients[name]
    if models:
        assert client.participant is not None
        request = ModelsRequest(participant=client.participant, round=state.round)
        return RequestDone(request=request, result=ExportedModels(programs=(program,), models=()))
    task = request_task(state, replace(client, stage="preparing"))
    assert task is not None
    facts = ProgramFacts(planned_peak_bytes=planned_peak_bytes, operators=operators, packings=packings)
    return RequestDone(
        request=task, result=PreparedTask(program=program, weights=blob(f"weights {size_of(client)}"), facts=facts)
    )


def task_failed(state: RunState, name: str, reason: str = "export failed: no") -> RequestFailed:
    """A client's task cannot be prepared."""
    task = request_task(state, replace(state.clients[name], stage="preparing"))
    assert task is not None
    return RequestFailed(request=task, reason=reason)


def program_result(
    state: RunState, queued: SizedProgram, planned_peak_bytes: int | None, operators: tuple[str, ...] = ()
) -> RequestDone:
    """A program for later rounds has been exported."""
    request = ProgramRequest(program=queued, round=state.round)
    facts = ProgramFacts(planned_peak_bytes=planned_peak_bytes, operators=operators)
    return RequestDone(request=request, result=facts)


def size_of(client: ClientState) -> str:
    """Return the identity of the submodel architecture that a client was assigned."""
    return "" if client.size is None else client.size.architecture_id


def scaled(client: ClientState, scale: float) -> ClientState:
    """Return the client state with its update scaled down."""
    assert client.trained is not None
    return replace(client, trained=replace(client.trained, scale=scale))


def request_program(client: ClientState) -> RequestedProgram | None:
    """Return the program that a client's assignment asks for."""
    return None if client.given is None else client.given.requested


def training(context: RunContext) -> RunState:
    """Every client has had its task since second 2."""
    state = measuring(context)
    for name in CLIENTS:
        state, _ = step(context, state, telemetry(context, name), 2.0)
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), 2.0)
    assert {client.stage for client in state.clients.values()} == {"out"}
    return state


def task(state: RunState, name: str) -> Task:
    sent_task = state.clients[name].task
    assert sent_task is not None
    return sent_task


def update(context: RunContext, state: RunState, name: str) -> Update:
    return Update(
        task_id=task(state, name).task_id,
        run_id=context.run_id,
        round=state.round,
        client_id=name,
        blob=blob(f"update {name} {state.round}"),
        sample_count=10,
        step_count=1,
        loss=1.0,
        accuracy=0.5,
        measured_peak_bytes=900,
        train_seconds=0.1,
        seconds=0.2,
    )


def refusal(context: RunContext, state: RunState, name: str, available_bytes: int | None = None) -> Refusal:
    return Refusal(
        task_id=task(state, name).task_id,
        run_id=context.run_id,
        round=state.round,
        client_id=name,
        reason="memory",
        detail="as told",
        available_bytes=available_bytes,
    )


def deployed(context: RunContext, state: RunState, name: str) -> Deployed:
    return Deployed(task_id=task(state, name).task_id, run_id=context.run_id, client_id=name, files=("model.onnx",))


W = TypeVar(
    "W",
    TaskRequest,
    ScoringRequest,
    EvaluationRequest,
    ModelsRequest,
    ProgramRequest,
    CostRequest,
    SearchRequest,
    NetworksRequest,
    GenerationRequest,
)


def select_requests(kind: type[W], actions: Iterable[Action]) -> list[W]:
    """Return the requests of one kind, in order."""
    return [action for action in actions if isinstance(action, kind)]


def perform_searches(
    context: RunContext, state: RunState, actions: Iterable[Action], now_s: float
) -> tuple[RunState, tuple[Action, ...]]:
    """Perform the searches that `actions` request; return the state and all actions so far."""
    follow_ups: tuple[Action, ...] = ()
    requests: tuple[SearchRequest | NetworksRequest, ...]
    requests = (*select_requests(SearchRequest, actions), *select_requests(NetworksRequest, actions))
    for request in requests:
        state, new_actions = step(context, state, perform_search(context, state, request), now_s)
        follow_ups += new_actions
    return state, (*actions, *follow_ups)


def perform_search(context: RunContext, state: RunState, request: SearchRequest | NetworksRequest) -> RequestDone:
    """Return the result of a search in a state."""
    if isinstance(request, SearchRequest):
        return RequestDone(request=request, result=explore_sizes(context, state))
    return RequestDone(request=request, result=choose_networks(context, state))


def score_generation(context: RunContext, state: RunState) -> ProposedGeneration:
    """Propose a generation; the score of each path depends on the path alone."""
    networks = (context.get_declared(lineage).network for lineage in list_living_lineages(context, state))
    supernet = next((network for network in networks if network.choices), None)
    if context.roles.networks.path_search is None or supernet is None:
        return ProposedGeneration(generation=None)
    search, seed = context.roles.networks.path_search, context.config.seed
    generation = search.propose(get_memory(context, state), supernet, seed)
    paths = () if generation is None else generation.paths
    scores = tuple(open_stream(" ".join(path)).random() for path in paths)
    return ProposedGeneration(generation=generation, scores=scores)


def replies(actions: Iterable[Action]) -> list[str]:
    return [action.ack.status for action in actions if isinstance(action, Reply)]
