"""Limits that bind: the system ends or refuses what exceeds a task's memory, within a step."""

import sys
from dataclasses import replace

import pytest
from edge_client.worker_rig import check_next_task, make_task, run_task

from subfleet.agent.outcomes import WorkFailed
from subfleet.edge_client.task_work import TrainingOutput
from subfleet.edge_client.worker_messages import Workplace
from subfleet.edge_client.worker_process import WorkerProcess
from subfleet.emulation.client_groups import open_groups

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits the data of a process")
def test_a_limit_that_binds_is_that_of_the_task(workplace: Workplace) -> None:
    with WorkerProcess(replace(workplace, binds_memory=True)) as worker:
        for limit_bytes, fits in ((60_000_000, False), (70_000_000, True)):
            outcome = run_task(worker, make_task(workplace, "70 MB"), limit_bytes)
            assert isinstance(outcome, TrainingOutput) is fits
            if isinstance(outcome, WorkFailed):
                assert (outcome.reason, outcome.available_bytes) == ("memory", 20_000_000)
    with WorkerProcess(workplace) as worker:
        assert isinstance(run_task(worker, make_task(workplace, "70 MB"), 10_000_000), TrainingOutput), "a guard only"


def test_a_step_beyond_the_limit_of_its_group_ends_its_process_and_no_other(workplace: Workplace) -> None:
    with open_groups({"pi": 1}) as groups:
        if not groups.folders:
            pytest.skip("this process may not make control groups")
        bound = replace(workplace, binds_memory=True, groups=tuple(groups.folders["pi"]))
        with WorkerProcess(bound) as worker:
            outcome = run_task(worker, make_task(workplace, "70 MB"), 40_000_000)
            assert isinstance(outcome, WorkFailed)
            assert (outcome.reason, outcome.killed, outcome.available_bytes) == ("memory", True, 20_000_000)
            check_next_task(worker, workplace)
            assert isinstance(run_task(worker, make_task(workplace, "70 MB"), 80_000_000), TrainingOutput)
