"""The agent after processes that died at work: it offers less memory, so that a device is not killed endlessly."""

import pytest
from agent.agent_cases import announce, deploy_task, evaluate_task, find_action, kinds, score_task, train_task
from agent.survival_cases import BUDGET_BYTES, Board, board_killed_twice
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples

from subfleet.agent.actions import StartWork
from subfleet.agent.events import Stopping
from subfleet.agent.outcomes import WorkFailed
from subfleet.agent.states import Saved
from subfleet.agent.survival import Begun, Ceiling, Survival
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import Task
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.readings import LogLow
from subfleet.protocol.schema import from_plain, to_plain

# --- a single task ---


@pytest.mark.parametrize("task", [train_task(), score_task(), evaluate_task()], ids=lambda task: task.work.TYPE)
def test_a_task_that_kills_its_process_at_each_start_is_begun_twice_and_refused_with_half(task: Task) -> None:
    board = Board()
    board.begin(task)
    for _ in range(10):
        board.kill()
    assert board.begun == [task.task_id] * 2
    (refusal,) = board.refusals
    assert (refusal.task_id, refusal.reason, refusal.available_bytes) == (task.task_id, "memory", 250)
    assert refusal.detail == (
        "the device's process ended 2 times in a row during work, the last time on this task, probably because memory "
        "ran out; the device now offers 250 bytes"
    )
    assert board.agent.state.current is None
    assert board.agent.hear(task)[0].message.status == "duplicate"  # type: ignore[union-attr]  # a Publish


def test_a_task_that_killed_its_process_once_is_done_again() -> None:
    board = Board()
    board.begin(train_task())
    board.kill()
    assert board.begun == ["t1", "t1"]
    board.note(board.agent.finish(train_task()))
    assert board.refusals == []
    assert [update.task_id for update in board.disk.updates] == ["t1"]
    assert board.disk.survival == Survival()


def test_a_death_before_the_work_begins_does_not_count() -> None:
    board = Board()
    board.note(board.agent.hear(announce(1, "train")))
    board.note(board.agent.hear(train_task()))
    for _ in range(5):
        board.start()
    board.note(board.agent.fetch_all())
    board.note(board.agent.finish(train_task()))
    assert (board.begun, board.refusals) == (["t1"], [])


def test_deaths_while_models_are_placed_do_not_count() -> None:
    board = Board()
    board.note(board.agent.hear(announce(3, "train")))
    board.note(board.agent.hear(deploy_task()))
    board.note(board.agent.fetch_all())
    for _ in range(5):
        board.kill()
    assert (board.refusals, board.disk.survival) == ([], Survival())
    assert board.agent.state.current is not None


# --- deaths in a row ---


def end_well(board: Board, task: Task) -> None:
    board.note(board.agent.finish(task))


def end_badly(board: Board, task: Task) -> None:
    board.note(board.agent.step(WorkFailed(task_id=task.task_id, reason="data", detail="no such file")))


@pytest.mark.parametrize("end", [end_well, end_badly])
def test_completed_work_clears_the_death_before_it(end: object) -> None:
    board = Board()
    for number in (1, 2, 3):
        task = train_task(f"t{number}", number)
        board.begin(task)
        board.kill()
        end(board, task)  # type: ignore[operator]  # one of the two above
    assert board.begun == ["t1", "t1", "t2", "t2", "t3", "t3"]
    assert [refusal for refusal in board.refusals if refusal.reason == "memory"] == []
    assert board.offered_bytes() == BUDGET_BYTES


def test_stopped_work_does_not_clear_the_death_before_it() -> None:
    board = Board()
    board.begin(train_task("t1", 1))
    board.kill()
    board.begin(train_task("t2", 2))  # t1 is asked to stop
    board.note(board.agent.see(WorkFailed(task_id="t1", reason="failed", detail="stopped")))
    assert board.begun == ["t1", "t1", "t2"]
    board.kill()
    assert board.refusals[-1].task_id == "t2"
    assert board.offered_bytes() == 250


def test_a_result_that_is_not_awaited_clears_the_death_before_it() -> None:
    board = Board()
    board.begin(train_task("t1", 1))
    board.kill()
    board.begin(train_task("t2", 2))
    board.note(board.agent.finish(train_task("t1")))
    assert board.disk.survival.deaths == ()


def test_one_death_in_each_of_two_tasks_sets_the_limit_by_the_smaller_one() -> None:
    board = Board()
    board.begin(train_task("t1", 1, planned_peak_bytes=400))
    board.start()
    board.begin(train_task("t2", 2, planned_peak_bytes=900))
    assert board.begun == ["t1", "t2"]
    board.start()
    (refusal,) = board.refusals
    assert (refusal.task_id, refusal.reason, refusal.available_bytes) == ("t2", "memory", 200)
    assert board.offered_bytes() == 200


def test_a_device_that_dies_once_in_every_task_learns() -> None:
    board = Board()
    for number in range(1, 9):
        board.begin(train_task(f"t{number}", number, planned_peak_bytes=min(800, board.offered_bytes())))
        board.start()
    assert len(board.begun) == 8
    assert board.offered_bytes() <= 800 // 2**4


def test_a_newer_task_is_begun_when_it_takes_no_more_than_what_was_learned() -> None:
    board = board_killed_twice()
    board.begin(train_task("t2", 1, planned_peak_bytes=251))
    refusal = board.refusals[-1]
    assert (refusal.task_id, refusal.reason, refusal.available_bytes) == ("t2", "memory", 250)
    assert refusal.detail == (
        "the program needs 251 bytes, but the device offers only 250 bytes since its process ended during work"
    )
    actions = board.agent.train(train_task("t3", 1, planned_peak_bytes=250))
    assert find_action(actions, StartWork).memory_limit_bytes == 250


def test_a_budget_below_the_learned_limit_is_reported_as_free_memory() -> None:
    board = board_killed_twice()
    board.agent.free_bytes = 400
    board.begin(train_task("t2", 1, planned_peak_bytes=240))
    assert (board.refusals[-1].available_bytes, "are free for training now" in board.refusals[-1].detail) == (200, True)


def test_a_task_that_draws_paths_by_free_memory_counts_with_the_whole_budget() -> None:
    board = board_killed_twice(train_task(paths=PathSettings()))
    assert board.refusals[0].available_bytes == BUDGET_BYTES // 2


def test_a_worker_that_the_system_killed_sets_a_limit_at_once() -> None:
    board = Board()
    board.begin(train_task())
    failed = WorkFailed(task_id="t1", reason="memory", detail="killed", available_bytes=250, killed=True)
    board.note(board.agent.step(failed))
    assert (board.refusals[0].available_bytes, board.offered_bytes()) == (250, 250)
    board.note(board.agent.step(failed))
    assert board.offered_bytes() == 250


# --- stopped on purpose ---


def test_a_process_that_is_stopped_on_purpose_has_not_died() -> None:
    board = Board()
    board.begin(train_task())
    for _ in range(5):
        board.stop()
    assert board.begun == ["t1"] * 6
    assert (board.refusals, board.disk.survival.deaths) == ([], ())


def test_a_stop_does_not_clear_a_death_before_it() -> None:
    board = Board()
    board.begin(train_task())
    board.kill()
    board.stop()
    assert board.begun == ["t1"] * 3
    board.kill()
    assert board.refusals[0].task_id == "t1"


def test_a_stop_without_work_requests_no_action() -> None:
    board = Board()
    assert board.agent.step(Stopping()) == ()
    board.begin(train_task())
    assert kinds(board.note(board.agent.step(Stopping()))) == ["Save"]


# --- the memory that is offered, and its recovery ---


def test_the_lower_budget_is_reported_in_rounds_between_rounds_and_for_a_log() -> None:
    board = board_killed_twice()
    telemetry = board.measure(2, log_low_bytes=600)
    assert telemetry.memory_budget_bytes == 250
    assert telemetry.log_low == LogLow(memory_budget_bytes=250)
    assert board.offered_bytes() == 250
    low = board.measure(2, log_low_bytes=30).log_low
    assert low == LogLow(memory_budget_bytes=30)
    assert telemetry.reading.memory_free_bytes == 2000, "the reading itself is reported unchanged"


def test_a_sixteenth_is_restored_for_each_survived_round_until_all_is_offered_again() -> None:
    board = board_killed_twice()
    budgets = [board.measure(number).memory_budget_bytes for number in range(2, 27)]
    assert budgets[:6] == [250, 265, 281, 298, 316, 335]
    assert budgets[-2:] == [981, 1000]
    assert board.disk.survival == Survival()
    assert "survival" not in to_plain(board.disk), "an earlier release can read it again"


def test_a_repeated_announcement_restores_nothing() -> None:
    board = board_killed_twice()
    assert [board.measure(1).memory_budget_bytes for _ in range(3)] == [250] * 3
    assert [board.measure(2).memory_budget_bytes for _ in range(3)] == [250] * 3
    assert [board.measure(3).memory_budget_bytes for _ in range(3)] == [265] * 3


def test_a_round_with_a_death_restores_nothing() -> None:
    board = board_killed_twice()
    board.measure(2)
    assert board.measure(3).memory_budget_bytes == 265
    board.begin(train_task("t3", 3, planned_peak_bytes=100))
    board.kill()
    board.note(board.agent.finish(train_task("t3", 3)))
    assert board.measure(4).memory_budget_bytes == 265
    assert board.measure(5).memory_budget_bytes == 281


def test_a_moment_with_little_memory_does_not_clear_the_limit() -> None:
    board = board_killed_twice()
    board.agent.free_bytes = 100
    assert [board.measure(number).memory_budget_bytes for number in (2, 3)] == [50, 50]
    board.agent.free_bytes = 2000
    assert board.measure(4).memory_budget_bytes == 281


def test_further_deaths_halve_the_limit_again() -> None:
    board = board_killed_twice()
    board.measure(2)
    board.begin(train_task("t2", 2, planned_peak_bytes=200))
    board.kill()
    board.kill()
    assert board.refusals[-1].available_bytes == 100
    assert board.measure(3).memory_budget_bytes == 100
    assert board.disk.survival.ceiling == Ceiling(
        memory_bytes=100, free_bytes=BUDGET_BYTES, run_id="run", round=3, survived=True
    )


# --- the saved record ---


def test_a_state_of_an_earlier_release_is_read_and_the_survival_record_is_restored() -> None:
    assert from_plain(Saved, to_plain(Saved(done=("t1",)))) == Saved(done=("t1",))
    assert "survival" not in to_plain(Saved())
    begun = Begun(task_id="t1", memory_bytes=500)
    ceiling = Ceiling(memory_bytes=250, free_bytes=500, run_id="run", round=3, survived=True)
    saved = Saved(survival=Survival(working=begun, deaths=(begun,), ceiling=ceiling))
    assert from_plain(Saved, to_plain(saved)) == saved


@pytest.mark.parametrize(
    "damaged",
    [
        {"working": {"task_id": "t1", "memory_bytes": -1}},
        {"ceiling": {"memory_bytes": -1, "free_bytes": 5}},
        {"ceiling": {"memory_bytes": 1, "free_bytes": -5}},
        {"ceiling": {"memory_bytes": "all"}},
        {"deaths": 2},
    ],
)
def test_a_damaged_record_is_refused(damaged: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        from_plain(Saved, {"survival": damaged})


# --- devices of any capacity ---


def play(board: Board, number: int, sizes: list[int], capacity_bytes: int) -> tuple[int, bool]:
    """Play a round on a device that kills processes beyond its capacity: the deaths, and whether it trained."""
    budget_bytes, deaths = board.measure(number).memory_budget_bytes, 0
    for attempt in range(100):
        fitting = [size for size in sizes if size <= budget_bytes]
        if not fitting:
            return deaths, False
        task = train_task(f"t{number}.{attempt}", number, planned_peak_bytes=max(fitting))
        board.begin(task)
        while board.agent.state.running is not None and max(fitting) > capacity_bytes:
            deaths += 1
            board.kill()
        if board.agent.state.running is not None:
            board.note(board.agent.finish(task))
            return deaths, True
        budget_bytes = board.refusals[-1].available_bytes or 0
    pytest.fail("the round has no end")


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, BUDGET_BYTES), min_size=1, max_size=8, unique=True),
    capacity_bytes=st.integers(1, BUDGET_BYTES),
)
@examples(25)
def test_a_device_is_killed_twice_for_each_halving_and_trains_in_every_round(
    sizes: list[int], capacity_bytes: int
) -> None:
    board = Board()
    halvings = (max(sizes) // capacity_bytes).bit_length()
    for number in range(1, 13):
        free_bytes = board.disk.survival.limit_budget(BUDGET_BYTES)
        deaths, trained = play(board, number, sizes, capacity_bytes)
        assert deaths <= 2 * halvings
        assert deaths == 0 or free_bytes * 17 // 16 + 1 > capacity_bytes, (
            "a device that offers no more than its capacity is not killed"
        )
        assert trained or min(sizes) * 2 > capacity_bytes, "it trains if a size fits"
        ceiling = board.disk.survival.ceiling
        assert ceiling is None or ceiling.memory_bytes * 2 + 1 >= min(*sizes, capacity_bytes)
