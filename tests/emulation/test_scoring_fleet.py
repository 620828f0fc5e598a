"""A virtual fleet with clients that score their candidates with real programs on their own data."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from emulation.batch_cases import LARGE_BYTES, client, experiment
from emulation.message_fleet import play_messages

from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.batch.trainers import SharedHost
from subfleet.emulation.gathering import GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.methods.fedfa import FedFA
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Score
from subfleet.reporting.run_figures import violates
from subfleet.trainers.onnx import ONNX
from subfleet.trainers.trainer import RuntimeTrainer
from subfleet.transport.in_memory import Faults

pytestmark = [pytest.mark.slow, pytest.mark.export]

NAMES = ("ada", "bob", "cyd")
MIDDLING_BYTES = 2_100_000
"""All programs fit except the one that scores the whole model."""
SIZES = ("w1/4 d1", "w1/2 d1", "w1 d1")


class RecordingTrainer(RuntimeTrainer):
    """The real trainer, which records every score; with `turned`, the sign of scores is changed."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__(ONNX, host=SharedHost())
        self.sign = -1 if turned else 1
        self.scores: list[float] = []

    def score(self, job: Job[Score], stopped: Callable[[], bool]) -> float:
        score = self.sign * super().score(job, stopped)
        self.scores.append(score)
        return score


def gather_scoring_fleet() -> tuple[GatheredRun, dict[str, RecordingTrainer]]:
    trainers = {name: RecordingTrainer(turned=name == "bob") for name in NAMES}
    # The budget of the last client grows, but its chosen size stays.
    clients = tuple(
        client(name, index, first, LARGE_BYTES)
        for index, (name, first) in enumerate(zip(NAMES, (LARGE_BYTES, LARGE_BYTES, MIDDLING_BYTES), strict=True))
    )
    return replace(experiment(method=FedFA(choice="score"), rates=(0.25, 0.5, 1.0)), devices=clients), trainers


def test_each_client_has_its_best_scored_size_in_every_round(exports: ExportPool) -> None:
    gathered, trainers = gather_scoring_fleet()
    result = run_batch(gathered, exports, trainers=trainers)
    assert len(result.rounds) == 2
    for record in result.rounds:
        for row in record.clients:
            scores = trainers[row.client_id].scores
            fitting = SIZES[:2] if row.client_id == "cyd" else SIZES
            assert len(scores) == len(fitting), "each candidate is scored once, in the first round"
            assert row.architecture == fitting[scores.index(max(scores))]
            assert (row.status, violates(row)) == ("aggregated", False)
    first, second = ({row.client_id: row.architecture for row in record.clients} for record in result.rounds)
    assert first == second
    assert first["ada"] != first["bob"], "the choice follows the scores, not the budget"
    assert result.logical_seconds < gathered.run.deadlines.measure_s, "no deadline elapsed"


def test_losses_and_doubles_change_no_bit(exports: ExportPool, tmp_path: Path) -> None:
    gathered, trainers = gather_scoring_fleet()
    undisturbed = run_batch(gathered, exports, trainers=trainers)
    gathered, trainers = gather_scoring_fleet()
    faults = Faults(seed=1, loss=0.2, double=0.2, delay_s=1.5)
    disturbed = play_messages(gathered, exports, tmp_path, faults=faults, trainers=trainers)
    assert disturbed.model == undisturbed.model
    assert [len(trainers[name].scores) for name in NAMES] == [3, 3, 2]


def test_clients_of_pytorch_score_too(exports: ExportPool) -> None:
    clients = tuple(client(name, index, LARGE_BYTES, runtime="torch") for index, name in enumerate(NAMES))
    gathered = replace(experiment(method=FedFA(choice="score"), rounds=1), devices=clients)
    (record,) = run_batch(gathered, exports).rounds
    assert [(row.runtime, row.status) for row in record.clients] == [("torch", "aggregated")] * 3
    assert record.clients[0].bytes_down > 0
