"""The coordinator, one (state, event) at a time."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from server.coordinator_cases import (
    CLIENTS,
    context_of,
    deployed,
    join_client,
    measuring,
    prepared,
    profile,
    refusal,
    replies,
    select_requests,
    size_of,
    task_failed,
    telemetry,
    training,
    update,
)
from server.fake_device import PLENTY_BYTES

from subfleet.protocol.memory_plan import Packing, PackingWidth
from subfleet.protocol.messages import Presence, Task
from subfleet.rounds.announcing import build_round_info
from subfleet.rounds.assigning import build_question
from subfleet.rounds.coordinator import step
from subfleet.rounds.judging import MAX_HEADER_BYTES
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.phases import AT_ONCE
from subfleet.rounds.progress import Finished, Measuring
from subfleet.rounds.signals import AggregationRequest, GoOn, RequestDone, RequestFailed, SendTask, Tick, Withdraw
from subfleet.rounds.state import RunState
from subfleet.rounds.work import AggregatedRound, CheckRequest, ModelsRequest, TaskRequest
from subfleet.settings.sections import Deadlines

PLAN = context_of()


def _send_updates(state: RunState) -> RunState:
    for name in CLIENTS:
        state, _ = step(
            PLAN, state, RequestDone(request=CheckRequest(update=update(PLAN, state, name)), result=ChangeSize()), 5.0
        )
    return state


def _deploy_phase() -> RunState:
    state = _send_updates(training(PLAN))
    aggregated = RequestDone(
        request=AggregationRequest(round=1, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
    )
    context = context_of(rounds=1)
    state, actions = step(context, state, aggregated, 6.0)
    assert [request.participant.client_id for request in select_requests(ModelsRequest, actions)] == list(CLIENTS)
    return state


def describe_request(action: TaskRequest) -> tuple[int, str]:
    """Return the attempt of a request and its architecture."""
    return action.attempt, action.participant.size.architecture_id


def test_a_round_opens_when_enough_clients_are_there() -> None:
    state = RunState()
    for index, name in enumerate(CLIENTS):
        assert state.phase == "waiting"
        state = join_client(PLAN, state, name, 1.0)
        assert state.phase == ("measure" if index == len(CLIENTS) - 1 else "waiting")
    assert state.round == 1


def test_too_few_clients_fail_at_the_deadline() -> None:
    context = context_of(deadlines=Deadlines(join_s=10))
    state = join_client(context, RunState(), "ada", 1.0)
    assert step(context, state, Tick(), 9.9)[0].phase == "waiting"
    state, _ = step(context, state, Tick(), 10.0)
    assert state.phase == "failed"
    assert "1 of 3 clients" in state.failure


def test_the_goodbye_of_an_unknown_client_is_ignored() -> None:
    goodbye = Presence(client_id="eve", session_id="", online=False)
    assert step(PLAN, RunState(), goodbye, 1.0)[0].live.members == {}


def test_telemetry_is_accepted_once_and_only_for_the_open_round() -> None:
    state = measuring(PLAN)
    state, actions = step(PLAN, state, telemetry(PLAN, "ada"), 2.0)
    assert replies(actions) == ["accepted"]
    assert replies(step(PLAN, state, telemetry(PLAN, "ada"), 2.0)[1]) == ["duplicate"]
    assert replies(step(PLAN, state, telemetry(PLAN, "bob", round_number=2), 2.0)[1]) == ["refused"]
    other = replace(telemetry(PLAN, "bob"), run_id="another")
    assert replies(step(PLAN, state, other, 2.0)[1]) == ["refused"]
    regular = replace(telemetry(PLAN, "bob"), run_id=None, round=None)
    assert step(PLAN, state, regular, 2.0)[1] == ()


def test_telemetry_before_the_profile_waits_for_it() -> None:
    state = measuring(PLAN)
    assert step(PLAN, state, telemetry(PLAN, "new"), 2.0)[1] == ()


def test_tasks_are_prepared_when_everyone_has_answered() -> None:
    state = measuring(PLAN)
    for name in CLIENTS[:-1]:
        state, _ = step(PLAN, state, telemetry(PLAN, name), 2.0)
    assert state.phase == "measure"
    state, actions = step(PLAN, state, telemetry(PLAN, CLIENTS[-1]), 2.0)
    assert state.phase == "train"
    assert [request.participant.client_id for request in select_requests(TaskRequest, actions)] == list(CLIENTS)


def test_the_silent_are_missing_after_the_deadline_and_late_telemetry_is_refused() -> None:
    state = measuring(PLAN)
    state, _ = step(PLAN, state, telemetry(PLAN, "ada"), 2.0)
    state, _ = step(PLAN, state, Tick(), 1.0 + PLAN.config.deadlines.measure_s)
    assert state.phase == "train"
    assert state.clients["bob"].stage == "missing"
    assert state.live.members["bob"].silent_since == 1
    assert replies(step(PLAN, state, telemetry(PLAN, "bob"), 40.0)[1]) == ["refused"]


def test_without_answers_there_is_no_round() -> None:
    state, actions = step(PLAN, measuring(PLAN), Tick(), 1.0 + PLAN.config.deadlines.measure_s)
    assert (state.phase, state.aggregated_round, actions) == ("waiting", 0, ())


@pytest.mark.parametrize(("width", "more_bytes"), [(None, 0), (8, -30), (16, 0), (32, 50)])
def test_a_plan_is_compared_with_a_budget_by_the_width_of_the_devices_kernels(
    width: PackingWidth | None, more_bytes: int
) -> None:
    packings = (Packing(width=8, more_bytes=-30), Packing(width=32, more_bytes=50))
    state, _ = step(PLAN, RunState(), Presence(client_id="ada", session_id="ada-1", online=True), 1.0)
    state, _ = step(PLAN, state, replace(profile("ada"), packing_width=width), 1.0)
    for name in CLIENTS[1:]:
        state = join_client(PLAN, state, name, 1.0)
    for name in CLIENTS:
        state, _ = step(PLAN, state, telemetry(PLAN, name), 2.0)
    most_bytes = PLENTY_BYTES - more_bytes
    over = prepared(PLAN, state, "ada", planned_peak_bytes=most_bytes + 1, packings=packings)
    refused, _ = step(PLAN, state, over, 2.0)
    assert refused.clients["ada"].stage == "preparing"
    question = build_question(PLAN, replace(refused, round=2), refused.clients["ada"])
    assert [written.facts.planned_peak_bytes for written in question.written.values()] == [PLENTY_BYTES + 1]
    fitting, actions = step(
        PLAN, state, prepared(PLAN, state, "ada", planned_peak_bytes=most_bytes, packings=packings), 2.0
    )
    assert fitting.clients["ada"].stage == "out"
    assert [action.task.planned_peak_bytes for action in actions if isinstance(action, SendTask)] == [PLENTY_BYTES]


def test_a_program_that_plans_too_much_leads_to_the_next_smaller_submodel() -> None:
    state = measuring(PLAN)
    for name in CLIENTS:
        state, _ = step(PLAN, state, telemetry(PLAN, name), 2.0)
    sizes = [size.architecture_id for size in PLAN.space]
    index = sizes.index(size_of(state.clients["ada"]))
    fitting, _ = step(PLAN, state, prepared(PLAN, state, "ada", planned_peak_bytes=PLENTY_BYTES), 2.0)
    assert fitting.clients["ada"].stage == "out"
    state, actions = step(PLAN, state, prepared(PLAN, state, "ada", planned_peak_bytes=PLENTY_BYTES + 1), 2.0)
    assert [describe_request(request) for request in select_requests(TaskRequest, actions)] == [(0, sizes[index - 1])]
    for _ in range(index):
        state, actions = step(PLAN, state, prepared(PLAN, state, "ada", planned_peak_bytes=10**12), 2.0)
    assert state.clients["ada"].stage == "skipped"
    assert "no submodel below" in state.clients["ada"].reason


def test_an_export_for_an_earlier_choice_is_ignored() -> None:
    state = training(PLAN)
    repeated, actions = step(PLAN, state, prepared(PLAN, state, "ada"), 3.0)
    assert (repeated.clients["ada"], actions) == (state.clients["ada"], ())


def test_an_update_is_fetched_then_accepted_then_a_duplicate() -> None:
    state = training(PLAN)
    offered = update(PLAN, state, "ada")
    after, actions = step(PLAN, state, offered, 3.0)
    assert (after.clients, actions) == (state.clients, (CheckRequest(update=offered),))
    state, actions = step(PLAN, after, RequestDone(request=CheckRequest(update=offered), result=ChangeSize()), 4.0)
    assert replies(actions) == ["accepted"]
    assert Withdraw(task_id=offered.task_id) in actions
    for event in (offered, RequestDone(request=CheckRequest(update=offered), result=ChangeSize())):
        assert replies(step(PLAN, state, event, 5.0)[1]) == ["duplicate"]


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 2},
        {"run_id": "another"},
        {"task_id": "another"},
        {"client_id": "stranger"},
    ],
)
def test_an_update_for_anything_else_is_refused_with_a_reason(changes: dict[str, Any]) -> None:
    state = training(PLAN)
    wrong = replace(update(PLAN, state, "ada"), **changes)
    after, actions = step(PLAN, state, wrong, 3.0)
    assert replies(actions) == ["refused"]
    assert actions[0].ack.reason  # type: ignore[union-attr]  # `replies` has checked that it is a Reply
    assert after.clients == state.clients


def test_an_update_that_announces_too_much_is_refused_before_it_is_fetched() -> None:
    state = training(PLAN)
    offered = update(PLAN, state, "ada")
    huge = replace(offered, blob=replace(offered.blob, size_bytes=2**40))
    assert replies(step(PLAN, state, huge, 3.0)[1]) == ["refused"]
    (weights,) = _get_task(state, "ada").weights
    for more, answer in ((0, []), (1, ["refused"])):
        size_bytes = MAX_HEADER_BYTES + weights.size_bytes + more
        large = replace(offered, blob=replace(offered.blob, size_bytes=size_bytes))
        assert replies(step(PLAN, state, large, 3.0)[1]) == answer


def test_an_update_after_the_close_is_refused_unless_it_was_accepted() -> None:
    state = training(PLAN)
    early, late = update(PLAN, state, "ada"), update(PLAN, state, "bob")
    state, _ = step(PLAN, state, RequestDone(request=CheckRequest(update=early), result=ChangeSize()), 3.0)
    state, actions = step(PLAN, state, Tick(), 2.0 + PLAN.config.deadlines.round_s)
    aggregate = next(action for action in actions if isinstance(action, AggregationRequest))
    assert [client.client_id for client in aggregate.clients] == ["ada"]
    assert replies(
        step(PLAN, state, RequestDone(request=CheckRequest(update=late), result=ChangeSize()), 700.0)[1]
    ) == ["refused"]
    state, _ = step(
        PLAN,
        state,
        RequestDone(
            request=AggregationRequest(round=1, clients=()),
            result=AggregatedRound(accuracy=1.0, loss=0.0, sha256="0" * 64, refused={}),
        ),
        700.0,
    )
    assert replies(step(PLAN, state, early, 701.0)[1]) == ["duplicate"]
    assert replies(step(PLAN, state, late, 701.0)[1]) == ["refused"]


def test_a_rejected_update_ends_its_client() -> None:
    state = training(PLAN)
    offered = update(PLAN, state, "ada")
    state, actions = step(PLAN, state, RequestFailed(request=CheckRequest(update=offered), reason="not finite"), 3.0)
    assert (state.clients["ada"].stage, state.clients["ada"].reason) == ("refused", "not finite")
    assert replies(actions) == ["refused"]


def test_a_refusal_for_memory_gives_a_smaller_task_and_its_repetition_nothing() -> None:
    state = training(PLAN)
    first = refusal(PLAN, state, "ada", available_bytes=10**9)
    sizes = [size.architecture_id for size in PLAN.space]
    smaller = sizes[sizes.index(size_of(state.clients["ada"])) - 1]
    state, actions = step(PLAN, state, first, 3.0)
    assert replies(actions) == ["accepted"]
    assert [describe_request(request) for request in select_requests(TaskRequest, actions)] == [(1, smaller)]
    repeated, actions = step(PLAN, state, first, 3.0)
    assert (replies(actions), repeated.clients) == (["duplicate"], state.clients)
    state, actions = step(PLAN, state, prepared(PLAN, state, "ada"), 3.0)
    sent_task = next(action.task for action in actions if isinstance(action, SendTask))
    assert sent_task.task_id != first.task_id
    assert replies(step(PLAN, state, first, 3.0)[1]) == ["duplicate"]


def test_a_restarted_device_gets_its_task_again() -> None:
    state = training(PLAN)
    same = Presence(client_id="ada", session_id="ada-1", online=True)
    assert step(PLAN, state, same, 3.0)[1] == ()
    restarted = Presence(client_id="ada", session_id="ada-2", online=True)
    assert step(PLAN, state, restarted, 3.0)[1] == (SendTask(task=_get_task(state, "ada")),)


def _get_task(state: RunState, name: str) -> Task:
    task = state.clients[name].task
    assert task is not None
    return task


def test_a_will_of_an_earlier_session_is_ignored() -> None:
    state = training(PLAN)
    old = Presence(client_id="ada", session_id="ada-0", online=False)
    assert step(PLAN, state, old, 3.0)[0].live.members["ada"].heard_s is not None
    will = Presence(client_id="ada", session_id="ada-1", online=False)
    assert step(PLAN, state, will, 3.0)[0].live.members["ada"].heard_s is None


def test_a_client_past_its_lease_is_waited_for_in_a_strict_run_alone() -> None:
    for quorum, phase in ((1.0, "measure"), (0.5, "train")):
        context = context_of(quorum=quorum, min_clients=2, deadlines=Deadlines(lease_s=10.0, measure_s=100.0))
        state = RunState()
        for name, heard_s in (("cyd", 0.0), ("ada", 9.0), ("bob", 9.0)):
            state = join_client(context, state, name, heard_s)
        state = replace(
            state, at=Measuring(), round=1, live=replace(state.live, entered_s=9.0), clients=MappingProxyType({})
        )
        for name in ("ada", "bob"):
            state, _ = step(context, state, telemetry(context, name), 12.0)
        assert state.phase == phase


def test_a_failed_export_skips_the_client() -> None:
    state = measuring(PLAN)
    for name in CLIENTS:
        state, _ = step(PLAN, state, telemetry(PLAN, name), 2.0)
    state, _ = step(PLAN, state, task_failed(state, "ada"), 3.0)
    assert (state.clients["ada"].stage, state.clients["ada"].reason) == ("skipped", "export failed: no")


def test_the_deploy_phase_ends_when_everyone_has_its_models_or_at_its_deadline() -> None:
    context = context_of(rounds=1)
    state = _deploy_phase()
    for name in CLIENTS:
        state, actions = step(context, state, prepared(context, state, name, models=True), 7.0)
        assert [action.task.work.TYPE for action in actions if isinstance(action, SendTask)] == ["deploy"]
    for name in CLIENTS[:-1]:
        state, actions = step(context, state, deployed(context, state, name), 8.0)
        assert replies(actions) == ["accepted"]
    assert state.phase == "deploy"
    late, _ = step(context, state, Tick(), 6.0 + context.config.deadlines.deploy_s)
    assert (late.phase, late.clients[CLIENTS[-1]].stage) == ("finished", "missing")
    done, _ = step(context, state, deployed(context, state, CLIENTS[-1]), 8.0)
    assert done.phase == "finished"
    again = deployed(context, state, CLIENTS[0])
    assert replies(step(context, done, again, 9.0)[1]) == ["duplicate"]


def test_each_step_requests_the_models_of_a_few_clients_and_each_once() -> None:
    context, state = context_of(rounds=1), _deploy_phase()
    names = tuple(f"c{number:04}" for number in range(2 * AT_ONCE + 1))
    last = {name: replace(state.last["ada"], client_id=name) for name in names}
    state = replace(state, last=MappingProxyType(last), clients=MappingProxyType({}))
    requested = list[str]()
    for _ in range(4):
        assert state.phase == "deploy"
        state, actions = step(context, state, Tick(), 6.0)
        clients = [request.participant.client_id for request in select_requests(ModelsRequest, actions)]
        assert (len(clients), any(isinstance(action, GoOn) for action in actions)) in {
            (AT_ONCE, True),
            (1, False),
            (0, False),
        }
        requested += clients
    assert requested == [*names]


def test_the_announcement_of_a_round() -> None:
    state = measuring(PLAN)
    info = build_round_info(PLAN, state, 3.0)
    assert info is not None
    assert (info.round, info.phase, info.log_time_s) == (1, "measure", 0.0)
    assert info.deadline_s == PLAN.config.deadlines.measure_s - 2.0
    assert build_round_info(PLAN, RunState(), 0.0) is None
    finished = build_round_info(PLAN, replace(state, at=Finished()), 3.0)
    assert finished is not None
    assert finished.phase == "finished"


def test_a_failed_export_of_models_skips_a_client_with_a_second_task() -> None:
    context = context_of(rounds=1)
    state = training(context)
    again, _ = step(context, state, refusal(context, state, "ada"), 3.0)
    state, _ = step(context, again, prepared(context, again, "ada"), 3.0)
    for name in CLIENTS:
        state, _ = step(
            context,
            state,
            RequestDone(request=CheckRequest(update=update(context, state, name)), result=ChangeSize()),
            4.0,
        )
    aggregated = RequestDone(
        request=AggregationRequest(round=1, clients=()),
        result=AggregatedRound(accuracy=0.5, loss=1.0, sha256="0" * 64, refused={}),
    )
    state, _ = step(context, state, aggregated, 5.0)
    assert state.phase == "deploy"
    participant = state.clients["ada"].participant
    assert participant is not None
    failed = RequestFailed(request=ModelsRequest(participant=participant, round=1), reason="export failed")
    state, _ = step(context, state, failed, 6.0)
    assert (state.clients["ada"].stage, state.clients["ada"].reason) == ("skipped", "export failed")


def test_control_characters_of_a_refusal_reach_no_terminal() -> None:
    context = context_of()
    state = training(context)
    refused = replace(refusal(context, state, "ada"), reason="data", detail="\x1b[2J gone\n")
    state, _ = step(context, state, refused, 3.0)
    assert state.clients["ada"].reason == "data:  [2J gone "
