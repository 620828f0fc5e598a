"""Figures of virtual runs against values that are counted directly."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulation.batch_cases import SAMPLES, experiment
from safetensors.torch import load

from subfleet.elastic.building import network_of
from subfleet.elastic.evaluate import evaluate
from subfleet.emulation.batch.figures import compute_batch_figures
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.journal.records import ClientRow
from subfleet.protocol.errors import RunError
from subfleet.protocol.submodel import Architecture
from subfleet.reporting.run_figures import violates

ROW = ClientRow(
    client_id="ada",
    device="virtual",
    runtime="onnx",
    architecture="w1 d1",
    architecture_id="0" * 16,
    parameters=1000,
    memory_free_bytes=10_000,
    budget_bytes=5000,
    downlink_budget_bytes=8000,
    uplink_budget_bytes=3000,
    update_bytes=1500,
    planned_peak_bytes=4500,
    measured_peak_bytes=0,
    bytes_down=9000,
    bytes_up=4100,
    seconds=0.0,
    loss=1.0,
    sample_count=10,
    status="aggregated",
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"planned_peak_bytes": 5000}, False),
        ({"planned_peak_bytes": 5001}, True),
        ({"downlink_budget_bytes": 4000}, False),
        ({"downlink_budget_bytes": 3999}, True),
        ({"downlink_budget_bytes": None}, False),
        ({"uplink_budget_bytes": 1500}, False),
        ({"uplink_budget_bytes": 1499}, True),
        ({"uplink_budget_bytes": None}, False),
        ({"planned_peak_bytes": 0, "budget_bytes": 0, "downlink_budget_bytes": 0}, False),  # it was assigned no task
    ],
)
def test_a_violation_is_a_task_beyond_its_budget(changes: dict[str, Any], expected: bool) -> None:
    assert violates(replace(ROW, **changes)) is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.9),
        ({"downlink_budget_bytes": 4100}, 4000 / 4100),
        ({"downlink_budget_bytes": None, "uplink_budget_bytes": None}, 0.9),
        ({"uplink_budget_bytes": 1600}, 1500 / 1600),
        ({"planned_peak_bytes": 0}, None),
    ],
)
def test_utilisation_is_that_of_the_tighter_budget(changes: dict[str, Any], expected: float | None) -> None:
    assert replace(ROW, **changes).utilisation == expected


Run = tuple[GatheredRun, BatchResult]


@pytest.fixture(scope="module")
def run(exports: ExportPool) -> Run:
    gathered = experiment()
    return gathered, run_batch(gathered, exports)


@pytest.mark.slow
@pytest.mark.export
def test_counts_are_those_of_the_rows(run: Run) -> None:
    gathered, result = run
    figures = compute_batch_figures(gathered, result)
    rows = [row for record in result.rounds for row in record.clients]
    assert figures["bytes_up"] == sum(row.bytes_up for row in rows)
    assert figures["bytes_down"] == sum(row.bytes_down for row in rows)
    assert (figures["violations"], figures["participation"], figures["never_aggregated"]) == (0, 1.0, 0)
    assert figures["accuracy"] == result.rounds[-1].accuracy
    assert figures["utilisation"] == pytest.approx(sum(row.utilisation or 0.0 for row in rows) / len(rows))
    # Three passes per epoch over every sample; the matrices are (64, w), two of (w, w) in the block, and (w, 10).
    matrices = {"w1/2 d1": 64 * 32 + 2 * 32 * 32 + 32 * 10, "w1 d1": 3 * 64 * 64 + 64 * 10}
    assert figures["macs"] == sum(3 * 2 * SAMPLES * matrices[row.architecture] for row in rows)
    assert sum(row["macs"] for entry in figures["rounds"] for row in entry["clients"]) == figures["macs"]


@pytest.mark.slow
@pytest.mark.export
def test_accuracies_are_of_the_submodels_that_clients_hold(run: Run) -> None:
    gathered, result = run
    figures = compute_batch_figures(gathered, result)
    network, state = network_of(gathered.run.model), load(result.model)

    def accuracy(architecture: Architecture, data: Any) -> float:
        return evaluate(
            network, architecture, state, torch.from_numpy(data.inputs), torch.from_numpy(data.labels)
        ).accuracy

    last = {name: by_round[2].architecture for name, by_round in result.trained.items()}
    assert (
        last["ada"].architecture_id
        != last["bob"].architecture_id
        == last["cyd"].architecture_id
        == network.full_architecture().architecture_id
    )
    own_accuracies = {device.client_id: accuracy(last[device.client_id], device.test) for device in gathered.devices}
    assert figures["own"] == own_accuracies
    assert (figures["own_mean"], figures["own_worst"]) == (
        pytest.approx(sum(own_accuracies.values()) / 3),
        min(own_accuracies.values()),
    )
    small = [accuracy(last[name], gathered.evaluation) for name in ("ada", "bob")]
    assert figures["tiers"] == {"small": pytest.approx(sum(small) / 2), "large": result.rounds[-1].accuracy}
    assert figures["worst_tier"] == min(figures["tiers"].values())


@pytest.mark.slow
@pytest.mark.export
def test_a_client_that_sits_a_round_out_counts_against_that_round(run: Run) -> None:
    gathered, result = run
    first, second = result.rounds
    away = tuple(replace(row, status="skipped: away") if row.client_id == "bob" else row for row in second.clients)
    figures = compute_batch_figures(gathered, replace(result, rounds=(first, replace(second, clients=away))))
    assert figures["participation"] == pytest.approx(5 / 6)
    assert figures["least_participation"] == pytest.approx(2 / 3)
    assert figures["never_aggregated"] == 0, "the client was aggregated in round 1"
    assert [entry["participation"] for entry in figures["rounds"]] == [1.0, pytest.approx(2 / 3)]
    assert [entry["left_out"] for entry in figures["rounds"]] == ["", "1 skipped: away"]


@pytest.mark.slow
@pytest.mark.export
def test_a_client_that_was_never_aggregated_has_no_model(run: Run) -> None:
    gathered, result = run
    rounds = tuple(
        replace(
            record,
            clients=tuple(
                row if row.client_id == "cyd" else replace(row, status="skipped: away") for row in record.clients
            ),
        )
        for record in result.rounds
    )
    alone = replace(result, rounds=rounds, own={"cyd": result.own["cyd"]})
    figures = compute_batch_figures(gathered, alone)
    assert figures["tiers"]["large"] > 0
    assert figures["tiers"]["small"] is figures["worst_tier"] is figures["submodels"] is None, "unknown, and not 0"
    assert figures["never_aggregated"] == 2
    assert set(figures["own"]) == {"cyd"}
    with pytest.raises(RunError, match="no round of the run aggregated an update"):
        compute_batch_figures(gathered, replace(result, model=b""))
