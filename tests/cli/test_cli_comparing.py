"""`subfleet compare` and `subfleet runs` with finished runs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from subfleet.cli.commands import app
from subfleet.protocol.exit_codes import ExitCode
from subfleet.settings.reading import read_runs
from subfleet.settings.run_folder import write_description

SUMMARY: dict[str, Any] = {
    "headline": "accuracy",
    "participation": 0.5,
    "model": None,
    "evaluation": None,
    "figures": {},
    "outliers": {},
    "networks": [],
    "programs_from": {},
    "costs": {"training_macs": 0, "rounds": None, "expected_rounds": None},
}
ACCURACIES = {"heterofl": (0.9, 0.8, 0.85), "fjord": (0.7, 0.65, 0.6)}


def write_summary(folder: Path, accuracy: float) -> None:
    clients = [{"bytes_down": 2_000_000, "bytes_up": 1_000_000}]
    rounds = [{"round": number, "accuracy": accuracy * number / 2, "clients": clients} for number in (1, 2)]
    summary = {**SUMMARY, "accuracy": accuracy, "metrics": {"accuracy": accuracy}, "rounds": rounds}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two methods with three seeds each."""
    paths = []
    for name, accuracies in ACCURACIES.items():
        for run, accuracy in zip(read_runs(name, ("rounds=2",), (1, 2, 3)), accuracies, strict=True):
            folder = tmp_path / "runs" / run.name
            folder.mkdir(parents=True)
            write_description(folder, run)
            write_summary(folder, accuracy)
            paths.append(str(folder))
    return paths


def invoke(*arguments: str, input: str | None = None) -> Any:  # noqa: A002 - the name in typer
    return CliRunner().invoke(app, list(arguments), input=input)


@pytest.mark.slow
def test_entrants_are_paired_over_their_seeds(folders: list[str], tmp_path: Path) -> None:
    result = invoke("compare", *folders, "--json", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert (first["name"], first["seeds"], first["gain"]) == ("heterofl", [1, 2, 3], None)
    assert first["accuracy"] == pytest.approx(0.85)
    assert (second["name"], second["worst"], second["megabytes"]) == ("fjord", 0.6, pytest.approx(6.0))
    gain = second["gain"]
    # Differences of -0.2, -0.15 and -0.25: standard error 0.05 / sqrt(3), times 4.3027 for two degrees of freedom.
    assert gain["mean"] == pytest.approx(-0.2)
    assert gain["low"] == pytest.approx(-0.2 - 0.1242, abs=1e-4)
    assert gain["high"] == pytest.approx(-0.2 + 0.1242, abs=1e-4)
    with (tmp_path / "out" / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["heterofl", "fjord"]
    assert (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8").count("| fjord |") == 1
    assert (tmp_path / "out" / "comparison.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.slow
def test_what_it_takes_to_reach_a_target_is_told_and_plotted_over_what_was_spent(
    folders: list[str], tmp_path: Path
) -> None:
    """Quality is half the last one after the first round; each round takes 10 s and moves 3 MB."""
    for folder in map(Path, folders):
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rounds = [{**row, "seconds": 10.0} for row in summary["rounds"]]
        (folder / "summary.json").write_text(json.dumps({**summary, "rounds": rounds}), encoding="utf-8")
    out = ("--out", str(tmp_path / "out"))
    first, second = json.loads(
        invoke("compare", *folders, "--target", "0.42", "--over", "seconds", *out, "--json").stdout
    )
    assert first["reached"] == {
        "target": 0.42,
        "runs": 3,
        "rounds": pytest.approx(4 / 3),
        "seconds": pytest.approx(40 / 3),
        "bytes": 4e6,
        "macs": 0.0,
        "joules": 0.0,
    }
    assert second["reached"] == {**first["reached"], "rounds": 2.0, "seconds": 20.0, "bytes": 6e6}
    assert "<!-- seconds -->" in (tmp_path / "out" / "comparison.svg").read_text("utf-8")
    never = json.loads(invoke("compare", *folders, "--target", "0.66", "--json").stdout)[1]["reached"]
    assert never["runs"] == 1
    assert "1 of 3 seeds" in " ".join(invoke("compare", *folders, "--target", "0.66", *out).stdout.split())
    unmeasured = json.loads((Path(folders[0]) / "summary.json").read_text("utf-8"))
    del unmeasured["rounds"][1]["seconds"]
    (Path(folders[0]) / "summary.json").write_text(json.dumps(unmeasured), encoding="utf-8")
    refused = invoke("compare", *folders, "--over", "seconds", *out)
    assert refused.exit_code == ExitCode.CONFIG
    assert "have no seconds" in refused.output


@pytest.mark.slow
def test_a_table_is_shown(folders: list[str]) -> None:
    result = invoke("compare", *folders)
    assert result.exit_code == 0, result.output
    assert "heterofl" in result.stdout
    assert "-0.2000" in result.stdout


@pytest.mark.slow
def test_figures_of_a_batch_are_columns_where_every_seed_has_them(folders: list[str]) -> None:
    for index, folder in enumerate(folders):
        path = Path(folder) / "summary.json"
        more = {"own_mean": 0.25} if index else {}
        figures = {"worst_tier": 0.1 * index, "backdoor": 0.5, **more} if index < 3 else {}
        summary = json.loads(path.read_text(encoding="utf-8")) | {"figures": figures}
        path.write_text(json.dumps(summary), encoding="utf-8")
    first, second = json.loads(invoke("compare", *folders, "--json").stdout)
    assert first["figures"] == {"worst_tier": pytest.approx(0.1), "backdoor": 0.5}
    assert second["figures"] == {}
    result = invoke("compare", *folders, "--out", str(Path(folders[0]).parent / "out"))
    assert result.exit_code == 0, result.output
    above, _, below = result.stdout.partition("worst tier")
    assert "0.8500" in above
    assert "0.1000" in below
    with (Path(folders[0]).parent / "out" / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["worst tier"], row["backdoor"]) for row in rows] == [("0.1000", "0.5000"), ("", "")]
    assert "own" not in rows[0]


@pytest.mark.slow
def test_the_costs_of_training_have_their_own_table(folders: list[str]) -> None:
    for index, folder in enumerate(folders[:3]):
        path = Path(folder) / "summary.json"
        seconds = {"mean_s": 2.0 + index, "deviation_s": 0.5, "count": 2}
        costs: dict[str, Any] = {
            "training_macs": 10**9 * (index + 1),
            "bytes_down": 10**6,
            "bytes_up": 0,
            "storage_bytes": 5 * 10**5,
        }
        costs |= {"rounds": seconds if index else None, "expected_rounds": seconds}
        networks = [{"retired_round": 0}, *({"retired_round": None} for _ in range(index + 1))]
        summary = json.loads(path.read_text(encoding="utf-8")) | {"costs": costs, "networks": networks}
        path.write_text(json.dumps(summary), encoding="utf-8")
    first, second = json.loads(invoke("compare", *folders, "--json").stdout)
    assert first["costs"] == {
        "networks": 2.0,
        "training_macs": 2e9,
        "bytes_down": 1e6,
        "bytes_up": 0.0,
        "storage_bytes": 5e5,
        "expected_round_s": 3.0,
        "expected_round_deviation_s": 0.5,
    }, "one seed has measured no round"
    assert second["costs"] == {"networks": 0.0, "training_macs": 0.0}
    assert [entrant["figures"] for entrant in (first, second)] == [{}, {}]
    result = invoke("compare", *folders, "--out", str(Path(folders[0]).parent / "out"))
    assert result.exit_code == 0, result.output
    with (Path(folders[0]).parent / "out" / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("networks", "training GMACs", "MB down", "storage MB", "expected s", "expected ± s")
    assert [[row[name] for name in names] for row in rows] == [
        ["2.0", "2", "1.0", "0.50", "3.00", "0.50"],
        ["0.0", "0", "", "", "", ""],
    ]
    assert "round s" not in rows[0]


def test_runs_that_cannot_be_compared_are_one_sentence(folders: list[str], tmp_path: Path) -> None:
    (run,) = read_runs("fjord", ("rounds=3", "name=fjord-s9", "seed=9"))
    folder = tmp_path / "odd"
    folder.mkdir()
    write_description(folder, run)
    write_summary(folder, 0.5)
    result = invoke("compare", *folders, str(folder))
    assert result.exit_code == ExitCode.CONFIG
    assert "runs named 'fjord' differ in rounds from 2 to 3" in result.stderr
    result = invoke("compare", folders[0], folders[0])
    assert "two runs named 'heterofl' have seed 1" in result.stderr
    (Path(folders[0]) / "summary.json").unlink()
    result = invoke("compare", *folders)
    assert result.exit_code == ExitCode.FILE
    assert "is not finished" in result.stderr
    assert invoke("compare", str(tmp_path / "none")).exit_code == ExitCode.FILE


def test_runs_are_listed_shown_and_removed(folders: list[str]) -> None:
    runs = str(Path(folders[0]).parent)
    (Path(folders[1]) / "summary.json").unlink()
    listed = json.loads(invoke("runs", "list", "--runs", runs, "--json").stdout)
    assert [(run["name"], run["over"], run["method"]) for run in listed][3:] == [
        ("heterofl-s1", True, "heterofl"),
        ("heterofl-s2", False, "heterofl"),
        ("heterofl-s3", True, "heterofl"),
    ]
    assert "heterofl-s2: heterofl, 2 rounds, seed 2, not finished" in invoke("runs", "list", "--runs", runs).stdout
    description = json.loads(invoke("runs", "show", "fjord-s2", "--runs", runs, "--json").stdout)
    assert (description["accuracy"], description["settings"]["method"]["type"]) == (0.65, "fjord")
    assert Path(folders[2]).exists()
    assert invoke("runs", "remove", "heterofl-s3", "--runs", runs, input="n\n").exit_code == 0
    assert Path(folders[2]).exists()
    assert invoke("runs", "remove", "heterofl-s3", "--runs", runs, "--yes").exit_code == 0
    assert not Path(folders[2]).exists()
    result = invoke("runs", "show", "heterofl-s4", "--runs", runs)
    assert result.exit_code == ExitCode.CONFIG
    assert "did you mean 'heterofl-s" in result.stderr


def test_a_run_that_is_over_is_not_resumed(folders: list[str]) -> None:
    result = invoke("runs", "resume", "fjord-s1", "--runs", str(Path(folders[0]).parent))
    assert result.exit_code == ExitCode.CONFIG
    assert "is already finished" in result.stderr


def test_without_runs_the_next_step_is_named(tmp_path: Path) -> None:
    assert "subfleet run quickstart" in invoke("runs", "list", "--runs", str(tmp_path)).stdout


@pytest.mark.slow
def test_a_comparison_names_the_models_of_the_accuracies(folders: list[str]) -> None:
    for index, folder in enumerate(folders):
        path = Path(folder) / "summary.json"
        model = {"short": "w1/2 d1" if index == 1 else "full"} if index < 3 else None
        figures = {"worst_tier": None, "submodels": 0.5}
        summary = json.loads(path.read_text(encoding="utf-8")) | {"model": model, "figures": figures}
        path.write_text(json.dumps(summary), encoding="utf-8")
    first, second = json.loads(invoke("compare", *folders, "--json").stdout)
    assert (first["model"], second["model"]) == ("full or w1/2 d1", "")
    assert first["figures"] == {"submodels": pytest.approx(0.5)}, "a figure that is blank in a run is left out"
    output = invoke("compare", *folders).stdout
    assert "full or" in output
    assert "w1/2 d1" in output


def test_a_run_without_aggregated_updates_is_refused(folders: list[str]) -> None:
    path = Path(folders[0]) / "summary.json"
    path.write_text(json.dumps({**SUMMARY, "accuracy": None, "metrics": {}, "rounds": []}), encoding="utf-8")
    result = invoke("compare", *folders)
    assert result.exit_code == ExitCode.CONFIG
    assert "has no metrics, because no round was aggregated or nothing was trained; leave it out" in result.stderr


@pytest.mark.slow
def test_runs_with_altered_updates_are_marked(folders: list[str]) -> None:
    assert "outliers" not in invoke("compare", *folders).stdout
    kinds = [
        {"scaled": {"eve": 2}, "left_out": {}},
        {"left_out": {"bob": 1}, "scaled": {"bob": 1}},
        {"reported": {"bob": 1}},
    ]
    for folder, outliers in zip(folders[3:], kinds, strict=True):
        path = Path(folder) / "summary.json"
        summary = {**json.loads(path.read_text(encoding="utf-8")), "outliers": outliers}
        path.write_text(json.dumps(summary), encoding="utf-8")
    first, second = json.loads(invoke("compare", *folders, "--json").stdout)
    assert first["outliers"] == ""
    assert second["outliers"] == "scaled in 2 of 3, left out in 1 of 3, reported in 1 of 3"


@pytest.mark.slow
def test_runs_are_compared_by_the_headline_metric_of_their_kind(folders: list[str], tmp_path: Path) -> None:
    """A lower error is better, for the worst seed and for the gain."""
    errors = {"heterofl": (0.5, 0.6, 0.4), "fjord": (0.4, 0.45, 0.35)}
    for folder in map(Path, folders):
        name, seed = folder.name.rsplit("-s", 1)
        metrics = {"rmse": errors[name][int(seed) - 1], "r2": 0.25}
        rounds: list[dict[str, Any]] = [{"round": 1, "accuracy": None, **metrics, "clients": []}]
        evaluation = {"rmse": {"mean": 0.7, "interquartile_range": 0.1, "worst": 0.9}}
        summary = {**SUMMARY, "accuracy": None, "headline": "rmse", "metrics": metrics, "rounds": rounds}
        figures = {"accuracy": None, "submodels": 0.65}
        text = json.dumps({**summary, "evaluation": evaluation, "figures": figures})
        (folder / "summary.json").write_text(text, encoding="utf-8")
    result = invoke("compare", *folders, "--json", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert (first["rmse"], first["worst"], first["figures"]["r2"]) == (pytest.approx(0.5), 0.6, 0.25)
    assert second["gain"]["mean"] == pytest.approx(0.1), "0.1 less of an error is a gain"
    assert second["figures"]["own_worst"] == 0.9
    table = (tmp_path / "out" / "comparison.md").read_text("utf-8")
    assert "| name | seeds | model | RMSE | worst | R2 | submodels | own |" in table
    assert "test RMSE" in (tmp_path / "out" / "comparison.svg").read_text("utf-8")
    write_summary(Path(folders[0]), 0.9)
    mixed = invoke("compare", folders[0], folders[3])
    assert mixed.exit_code == ExitCode.CONFIG
    assert "report accuracy and runs 'fjord' report rmse, so they cannot be compared" in mixed.output
