"""States and events for tests of the coordinator."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from server.fake_device import CLASSES, PLENTY_BYTES, SHAPE
from server.server_rig import config

from subfleet.methods.assigner import stream_of
from subfleet.methods.path_search import ProposalContext
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.memory import Packing
from subfleet.protocol.messages import Deployed, Presence, Profile, Refusal, Task, Telemetry, Update
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Reading
from subfleet.rounds.actions import Action, Reply
from subfleet.rounds.coordinator import step
from subfleet.rounds.events import Done, Event, Failed
from subfleet.rounds.live import LiveState, Member
from subfleet.rounds.networks import beginning_of, lineages_in_use
from subfleet.rounds.persistent import PersistentMap
from subfleet.rounds.seating import task_wanted
from subfleet.rounds.sizing import explored
from subfleet.rounds.state import RunState, Seat, remembered
from subfleet.rounds.terms import Terms
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
from subfleet.rounds.written import ProgramFacts
from subfleet.search.queue import SizedProgram, Wish
from subfleet.serving.terms import terms_of as planned
from subfleet.settings.timing import Deadlines

CLIENTS = ("ada", "bob", "cyd")
PLAN_DEADLINES = Deadlines(lease_s=20.0)


def terms_of(**changes: Any) -> Terms:
    """The terms of the tests' configuration; deadlines are the product's own where none are given."""
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
        memory_share=1.0,
    )


def known(*profiles: Profile, **of_member: Any) -> RunState:
    """A run that knows these clients, each heard as `of_member` says."""
    members = PersistentMap({one.client_id: Member(**of_member) for one in profiles})
    declared = PersistentMap({one.client_id: one for one in profiles})
    return RunState(profiles=declared, live=LiveState(members=members))


def joined(terms: Terms, state: RunState, name: str, now_s: float) -> RunState:
    heard = Presence(client_id=name, session_id=f"{name}-1", online=True)
    state, _ = step(terms, state, heard, now_s)
    return step(terms, state, profile(name), now_s)[0]


def telemetry(
    terms: Terms, name: str, round_number: int = 1, memory_bytes: int = PLENTY_BYTES, *, retry: int = 0
) -> Telemetry:
    return Telemetry(
        client_id=name,
        session_id=f"{name}-1",
        run_id=terms.run_id,
        round=round_number,
        log_time_s=0.0,
        reading=Reading(memory_free_bytes=memory_bytes),
        memory_budget_bytes=memory_bytes,
        retry=retry,
    )


def measuring(terms: Terms) -> RunState:
    """Round 1 was announced at second 1."""
    state = RunState()
    for name in CLIENTS:
        state = joined(terms, state, name, 1.0)
    assert state.phase == "measure"
    return state


def blob(text: str, size_bytes: int = 1000) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(text.encode()).hexdigest(), size_bytes=size_bytes)


def prepared(
    terms: Terms,
    state: RunState,
    name: str,
    *,
    planned_peak_bytes: int = 1000,
    packings: tuple[Packing, ...] = (),
    operators: tuple[str, ...] = (),
    models: bool = False,
) -> Event:
    program = ProgramRef(program_id="program", target="onnx", blob=blob("program"))
    seat = state.seats[name]
    if models:
        assert seat.participant is not None
        wanted = ModelsRequest(participant=seat.participant, round=state.round)
        return Done(request=wanted, result=ExportedModels(programs=(program,), models=()))
    task = task_wanted(state, seat)
    assert task is not None
    facts = ProgramFacts(planned_peak_bytes=planned_peak_bytes, operators=operators, packings=packings)
    return Done(
        request=task, result=PreparedTask(program=program, weights=blob(f"weights {size_of(seat)}"), facts=facts)
    )


def task_failed(state: RunState, name: str, reason: str = "export failed: no") -> Failed:
    """A client's task cannot be made."""
    task = task_wanted(state, state.seats[name])
    assert task is not None
    return Failed(request=task, reason=reason)


def written_ahead(
    state: RunState, queued: SizedProgram, planned_peak_bytes: int, operators: tuple[str, ...] = ()
) -> Done:
    """A program for later rounds is there."""
    wanted = ProgramRequest(program=queued, round=state.round)
    facts = ProgramFacts(planned_peak_bytes=planned_peak_bytes, operators=operators)
    return Done(request=wanted, result=facts)


def size_of(seat: Seat) -> str:
    """Identity of what a client was given."""
    return "" if seat.size is None else seat.size.spec_id


def scaled(seat: Seat, scale: float) -> Seat:
    """A client's place in a round, its update counting less."""
    assert seat.trained is not None
    return replace(seat, trained=replace(seat.trained, scale=scale))


def wish_of(seat: Seat) -> Wish | None:
    """What a client would rather have been given."""
    return None if seat.given is None else seat.given.wanted


def training(terms: Terms) -> RunState:
    """Every client has its task since second 2."""
    state = measuring(terms)
    for name in CLIENTS:
        state, _ = step(terms, state, telemetry(terms, name), 2.0)
    for name in CLIENTS:
        state, _ = step(terms, state, prepared(terms, state, name), 2.0)
    assert {seat.stage for seat in state.seats.values()} == {"out"}
    return state


def task(state: RunState, name: str) -> Task:
    given = state.seats[name].task
    assert given is not None
    return given


def update(terms: Terms, state: RunState, name: str) -> Update:
    return Update(
        task_id=task(state, name).task_id,
        run_id=terms.run_id,
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


def refusal(terms: Terms, state: RunState, name: str, available_bytes: int | None = None) -> Refusal:
    return Refusal(
        task_id=task(state, name).task_id,
        run_id=terms.run_id,
        round=state.round,
        client_id=name,
        reason="memory",
        detail="as told",
        available_bytes=available_bytes,
    )


def deployed(terms: Terms, state: RunState, name: str) -> Deployed:
    return Deployed(task_id=task(state, name).task_id, run_id=terms.run_id, client_id=name, files=("model.onnx",))


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


def wanted_of(kind: type[W], actions: Iterable[Action]) -> list[W]:
    """The requests of one kind, in order."""
    return [one for one in actions if isinstance(one, kind)]


def looked_around(
    terms: Terms, state: RunState, actions: Iterable[Action], now_s: float
) -> tuple[RunState, tuple[Action, ...]]:
    """The state, and what is then to be done, after what actions have looked for is found."""
    found: tuple[Action, ...] = ()
    wanted: tuple[SearchRequest | NetworksRequest, ...]
    wanted = (*wanted_of(SearchRequest, actions), *wanted_of(NetworksRequest, actions))
    for one in wanted:
        state, more = step(terms, state, looked_for(terms, state, one), now_s)
        found += more
    return state, (*actions, *found)


def looked_for(terms: Terms, state: RunState, request: SearchRequest | NetworksRequest) -> Done:
    """What comes of a look at a state."""
    if isinstance(request, SearchRequest):
        return Done(request=request, result=explored(terms, state))
    return Done(request=request, result=beginning_of(terms, state))


def scored_by_chance(terms: Terms, state: RunState) -> ProposedGeneration:
    """A generation with scores that follow from its paths alone."""
    found = (terms.declared(one).network for one in lineages_in_use(terms, state))
    supernet = next((one for one in found if one.choices), None)
    if terms.roles.networks.path_search is None or supernet is None:
        return ProposedGeneration(generation=None)
    proposing = ProposalContext(network=supernet, memory=remembered(terms, state), seed=terms.config.seed)
    generation = terms.roles.networks.path_search.propose(proposing)
    paths = () if generation is None else generation.paths
    scores = tuple(stream_of(" ".join(path)).random() for path in paths)
    return ProposedGeneration(generation=generation, scores=scores)


def replies(actions: Iterable[Action]) -> list[str]:
    return [action.receipt.status for action in actions if isinstance(action, Reply)]
