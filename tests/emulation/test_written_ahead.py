"""Dynamic model selection with real programs: a program that is exported in a round is used in the next."""

from dataclasses import replace

import pytest
from emulation.batch_cases import LARGE_BYTES, client, experiment

from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.reporting.run_figures import violates

pytestmark = [pytest.mark.slow, pytest.mark.export]

LINK_S = 0.28
"""Time to send 35 kB: more than the smaller size of the uniform space, and less than the larger one."""


def _describe_run() -> GatheredRun:
    method = DynamicSelection(distillation=None, estimates="estimated")
    gathered = experiment(rounds=3, method=method, exports_per_round=1, communication_s=LINK_S)
    return replace(gathered, devices=tuple(client(name, index, LARGE_BYTES) for index, name in enumerate("abc")))


@pytest.fixture(scope="module")
def searched(exports: ExportPool) -> BatchResult:
    return run_batch(_describe_run(), exports)


def test_no_budget_is_exceeded_while_programs_are_written_ahead(searched: BatchResult) -> None:
    assert len(searched.rounds) == 3
    for record in searched.rounds:
        assert {row.status for row in record.clients} == {"aggregated"}
        assert not any(violates(row) for row in record.clients)
        assert all(row.planned_peak_bytes <= row.budget_bytes for row in record.clients)


def test_later_rounds_train_requested_programs(searched: BatchResult) -> None:
    first, *later = searched.rounds
    tasks = {row.architecture_id for row in first.clients}
    assert first.programs_written > len(tasks), "one for each task, and a requested one"
    requested = {row.requested for row in first.clients} - {""}
    assert requested & {row.architecture for record in later for row in record.clients}
    assert all(row.parameters_lost > 0 for row in first.clients if row.requested)
    assert sum(row.utilisation or 0 for row in later[-1].clients) > sum(row.utilisation or 0 for row in first.clients)


def test_a_search_gives_the_same_bits_again(searched: BatchResult, exports: ExportPool) -> None:
    repeated = run_batch(_describe_run(), exports)
    assert (repeated.model, repeated.rounds) == (searched.model, searched.rounds)
