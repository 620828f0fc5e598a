"""The agent's transitions: the actions that each event leads to."""

import math
from dataclasses import replace
from typing import get_args

import pytest
from agent.agent_cases import (
    RESULT,
    Agent,
    announce,
    blob,
    connected_agent,
    deploy_task,
    find_action,
    kinds,
    profile,
    train_task,
)

from subfleet.agent.actions import (
    CancelFetch,
    Fetch,
    Keep,
    Leave,
    MeasureForRound,
    MeasureForTask,
    PlaceModels,
    Prune,
    Publish,
    Save,
    Settle,
    StartWork,
    StopWork,
)
from subfleet.agent.events import BlobArrived, BlobFailed, LinkDown, LinkUp, TimePassed
from subfleet.agent.outcomes import ModelsPlaced, TrainingEnded, WorkFailed
from subfleet.agent.states import AgentSettings
from subfleet.protocol.messages import Ack, Deployed, Presence, Profile, Refusal, Telemetry, Update, decode, encode
from subfleet.protocol.reasons import RefusalReason


def ack(of: str, status: str = "accepted") -> Ack:
    return Ack(of=of, status=status)  # type: ignore[arg-type]  # a test's shorthand for a Literal


# --- presence and telemetry ---


def test_on_every_connect_presence_and_profile_are_published_retained() -> None:
    agent = Agent()
    for _ in range(2):
        published = [action for action in agent.step(LinkUp()) if isinstance(action, Publish)]
        assert [type(action.message) for action in published] == [Presence, Profile]
        assert all(action.retain for action in published)
        agent.step(LinkDown())


def test_heartbeats_and_live_telemetry_come_at_their_intervals_and_only_while_connected() -> None:
    agent = connected_agent()
    kinds_published = []
    for _ in range(21):
        kinds_published += [type(action.message) for action in agent.see(TimePassed()) if isinstance(action, Publish)]
        agent.now_s += 1.0
    assert kinds_published.count(Presence) == kinds_published.count(Profile) == 4
    assert kinds_published.count(Telemetry) == 5
    agent.step(LinkDown())
    assert agent.see(TimePassed()) == ()


def test_an_announcement_is_answered_at_once_with_a_reading_at_its_log_time() -> None:
    agent = connected_agent()
    actions = agent.hear(announce(2))
    assert find_action(actions, MeasureForRound).info.log_time_s == 10.0
    telemetry = find_action(actions, Keep).message
    assert (telemetry.run_id, telemetry.round, telemetry.log_time_s) == ("run", 2, 10.0)
    assert telemetry.memory_budget_bytes == 1000


def test_round_telemetry_is_kept_until_its_ack_or_the_next_phase_or_the_deadline() -> None:
    agent = connected_agent()
    telemetry = find_action(agent.hear(announce(1)), Keep).message
    assert find_action(agent.hear(ack(telemetry.message_id)), Settle).message_id == telemetry.message_id
    telemetry = find_action(agent.hear(announce(2)), Keep).message
    assert find_action(agent.hear(announce(2, "train")), Settle).message_id == telemetry.message_id
    telemetry = find_action(agent.hear(announce(3)), Keep).message
    agent.now_s += 30.0
    assert find_action(agent.see(TimePassed()), Settle).message_id == telemetry.message_id
    assert agent.state.pending == ()


def test_a_repeated_announcement_is_answered_under_the_same_id() -> None:
    agent = connected_agent()
    first, second = (find_action(agent.hear(announce(1)), Keep).message for _ in range(2))
    assert first == second
    assert len(agent.state.pending) == 1


# --- a training ---


def test_a_training_from_task_to_ack() -> None:
    agent = connected_agent()
    agent.hear(announce(1, "train"))
    task = train_task()
    actions = agent.hear(task)
    assert find_action(actions, Publish).message == ack_of(task, "accepted")
    assert {action.blob for action in actions if isinstance(action, Fetch)} == {blob("program"), blob("weights t1")}
    assert kinds(agent.see(BlobArrived(sha256=blob("program").sha256))) == []
    actions = agent.see(BlobArrived(sha256=blob("weights t1").sha256))
    assert find_action(actions, MeasureForTask)
    assert find_action(actions, StartWork).memory_limit_bytes == 1000
    agent.now_s += 7.0
    actions = agent.finish(task)
    update = find_action(actions, Keep).message
    assert isinstance(update, Update)
    assert (update.task_id, update.blob, update.loss, update.seconds) == ("t1", blob("update t1"), 1.5, 7.0)
    actions = agent.hear(ack(update.message_id))
    assert find_action(actions, Settle).message_id == update.message_id
    assert find_action(actions, Prune).keep == {blob("program").sha256}
    assert agent.state.pending == ()


def ack_of(task: object, status: str, reason: str = "") -> Ack:
    message_id = getattr(task, "message_id", "")
    return Ack(of=message_id, status=status, reason=reason, message_id=f"ack.s1.{message_id}")  # type: ignore[arg-type]  # as above


def test_whatever_must_survive_is_saved_before_it_is_sent() -> None:
    agent = connected_agent()
    for actions in (agent.train(train_task()), agent.finish(train_task())):
        names = kinds(actions)
        assert names.index("Save") < min(names.index(name) for name in ("Keep", "Publish") if name in names)
    saved = find_action(actions, Save).saved
    assert saved.task is None
    assert [update.task_id for update in saved.updates] == ["t1"]
    assert saved.done == ("t1",)


def test_a_training_waits_for_the_announcement_of_its_round() -> None:
    agent = connected_agent()
    agent.hear(announce(1))
    assert not any(isinstance(action, Fetch) for action in agent.hear(train_task("t2", 2)))
    assert any(isinstance(action, Fetch) for action in agent.hear(announce(2)))


@pytest.mark.parametrize(("free_bytes", "refused"), [(1000, False), (999, True)])
def test_the_planned_peak_must_fit_the_budget_of_now(free_bytes: int, refused: bool) -> None:
    agent = connected_agent(free_bytes=free_bytes)
    actions = agent.train(train_task())
    assert any(isinstance(action, StartWork) for action in actions) is not refused
    if refused:
        refusal = find_action(actions, Keep).message
        assert (refusal.reason, refusal.available_bytes) == ("memory", 499)


@pytest.mark.parametrize("reason", get_args(RefusalReason))
def test_a_failed_training_is_refused_with_its_reason(reason: str) -> None:
    agent = connected_agent()
    agent.train(train_task())
    failed = WorkFailed(task_id="t1", reason=reason, detail="x" * 1000, available_bytes=7)  # type: ignore[arg-type]  # a Literal
    refusal = find_action(agent.step(failed), Keep).message
    assert (refusal.reason, refusal.available_bytes, len(refusal.detail)) == (reason, 7, 500)
    assert agent.state.current is None
    assert agent.state.running is None


def test_a_refusal_of_an_error_with_any_characters_can_be_sent() -> None:
    agent = connected_agent()
    agent.train(train_task())
    failed = WorkFailed(task_id="t1", reason="data", detail="no image: \udcff\0.png", available_bytes=None)
    refusal = find_action(agent.step(failed), Keep).message
    assert decode(encode(refusal)) == refusal
    assert refusal.detail == "no image: ??.png"


def test_a_loss_that_is_not_finite_is_a_refusal() -> None:
    agent = connected_agent()
    agent.train(train_task())
    result = replace(RESULT, loss=math.nan)
    refusal = find_action(agent.step(TrainingEnded(task_id="t1", result=result, blob=blob("u"))), Keep).message
    assert (refusal.reason, isinstance(refusal, Refusal)) == ("diverged", True)


def test_a_program_for_another_runtime_is_refused_at_once() -> None:
    agent = connected_agent()
    task = train_task(program=deploy_task().programs[0])
    actions = agent.hear(task)
    assert find_action(actions, Keep).message.reason == "runtime"
    assert not any(isinstance(action, Fetch) for action in actions)


def test_a_blob_that_cannot_be_fetched_is_a_refusal_and_ends_the_other_transfers() -> None:
    agent = connected_agent()
    agent.hear(announce(1, "train"))
    agent.hear(train_task())
    actions = agent.step(BlobFailed(sha256=blob("program").sha256, reason="program", detail="gone"))
    assert find_action(actions, Keep).message.reason == "program"
    assert blob("weights t1") in {action.blob for action in actions if isinstance(action, CancelFetch)}


def test_a_task_without_an_answer_at_its_deadline_is_refused_and_its_training_stopped() -> None:
    agent = connected_agent()
    agent.train(train_task())
    agent.now_s += 60.0
    actions = agent.see(TimePassed())
    assert find_action(actions, StopWork).task_id == "t1"
    assert find_action(actions, Keep).message.reason == "compute"


# --- several tasks ---


def test_a_repeated_task_is_a_duplicate_before_and_after_its_answer() -> None:
    agent = connected_agent()
    task = train_task()
    agent.train(task)
    assert find_action(agent.hear(task), Publish).message == ack_of(task, "duplicate")
    agent.finish(task)
    assert agent.hear(task) == (Publish(message=ack_of(task, "duplicate")),)


def test_a_newer_task_replaces_the_older_one_and_waits_until_the_worker_is_free() -> None:
    agent = connected_agent()
    agent.train(train_task("t1"))
    actions = agent.hear(train_task("t2", planned_peak_bytes=100)) + agent.fetch_all()
    assert find_action(actions, StopWork).task_id == "t1"
    assert not any(isinstance(action, StartWork) for action in actions)
    actions = agent.see(WorkFailed(task_id="t1", reason="failed", detail="stopped"))
    assert find_action(actions, StartWork).task.task_id == "t2"
    assert not any(isinstance(action, Keep) for action in actions)
    assert agent.hear(train_task("t1"))[-1] == Publish(message=ack_of(train_task("t1"), "duplicate"))


def test_the_result_of_a_replaced_training_is_discarded() -> None:
    agent = connected_agent()
    agent.train(train_task("t1"))
    agent.hear(train_task("t2"))
    actions = agent.finish(train_task("t1"))
    assert not any(isinstance(action, Keep) for action in actions)
    assert blob("update t1").sha256 not in find_action(actions, Prune).keep


def test_a_round_that_moves_on_ends_the_training_and_keeps_the_update_of_the_round_before() -> None:
    agent = connected_agent()
    agent.train(train_task("t1", 1))
    agent.finish(train_task("t1", 1))
    agent.train(train_task("t2", 2))
    assert find_action(agent.hear(announce(3)), StopWork).task_id == "t2"
    assert agent.state.current is None
    updates = [entry.message for entry in agent.state.pending if isinstance(entry.message, Update)]
    assert [update.task_id for update in updates] == ["t1"]


@pytest.mark.parametrize(
    "stale", [train_task("old", 1), train_task("other", 2, run_id="before"), train_task("late", 2, client_id="pi2")]
)
def test_tasks_of_earlier_rounds_other_runs_and_other_clients_are_refused(stale: object) -> None:
    agent = connected_agent()
    agent.hear(announce(2, "train"))
    actions = agent.hear(stale)  # type: ignore[arg-type]  # the parameters are tasks
    assert agent.state.current is None
    assert all(getattr(action.message, "status", "") == "refused" for action in actions if isinstance(action, Publish))


def test_older_announcements_are_stale_for_a_while_and_valid_after_a_connect() -> None:
    agent = connected_agent()
    agent.hear(announce(2, "train"))
    agent.hear(announce(1))
    assert agent.state.round == announce(2, "train")
    agent.now_s += 10.0  # too late for a delayed delivery: the server was restored from an older state
    agent.hear(announce(1))
    assert agent.state.round == announce(1)
    agent.hear(announce(2))
    agent.see(LinkDown())
    agent.see(LinkUp())
    agent.hear(announce(1))
    assert agent.state.round == announce(1)


def test_a_restarted_server_may_measure_the_same_round_again() -> None:
    agent = connected_agent()
    agent.train(train_task())
    assert isinstance(find_action(agent.hear(announce(1)), Keep).message, Telemetry)
    assert agent.state.current is not None


def test_a_stale_ack_changes_nothing() -> None:
    agent = connected_agent()
    agent.train(train_task())
    agent.finish(train_task())
    before = agent.state
    assert agent.hear(ack("update.t0")) == ()
    assert agent.state == before


# --- deployment and end ---


def test_models_are_fetched_placed_and_reported() -> None:
    agent = connected_agent()
    agent.hear(announce(3, "train"))
    agent.hear(deploy_task())
    assert find_action(agent.fetch_all(), PlaceModels).task == deploy_task()
    deployed = find_action(agent.step(ModelsPlaced(task_id="d1", files=("models/run/model.onnx",))), Keep).message
    assert deployed == Deployed(
        task_id="d1", run_id="run", client_id="pi", files=("models/run/model.onnx",), message_id="deployed.d1"
    )
    agent.hear(announce(3, "finished"))
    assert [entry.message for entry in agent.state.pending] == [deployed]


def leaving_agent() -> Agent:
    return connected_agent(settings=AgentSettings(profile=profile(), leave_when_finished=True))


def leaves_within(agent: Agent, seconds: float) -> bool:
    for _ in range(int(seconds * 2)):
        agent.now_s += 0.5
        if any(isinstance(action, Leave) for action in agent.see(TimePassed())):
            return True
    return False


def test_the_agent_leaves_when_its_run_is_over_and_its_last_ack_is_here() -> None:
    agent = leaving_agent()
    agent.train(train_task())
    agent.hear(deploy_task())
    agent.hear(announce(1, "finished"))
    agent.see(WorkFailed(task_id="t1", reason="failed", detail="stopped"))
    assert not leaves_within(agent, 5)
    agent.fetch_all()
    agent.step(ModelsPlaced(task_id="d1", files=("m",)))
    assert not leaves_within(agent, 5)
    agent.hear(ack("deployed.d1"))
    assert leaves_within(agent, 3)


def test_a_missing_ack_delays_the_end_of_the_agent_for_a_limited_time() -> None:
    agent = leaving_agent()
    agent.hear(announce(3, "train"))
    agent.hear(deploy_task())
    agent.fetch_all()
    agent.step(ModelsPlaced(task_id="d1", files=("m",)))
    agent.hear(announce(3, "finished"))
    assert not leaves_within(agent, 50)
    assert leaves_within(agent, 15)


def test_the_end_of_a_run_without_this_device_does_not_make_it_leave() -> None:
    agent = leaving_agent()
    agent.hear(announce(3, "finished", run_id="before"))
    agent.hear(announce(3, "finished", run_id="before"))
    assert not leaves_within(agent, 100)


def test_without_the_option_the_agent_stays_for_the_next_run() -> None:
    agent = connected_agent()
    agent.hear(announce(3, "train"))
    agent.hear(announce(3, "finished"))
    assert not leaves_within(agent, 100)
    assert any(isinstance(action, Keep) for action in agent.hear(announce(1, run_id="next")))


# --- restart ---


def test_a_restart_sends_saved_answers_again_and_repeats_the_unanswered_training() -> None:
    agent = connected_agent()
    agent.train(train_task("t1", 1))
    agent.finish(train_task("t1", 1))
    agent.train(train_task("t2", 2))
    saved = agent.state.saved
    restarted = Agent(saved=saved, settings=AgentSettings(profile=profile("s2")))
    assert [type(action.message) for action in restarted.first if isinstance(action, Keep)] == [Update]
    restarted.see(LinkUp())
    actions = restarted.fetch_all()
    assert find_action(actions, StartWork).task.task_id == "t2"
    assert restarted.hear(train_task("t1", 1))[0].message.status == "duplicate"  # type: ignore[union-attr]  # a Publish


def test_an_answer_to_the_declared_architecture_ends_nothing() -> None:
    agent = connected_agent()
    agent.train(train_task())
    before = agent.state
    answer = Ack(of="profile.s1", status="refused", reason="no such axis", problem="unknown_axis")
    assert agent.hear(answer) == ()
    assert agent.state == before
