"""The folder of a run has all figures of the run, and its report is a complete page."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from subfleet.journal.evaluations import EvaluationRecord, EvaluationRow
from subfleet.journal.records import ClientRow, DeployedModel, RoundRecord, RunResult, compute_participation
from subfleet.journal.totals import describe_outliers
from subfleet.methods.aggregator import EvaluatedModel
from subfleet.protocol.errors import FileError
from subfleet.protocol.task_kinds import METRICS
from subfleet.reporting.results import add_metric, copy_models, write_results
from subfleet.reporting.results import build_summary as summary_of
from subfleet.reporting.texts import CLIENT_COLUMNS, describe_ending, describe_participation, describe_result

pytestmark = pytest.mark.slow  # drawing takes more than a second

AGGREGATED = ClientRow(
    client_id="pi-4",
    device="raspberry_pi_4",
    runtime="onnx",
    architecture="w1/2 d2-1",
    architecture_id="0123456789abcdef",
    parameters=12_345,
    memory_free_bytes=900_000_000,
    budget_bytes=18_000_000,
    downlink_budget_bytes=250_000,
    uplink_budget_bytes=125_000,
    update_bytes=49_380,
    planned_peak_bytes=15_000_000,
    measured_peak_bytes=14_000_000,
    bytes_down=60_000,
    bytes_up=50_000,
    seconds=1.5,
    loss=0.75,
    sample_count=300,
    status="aggregated",
    limit="memory",
    forward_macs=40,
    sample_passes=600,
    took_s=1.75,
    expected_training_s=1.0,
    expected_downlink_s=0.5,
)
SKIPPED = dataclasses.replace(
    AGGREGATED,
    client_id="<tiny>",
    architecture="",
    architecture_id="",
    status="skipped: no submodel fits",
    measured_peak_bytes=0,
    sample_passes=0,
)
ROUND = RoundRecord(round=1, accuracy=0.5, loss=1.5, seconds=2.0, log_time_s=0.0, clients=(AGGREGATED, SKIPPED))
RESULT = RunResult(
    run_id="abc",
    method="heterofl",
    method_status="submodels leave out blocks, & more",
    finished=True,
    accuracy=0.5,
    rounds=(ROUND, dataclasses.replace(ROUND, round=2)),
    deployed=(),
    model_path=None,
)


def test_summary_and_tables_hold_every_round_and_client(tmp_path: Path) -> None:
    write_results(tmp_path, name="test", result=RESULT, models=[])
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["accuracy"] == 0.5
    assert [record["round"] for record in summary["rounds"]] == [1, 2]
    used, unused = summary["rounds"][0]["clients"]
    assert used == {**dataclasses.asdict(AGGREGATED), "utilisation": 15 / 18, "training_macs": 3 * 40 * 600}
    assert unused == {**dataclasses.asdict(SKIPPED), "utilisation": SKIPPED.utilisation, "training_macs": 0}
    assert summary["participation"] == summary["rounds"][0]["participation"] == 0.5
    assert (summary["rounds"][0]["due"], summary["rounds"][0]["aggregated"]) == (2, 1)
    assert summary["rounds"][0]["left_out"] == "1 skipped: memory"
    assert summary["rounds"][0]["limits"] == "1 memory"
    assert used["limit"] == "memory"
    with (tmp_path / "clients.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["round"], row["client_id"]) for row in rows] == [
        ("1", "pi-4"),
        ("1", "<tiny>"),
        ("2", "pi-4"),
        ("2", "<tiny>"),
    ]
    assert rows[0]["measured_peak_bytes"] == "14000000"
    assert [row["limit"] for row in rows] == ["memory"] * 4
    with (tmp_path / "rounds.csv").open(encoding="utf-8", newline="") as file:
        round_values = [(row["limits"], row["participation"], row["left_out"]) for row in csv.DictReader(file)]
    assert round_values == [("1 memory", "0.5", "1 skipped: memory")] * 2


FAR = "its change of weights is 20 times the median"
SCALED = dataclasses.replace(AGGREGATED, client_id="eve", scale=0.25, outlier=FAR, lowered=f"scaled by 0.25, as {FAR}")
REPORTED = dataclasses.replace(AGGREGATED, client_id="bob", outlier=FAR)
REFUSED = dataclasses.replace(
    AGGREGATED, client_id="cyd", status="refused: it is not finite", outlier="it is not finite"
)


def test_altered_updates_are_named_in_summary_report_rows_and_output(tmp_path: Path) -> None:
    rounds = tuple(
        dataclasses.replace(ROUND, round=number, clients=clients)
        for number, clients in enumerate([(AGGREGATED, SCALED, REPORTED), (AGGREGATED, SCALED, REFUSED)], 1)
    )
    result = dataclasses.replace(RESULT, rounds=rounds)
    write_results(tmp_path, name="test", result=result)
    outliers = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["outliers"]
    assert outliers == {"scaled": {"eve": 2}, "left_out": {"cyd": 1}, "reported": {"bob": 1}}
    words = [
        "pdates scaled down: eve in 2 (of 2 rounds)",
        "pdates left out: cyd in 1 (of 2 rounds)",
        "pdates far from the others, which counted in full: bob in 1 (of 2 rounds)",
    ]
    report, lines = (tmp_path / "report.html").read_text(encoding="utf-8"), list(describe_ending(result))
    assert all(f"<p>U{text}.</p>" in report for text in words)
    assert lines[:3] == [f"U{text}" for text in words]
    assert describe_outliers(rounds, reported=False) == tuple(f"u{text}" for text in words[:2])
    state = next(column for column in CLIENT_COLUMNS if column.title == "state")
    assert state.cell(SCALED) == f"aggregated; scaled by 0.25, as {FAR}"
    assert state.cell(REPORTED) == f"aggregated; reported: {FAR}"
    assert state.cell(REFUSED) == "refused: it is not finite"


def test_the_clients_with_most_altered_rounds_are_named() -> None:
    rows = [dataclasses.replace(SCALED, client_id=f"client-{number}") for number in range(1, 6)]
    rounds = [dataclasses.replace(ROUND, clients=tuple(rows)), dataclasses.replace(ROUND, clients=tuple(rows[3:]))]
    (sentence,) = describe_outliers(rounds, reported=False)
    assert (
        sentence == "updates scaled down: client-4 in 2, client-5 in 2, client-1 in 1 and 2 more clients (of 2 rounds)"
    )


def test_costs_are_reported_for_the_run_and_for_each_round(tmp_path: Path) -> None:
    rounds = (dataclasses.replace(ROUND, model_bytes=5_000), dataclasses.replace(ROUND, round=2, seconds=4.0))
    write_results(tmp_path, name="test", result=dataclasses.replace(RESULT, rounds=rounds))
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    costs = summary["costs"]
    assert (costs["training_macs"], costs["forward_macs"]) == (2 * 3 * 40 * 600, 2 * 40 * 600)
    assert (costs["bytes_down"], costs["bytes_up"], costs["storage_bytes"]) == (240_000, 200_000, 5_000)
    assert costs["rounds"] == {"mean_s": 3.0, "deviation_s": 1.0, "count": 2}
    assert costs["clients"] == {"mean_s": 1.75, "deviation_s": 0.0, "count": 2}
    assert costs["expected_rounds"] == costs["expected_clients"] == {"mean_s": 1.5, "deviation_s": 0.0, "count": 2}
    with (tmp_path / "rounds.csv").open(encoding="utf-8", newline="") as file:
        round_values = [(row["training_macs"], row["model_bytes"], row["expected_s"]) for row in csv.DictReader(file)]
    assert round_values == [("72000", "5000", "1.5"), ("72000", "0", "1.5")]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "All training took 144 k MACs (48 k forward), 240 kB down and 200 kB up" in page
    assert "A round took 3.00 s on average (deviation 1.00 s), a device&#x27;s part of it 1.75 s on average" in page


def test_participation_is_the_fraction_of_the_due_clients() -> None:
    states = {
        "aggregated": 4,
        "skipped: no submodel fits: the smallest needs 7 bytes of memory and the budget is 6": 2,
        "skipped: no submodel fits: the smallest needs 9 bytes of memory and the budget is 8": 1,
        "refused: memory: the program needs 9 bytes, but 8 bytes are free for training now": 1,
        "missing: no answer came in time": 1,
    }
    rows = tuple(
        dataclasses.replace(AGGREGATED, status=status, limit="memory" if "budget" in status else "")
        for status, count in states.items()
        for _ in range(count)
    )
    idle = {"skipped: the device is not available now": 1, "skipped: it was not drawn for this round": 5}
    record = dataclasses.replace(ROUND, clients=rows, idle=idle)
    assert (record.due, record.not_drawn) == (10, 5)
    assert (len(record.aggregated), record.participation) == (4, 0.4)
    assert record.left_out == (
        "3 skipped: memory; 1 missing: no answer came in time; 1 refused: memory; "
        "1 skipped: the device is not available now"
    )
    assert describe_participation(record) == f"4 of 10 devices took part ({record.left_out})"
    alone = dataclasses.replace(ROUND, clients=(AGGREGATED,))
    assert describe_participation(alone) == "1 of 1 devices took part"
    assert compute_participation((record, alone)) == 5 / 11
    assert compute_participation(()) == dataclasses.replace(ROUND, clients=(), idle=idle).participation == 0.0


def test_the_report_needs_nothing_else_and_escapes_what_it_shows(tmp_path: Path) -> None:
    report = write_results(tmp_path, name="a<b", result=RESULT).read_text(encoding="utf-8")
    assert report.count("<svg") == 4
    assert "a&lt;b" in report
    assert "&lt;tiny&gt;" in report
    assert "<th>limit</th>" in report
    assert "Participation: <b>50.0%</b>." in report
    assert report.count("1 of 2 devices took part (1 skipped: memory)") == 2
    assert report.count("<td>memory</td>") == 4
    assert "<script" not in report
    assert 'src="http' not in report
    for svg in report.split("<svg")[1:]:
        # Our own plots must be well-formed for browsers.
        ElementTree.fromstring("<svg" + svg.partition("</svg>")[0] + "</svg>")  # noqa: S314


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("devices", "named"), [(20, True), (21, False), (50, False)])
def test_legends_name_devices_unless_too_many_leave_no_room_for_the_plot(devices: int, named: bool) -> None:
    from subfleet.reporting.plots import plot_budgets, plot_bytes, plot_memory  # matplotlib takes long to load

    rows = tuple(dataclasses.replace(AGGREGATED, client_id=f"raspberry-pi-{number}") for number in range(devices))
    rounds = (dataclasses.replace(ROUND, clients=rows),)
    assert all(("raspberry-pi-19" in plot(rounds)) is named for plot in (plot_budgets, plot_bytes))
    assert "planned = measured" not in plot_memory(rounds)  # the legend has an entry besides those of the devices
    assert "planned = measured" in plot_memory((dataclasses.replace(ROUND, clients=rows[:19]),))


def test_a_row_shows_free_and_budget_and_no_figures_where_there_are_none() -> None:
    cells = {column.title: column.cell(AGGREGATED) for column in CLIENT_COLUMNS}
    titles = ("free MB", "budget MB", "link kB", "submodel", "limit", "planned MB")
    assert tuple(cells[title] for title in titles) == ("900.0", "18.0", "125", "w1/2 d2-1", "memory", "15.0")
    cells = {column.title: column.cell(SKIPPED) for column in CLIENT_COLUMNS}
    assert (cells["measured MB"], cells["loss"], cells["state"]) == ("-", "-", "skipped: no submodel fits")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("", encoding="utf-8")
    with pytest.raises(FileError, match="taken"):
        write_results(file, name="test", result=RESULT)


def test_a_report_that_cannot_be_drawn_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rounds: object) -> str:
        raise ZeroDivisionError("<no font>")

    monkeypatch.setattr("subfleet.reporting.plots.plot_memory", broken)
    page = write_results(tmp_path, name="a<b", result=RESULT).read_text(encoding="utf-8")
    assert "The report cannot be made (ZeroDivisionError: &lt;no font&gt;)" in page
    assert "a&lt;b" in page
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["accuracy"] == 0.5
    assert len((tmp_path / "clients.csv").read_text(encoding="utf-8").splitlines()) == 5


def test_every_file_names_the_model_of_the_accuracy(tmp_path: Path) -> None:
    model = EvaluatedModel(kind="trained", submodel="w1/2 d1", architecture_id="a" * 16, untrained=0.25)
    rounds = (ROUND, dataclasses.replace(ROUND, round=2, model=model))
    result = dataclasses.replace(RESULT, rounds=rounds)
    write_results(tmp_path, name="test", result=result)
    words = "submodel w1/2 d1, the largest that devices have trained, 25.0% untrained"
    described = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["model"]
    assert (described["kind"], described["submodel"], described["description"]) == ("trained", "w1/2 d1", words)
    assert described["short"] == "w1/2 d1, 25.0% untrained"
    with (tmp_path / "rounds.csv").open(encoding="utf-8", newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["the model", words]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"Test accuracy of {words}: 0.5000" in page
    assert f"Accuracy of {words} on the evaluation samples." in page
    assert describe_result(result) == f"Test accuracy of {words}: 0.5000"
    nothing = dataclasses.replace(RESULT, accuracy=None, rounds=())
    assert summary_of("test", nothing)["accuracy"] is None
    assert describe_result(nothing) == "No round was aggregated, so the model was not evaluated"


def test_unmeasured_figures_are_empty_in_every_file(tmp_path: Path) -> None:
    rounds = (ROUND.without_measurements(),)
    write_results(tmp_path, name="test", result=dataclasses.replace(RESULT, rounds=rounds))
    with (tmp_path / "clients.csv").open(encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file))
    assert (row["seconds"], row["took_s"], row["measured_peak_bytes"]) == ("", "", "")
    with (tmp_path / "rounds.csv").open(encoding="utf-8", newline="") as file:
        assert next(csv.DictReader(file))["seconds"] == ""
    cells = {column.title: column.cell(rounds[0].clients[0]) for column in CLIENT_COLUMNS}
    assert (cells["seconds"], cells["measured MB"]) == ("-", "-")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Planned against measured" not in page
    assert "0.0 s" not in page


def test_a_run_without_accuracy_reports_the_metrics_of_its_kind(tmp_path: Path) -> None:
    """A device that has not answered is also in the table."""
    metrics = {"mae": 0.25, "r2": 0.5, "rmse": 0.5}
    last = dataclasses.replace(ROUND, accuracy=None, metrics=metrics, headline="rmse")
    known: dict[str, Any] = {"device": "pi", "architecture": "w1", "architecture_id": "", "accuracy": None}
    rows = (
        EvaluationRow(client_id="a", metrics=metrics, loss=0.25, sample_count=4, label_count=4, **known),
        EvaluationRow(client_id="b", status="missing: no answer came in time", **known),
    )
    evaluation = EvaluationRecord(round=1, seconds=1.0, clients=rows, headline="rmse", together=metrics)
    result = dataclasses.replace(RESULT, accuracy=None, rounds=(last,), evaluations=(evaluation,))
    report = write_results(tmp_path, name="test", result=result).read_text(encoding="utf-8")
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert (summary["accuracy"], summary["headline"]) == (None, "rmse")
    assert list(summary["metrics"].items()) == [("rmse", 0.5), ("mae", 0.25), ("r2", 0.5)]
    assert (summary["evaluation"]["rmse"]["mean"], summary["evaluation"]["accuracy"]) == (0.5, None)
    assert summary["evaluation"]["together"] == metrics
    assert "RMSE 0.5000, MAE 0.2500, R2 0.5000" in report
    assert "test RMSE" in report
    with (tmp_path / "evaluations.csv").open(encoding="utf-8", newline="") as file:
        assert [row["rmse"] for row in csv.DictReader(file)] == ["0.5", ""]
    assert last.quality == "RMSE 0.5000, R2 0.5000"
    assert describe_result(result) == "Test RMSE of the model: 0.5000, R2 0.5000"


@pytest.mark.parametrize("metric", ["accuracy", "rmse"])
def test_devices_own_models_are_shown_with_or_without_an_evaluation(metric: str, tmp_path: Path) -> None:
    """A server of real devices does not evaluate their models."""
    file = tmp_path / "made.onnx"
    file.write_bytes(b"model")
    deployed = DeployedModel(
        client_id="pi",
        target="onnx",
        path=file,
        architecture="w1",
        max_abs_diff=1e-7,
        status="deployed",
    )
    rows = copy_models(tmp_path, [(deployed, file)])
    result = dataclasses.replace(RESULT, rounds=(dataclasses.replace(ROUND, headline=metric),))
    report = write_results(tmp_path, name="test", result=result, models=rows).read_text(encoding="utf-8")
    assert "<td>models/pi/model.onnx</td>" in report
    assert "on its own samples" not in report
    evaluated_rows = [add_metric(row, metric, 0.75) for row in rows]
    page = write_results(tmp_path, name="test", result=result, models=evaluated_rows).read_text(encoding="utf-8")
    assert f"<th>{METRICS[metric].title} on its own samples</th>" in page
    assert "<td>0.7500</td></tr>" in page


def test_data_on_another_scale_are_named_in_report_and_output(tmp_path: Path) -> None:
    reason = "its inputs range from 0 to 255, those of the evaluation data from 0 to 1"
    rows = [dataclasses.replace(AGGREGATED, client_id=f"c{number}", data_warning=reason) for number in range(5)]
    result = dataclasses.replace(RESULT, rounds=(dataclasses.replace(ROUND, clients=(AGGREGATED, *rows)),))
    report = write_results(tmp_path, name="test", result=result).read_text(encoding="utf-8")
    sentences = [f"Client c{number}: {reason}" for number in range(3)]
    sentences.append("The data of 2 more clients differ in scale from the evaluation data too")
    assert list(describe_ending(result))[:4] == sentences
    assert all(f"<p>{line}.</p>" in report for line in sentences)
    assert summary_of("test", result)["data_warnings"] == {f"c{number}": reason for number in range(5)}
