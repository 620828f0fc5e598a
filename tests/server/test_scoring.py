"""Candidates that clients score before one is chosen for them, one (state, event) at a time."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from server.coordinator_cases import (
    CLIENTS,
    blob,
    context_of,
    measuring,
    prepared,
    refusal,
    replies,
    select_requests,
    size_of,
    task,
    telemetry,
    update,
)
from server.fake_device import PLENTY_BYTES
from server.server_rig import World, config, fleet

from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.methods.fedfa import FedFA
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.memory_plan import Packing
from subfleet.protocol.messages import Presence, Scores, Task
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Score
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import Action, AggregationRequest, Reply, RequestDone, SendTask, Tick, Withdraw
from subfleet.rounds.state import RunState
from subfleet.rounds.tasks import request_task
from subfleet.rounds.work import AggregatedRound, CheckRequest, Scorable, ScoringRequest, TaskRequest
from subfleet.testing.rounds import make_assignee, make_context
from subfleet.transport.in_memory import Faults

METHOD = FedFA(choice="score")
PLAN = context_of(method=METHOD, rates=(0.25, 0.5, 0.75, 1.0))
LARGEST = PLAN.space[-1].architecture_id


def architectures_of(task: Task) -> tuple[Architecture, ...]:
    """The candidates of a score task."""
    assert isinstance(task.work, Score)
    return tuple(submodel.architecture for submodel in task.submodels)


def propose_candidates() -> tuple[RunState, tuple[Action, ...]]:
    """All clients have sent telemetry at second 2."""
    return measure_all(measuring(PLAN), 1, 2.0)


def measure_all(state: RunState, round_number: int, now_s: float) -> tuple[RunState, tuple[Action, ...]]:
    """All clients answer a round's announcement; returns the actions of the last step, without acks."""
    actions: tuple[Action, ...] = ()
    for name in CLIENTS:
        state, actions = step(PLAN, state, telemetry(PLAN, name, round_number), now_s)
    return state, tuple(action for action in actions if not isinstance(action, Reply))


def candidates(
    state: RunState, name: str, planned_peak_bytes: int = 1000, packings: tuple[Packing, ...] = ()
) -> RequestDone:
    scorable = tuple(
        Scorable(
            size=size,
            program=ProgramRef(program_id=f"s{index}", target="onnx", blob=blob(f"score {index}")),
            weights=blob(f"first {size.architecture_id}"),
            planned_peak_bytes=planned_peak_bytes + index,
            packings=packings,
        )
        for index, size in enumerate(state.clients[name].proposals)
    )
    request = request_task(state, replace(state.clients[name], stage="scoring", task=None))
    assert request is not None
    return RequestDone(request=request, result=scorable)


def start_scoring() -> RunState:
    """Every client has its candidates since second 2."""
    state, _ = propose_candidates()
    for name in CLIENTS:
        state, _ = step(PLAN, state, candidates(state, name), 2.0)
    return state


def scores(state: RunState, name: str, *values: float | None, **changes: Any) -> Scores:
    known: dict[str, Any] = {
        "task_id": f"{PLAN.run_id}/r{state.round}/{name}/score",
        "run_id": PLAN.run_id,
        "round": state.round,
        "client_id": name,
        "scores": tuple(CandidateScore(score=value, reason="" if value is not None else "no") for value in values),
        "seconds": 0.1,
    }
    return Scores(**{**known, **changes})


def list_prepared(actions: tuple[Action, ...]) -> list[str]:
    """Ids of the sizes that are being prepared."""
    return [request.participant.size.architecture_id for request in select_requests(TaskRequest, actions)]


def test_candidates_that_fit_are_proposed_before_anything_is_trained() -> None:
    state, actions = propose_candidates()
    requests = select_requests(ScoringRequest, actions)
    assert [request.client_id for request in requests] == list(CLIENTS)
    assert len(requests) == len(actions)
    order = [size.architecture_id for size in PLAN.space]
    for action in requests:
        positions = [order.index(size.architecture_id) for size in action.sizes]
        assert len(positions) == 4
        assert positions == sorted(set(positions))
        assert positions[-1] == len(order) - 1
        assert state.clients[action.client_id].proposals == action.sizes
    state, actions = step(PLAN, state, candidates(state, "ada"), 3.0)
    (sending,) = actions
    assert isinstance(sending, SendTask)
    assert (sending.task.planned_peak_bytes, sending.task.deadline_s) == (1003, 299.0)
    assert architectures_of(sending.task) == state.clients["ada"].proposals
    assert isinstance(sending.task.work, Score)
    assert (sending.task.work.settings.micro_batch_size, sending.task.work.settings.learning_rate) == (4, 0.0)
    again, actions = step(PLAN, state, candidates(state, "ada"), 3.0)
    assert (again.clients, actions) == (state.clients, ())


def test_candidates_are_planned_for_the_width_of_the_devices_kernels() -> None:
    state, _ = propose_candidates()
    client = replace(state.clients["ada"], offer=replace(state.clients["ada"].offer, packing_width=32))
    state = replace(state, clients=MappingProxyType({**state.clients, "ada": client}))
    _, actions = step(PLAN, state, candidates(state, "ada", packings=(Packing(width=32, more_bytes=500),)), 3.0)
    assert [action.task.planned_peak_bytes for action in actions if isinstance(action, SendTask)] == [1503]
    far = candidates(state, "ada", packings=(Packing(width=32, more_bytes=2 * PLENTY_BYTES),))
    _, actions = step(PLAN, state, far, 3.0)
    assert not any(isinstance(action, SendTask) for action in actions)


def test_the_best_candidate_is_trained_in_the_same_round_and_kept_in_the_next() -> None:
    state = start_scoring()
    chosen = {}
    for name, values in zip(
        CLIENTS, [(1.0, 4.0, 2.0, 3.0), (-1.0, None, -3.0, -2.0), (5.0, 5.0, 5.0, None)], strict=True
    ):
        best = {"ada": 1, "bob": 0, "cyd": 2}[name]  # the largest of equal scores
        chosen[name] = state.clients[name].proposals[best].architecture_id
        state, actions = step(PLAN, state, scores(state, name, *values), 3.0)
        assert (replies(actions), list_prepared(actions)) == (["accepted"], [chosen[name]])
        assert Withdraw(task_id=f"run/r1/{name}/score") in actions
    for name in CLIENTS:
        state, actions = step(PLAN, state, prepared(PLAN, state, name), 4.0)
        assert [action.task.work.TYPE for action in actions if isinstance(action, SendTask)] == ["train"]
        state, _ = step(
            PLAN, state, RequestDone(request=CheckRequest(update=update(PLAN, state, name)), result=ChangeSize()), 5.0
        )
    assert state.phase == "aggregate"
    state, _ = step(
        PLAN,
        state,
        RequestDone(
            request=AggregationRequest(round=1, clients=()),
            result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
        ),
        6.0,
    )
    state, actions = measure_all(state, 2, 7.0)
    assert len(actions) == len(CLIENTS)
    assert list_prepared(actions) == list(chosen.values())


def test_scores_that_come_again_change_nothing() -> None:
    state = start_scoring()
    message = scores(state, "ada", 1.0, 2.0, 3.0, 2.0)
    state, _ = step(PLAN, state, message, 3.0)
    for _ in range(2):
        again, actions = step(PLAN, state, message, 3.0)
        assert (again.clients, replies(actions), len(actions)) == (state.clients, ["duplicate"], 1)
        state, _ = step(PLAN, state, prepared(PLAN, state, "ada"), 3.0)
        assert state.clients["ada"].stage == "out"


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"run_id": "other"}, (1.0,) * 4),
        ({"round": 2}, (1.0,) * 4),
        ({"task_id": "run/r1/ada/0"}, (1.0,) * 4),
        ({"client_id": "dan"}, (1.0,) * 4),
        ({}, (1.0,) * 3),
    ],
)
def test_scores_of_anything_else_are_refused_with_a_reason(changes: dict[str, Any], values: tuple[float, ...]) -> None:
    state = start_scoring()
    after, actions = step(PLAN, state, scores(state, "ada", *values, **changes), 3.0)
    assert (replies(actions), after.clients) == (["refused"], state.clients)


def test_an_update_is_no_answer_to_candidates() -> None:
    state = start_scoring()
    after, actions = step(PLAN, state, update(PLAN, state, "ada"), 3.0)
    assert (replies(actions), after.clients) == (["refused"], state.clients)


def test_a_client_without_scores_gets_a_size_that_fits_and_a_repetition_gets_nothing() -> None:
    state = start_scoring()
    state, actions = step(PLAN, state, scores(state, "ada", None, None, None, None), 3.0)
    assert (replies(actions), list_prepared(actions)) == (["accepted"], [LARGEST])
    refused = replace(refusal(PLAN, state, "bob"), reason="data")
    state, actions = step(PLAN, state, refused, 3.0)
    assert (replies(actions), list_prepared(actions)) == (["accepted"], [LARGEST])
    again, actions = step(PLAN, state, refused, 3.0)
    assert (replies(actions), again.clients) == (["duplicate"], state.clients)
    least = PLAN.first.candidates[0].training_memory_bytes["onnx"]
    state, actions = step(PLAN, state, refusal(PLAN, state, "cyd", least), 3.0)
    assert list_prepared(actions) == [PLAN.space[0].architecture_id], "the memory that is free now decides"


def test_scores_have_half_of_a_round_and_training_goes_on_without_them() -> None:
    state = start_scoring()
    message = scores(state, "ada", 1.0, 2.0, 3.0, 4.0)
    waiting, actions = step(PLAN, state, Tick(), 301.9)
    assert (waiting.clients, actions) == (state.clients, ())
    state, actions = step(PLAN, state, Tick(), 302.0)
    assert list_prepared(actions) == [LARGEST] * 3
    assert [action.task_id for action in actions if isinstance(action, Withdraw)] == [
        f"run/r1/{name}/score" for name in CLIENTS
    ]
    late, actions = step(PLAN, state, message, 303.0)
    assert (replies(actions), late.clients) == (["refused"], state.clients)


def test_programs_that_plan_too_much_are_not_scored() -> None:
    state, _ = propose_candidates()
    whole = candidates(state, "ada")
    large = [replace(scorable, planned_peak_bytes=10**10) for scorable in whole.result]
    some = replace(whole, result=(*whole.result[:2], *large[2:]))
    _, (sending,) = step(PLAN, state, some, 3.0)
    assert isinstance(sending, SendTask)
    assert architectures_of(sending.task) == state.clients["ada"].proposals[:2]
    for few in (whole.result[:1], (whole.result[0], *large[1:]), ()):
        after, actions = step(PLAN, state, replace(whole, result=tuple(few)), 3.0)
        assert list_prepared(actions) == [LARGEST], "a single candidate needs no score"
        assert after.clients["ada"].stage == "preparing"


def test_a_candidate_may_plan_the_whole_budget_and_no_byte_more() -> None:
    state, _ = propose_candidates()
    whole = candidates(state, "ada")
    budget = state.clients["ada"].offer.budget
    assert budget is not None
    for more, scored in ((0, 3), (1, 2)):
        last = replace(whole.result[2], planned_peak_bytes=budget.memory_bytes + more)
        _, (sending,) = step(PLAN, state, replace(whole, result=(*whole.result[:2], last)), 3.0)
        assert isinstance(sending, SendTask)
        assert len(architectures_of(sending.task)) == scored


def test_a_device_that_starts_anew_gets_its_candidates_again() -> None:
    state = start_scoring()
    anew = Presence(client_id="ada", session_id="ada-2", online=True)
    assert step(PLAN, state, anew, 3.0)[1] == (SendTask(task=task(state, "ada")),)


def reload(state: RunState, folder: Path) -> RunState:
    """The state that a restarted server loads."""
    engine = open_database(folder)
    run_id = begin_run(engine, name="test", settings="{}", round_count=2)
    journal = Journal(engine, run_id)
    journal.save(RunState(), state)
    loaded = journal.load(2.0)
    engine.dispose()
    return loaded


def test_candidates_and_the_chosen_one_survive_a_crash(tmp_path: Path) -> None:
    state, proposed_actions = propose_candidates()
    state, _ = step(PLAN, state, candidates(state, "ada"), 2.0)
    state, _ = step(PLAN, state, candidates(state, "bob"), 2.0)
    state, chosen = step(PLAN, state, scores(state, "bob", 1.0, 2.0, 1.0, 1.0), 3.0)
    loaded = reload(state, tmp_path)
    assert loaded.clients == state.clients
    actions = list_resume_actions(PLAN, loaded)
    assert SendTask(task=task(state, "ada")) in actions
    assert select_requests(ScoringRequest, actions) == select_requests(ScoringRequest, proposed_actions)[-1:]
    assert list_prepared(actions) == list_prepared(chosen) == [state.clients["bob"].proposals[1].architecture_id]
    after, actions = step(PLAN, loaded, scores(state, "ada", 1.0, 2.0, 1.0, 1.0), 4.0)
    assert size_of(after.clients["ada"]) == state.clients["ada"].proposals[1].architecture_id
    assert replies(actions) == ["accepted"]


def test_proposals_are_spread_reproducible_and_within_the_link_budget() -> None:
    context = make_context(FedFA(choice="score", proposals=3))
    propose = context.roles.assigner.propose
    assert propose is not None
    known = {
        name: tuple(candidate.architecture.architecture_id for candidate in propose(make_assignee(context, name)))
        for name in "abcdefgh"
    }
    assert known == {
        name: tuple(candidate.architecture.architecture_id for candidate in propose(make_assignee(context, name)))
        for name in "abcdefgh"
    }
    assert len(set(known.values())) > 1
    order = [candidate.architecture.architecture_id for candidate in context.first.candidates]
    half = (len(order) - 1) // 2
    for sizes in known.values():
        small, middle, large = (order.index(size) for size in sizes)
        assert small < half <= middle < large == len(order) - 1
    assert propose(make_assignee(context, "a", previous=context.space[0])) == ()
    assert propose(make_assignee(context, "a", memory_bytes=1)) == ()
    assert FedFA().roles().assigner.propose is None
    for link_bytes in range(0, 4 * context.first.candidates[-1].weight_bytes, 500):
        budget = Budget(memory_bytes=2**40, downlink_bytes=link_bytes)
        proposals = propose(replace(make_assignee(context, "a"), budget=budget))
        if len(proposals) > 1:
            assert sum(proposal.weight_bytes for proposal in proposals) + proposals[-1].weight_bytes <= link_bytes


@pytest.mark.parametrize("count", [1, 17])
def test_a_number_of_proposals_that_is_no_choice_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"proposals is {count}, but must be from 2 to 16"):
        FedFA(proposals=count)


def score_by_width(task: Task) -> tuple[float, ...]:
    """Scores of which the second smallest candidate has the best."""
    return tuple(float(index == 1) for index in range(len(architectures_of(task))))


def play(folder: Path, faults: Faults | None = None, *, kill: bool = False) -> World:
    settings = config(method=METHOD, rates=(0.25, 0.5, 0.75, 1.0), deploy_targets=())
    world = World(folder, settings, fleet(score=score_by_width), faults=faults)
    if kill:
        world.run(
            lambda: any(client.stage == "scoring" and client.task for client in world.server.state.clients.values())
        )
        world.kill_server()
        world.run(lambda: any(client.size is not None for client in world.server.state.clients.values()))
        world.kill_server()
    world.run()
    return world


@pytest.mark.slow
def test_a_run_has_the_same_bits_despite_losses_and_kills(tmp_path: Path) -> None:
    calm = play(tmp_path / "calm")
    rows = {(row.client_id, row.architecture_id) for record in calm.notes.records for row in record.clients}
    assert len(rows) == len(CLIENTS), "sizes do not change after the choice"
    for name, device in calm.devices.items():
        first = device.tasks[0]
        assert (name, architectures_of(first)[1].architecture_id) in rows
        assert [job.work.TYPE for job in device.tasks] == ["score", "train", "train"]
    rough = play(tmp_path / "rough", Faults(seed=3, loss=0.2, double=0.2, delay_s=1.5), kill=True)
    assert rough.model_bytes() == calm.model_bytes()


def test_after_a_crash_a_task_in_preparation_is_prepared_again() -> None:
    state, actions = propose_candidates()
    assert list_resume_actions(PLAN, state) == actions
