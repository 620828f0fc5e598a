"""A run with growing networks reports them in its tables, `summary.json`, its page and comparisons."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from shared_programs import share_exporter
from typer.testing import CliRunner

from subfleet.cli.commands import app
from subfleet.cli.console import PlainLines
from subfleet.cli.running import describe_outcome, run_all
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.settings.reading import read_run

pytestmark = [pytest.mark.slow, pytest.mark.export]

PACE = 1e6
PROFILE = f"""
name = "box"
title = "A box that tells its pace"
memory_fraction = 0.5
runtimes = ["torch"]
macs_per_s = {PACE}
"""
RUN = """
base = "fedtrans"
rounds = 6
min_clients = 3
targets = ["torch"]
deploy_targets = []
host = { type = "batch" }
method = { type = "fedtrans", gamma = 1, delta = 1, beta = 1e9, stop_rounds = 0 }
model = { family = "mlp", input_shape = [1, 8, 8], class_count = 10, widths = [32], depths = [1], group_size = 4 }
training = { epochs = 1, batch_size = 32, learning_rate = 0.05 }

[fleet]
devices = [
  { id = "box", profile = "BOX", log = "laptop", runtime = "torch" },
  { id = "jetson", profile = "generic", log = "jetson_orin_nano", runtime = "torch" },
  { id = "pi-4", profile = "generic", log = "raspberry_pi_4", runtime = "torch" },
]
"""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """The folder, the output and the summary of a finished run."""

    folder: Path
    printed: list[str]
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def run(cache: CacheFolder, exports: ExportPool, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("grown")
    (folder / "box.toml").write_text(PROFILE, encoding="utf-8")
    (folder / "grown.toml").write_text(RUN.replace("BOX", str(folder / "box.toml")), encoding="utf-8")

    screen = io.StringIO()
    display = PlainLines(Console(file=screen, width=200))
    with share_exporter(exports):
        (outcome,) = run_all([read_run(folder / "grown.toml")], folder / "runs", display, cache=cache)
    for line in describe_outcome(outcome):
        display.say(line)
    summary = json.loads((outcome.folder / "summary.json").read_text(encoding="utf-8"))
    return FinishedRun(folder=outcome.folder, printed=screen.getvalue().splitlines(), summary=summary)


def test_the_summary_has_the_family_tree(run: FinishedRun) -> None:
    networks = {entry["network"]: entry for entry in run.summary["networks"] if entry["retired_round"] != 0}
    first, child = list(networks.values())[:2]
    assert len(networks) >= 3
    assert (first["parent"], child["parent"], child["map"]) == (None, first["network"], "replicated")
    assert child["wider"] == ["section0.block0"]
    assert child["reason"].startswith("section0.block0 wider, as its loss fell by ")
    assert child["forward_macs"] > first["forward_macs"]
    rows = [
        (record["round"], row) for record in run.summary["rounds"] for row in record["clients"] if row["sample_passes"]
    ]
    for name, network in networks.items():
        trainings = [(number, row) for number, row in rows if row["network"] == name]
        assert network["trained_rounds"] == len({number for number, _ in trainings})
        assert network["clients"] == len({row["client_id"] for _, row in trainings})
        assert sum(network["clients_by_round"].values()) == len(trainings)
        assert network["training_macs"] == sum(3 * row["forward_macs"] * row["sample_passes"] for _, row in trainings)
        assert {row["forward_macs"] for _, row in trainings} <= {network["forward_macs"]}
        owners = [row for row in run.summary["evaluation"]["clients"] if row["network"] == name]
        assert network["owners"] == len(owners)
        if owners:
            assert network["own_mean"] == pytest.approx(sum(row["accuracy"] for row in owners) / len(owners))
        if network["trained_rounds"] and network["born_round"]:
            assert network["born_round"] < network["ready_round"] <= min(number for number, _ in trainings)
    assert sum(network["trained_rounds"] > 0 for network in networks.values()) >= 2


def test_the_summary_has_the_costs_of_the_run(run: FinishedRun) -> None:
    costs, rows = run.summary["costs"], [row for record in run.summary["rounds"] for row in record["clients"]]
    assert costs["training_macs"] == 3 * costs["forward_macs"] == sum(row["training_macs"] for row in rows) > 0
    # One epoch over all samples of a device.
    assert all(row["sample_passes"] == row["sample_count"] for row in rows)
    assert costs["bytes_down"] == sum(row["bytes_down"] for row in rows)
    assert costs["bytes_up"] == sum(row["bytes_up"] for row in rows)
    in_use = [network["weight_bytes"] for network in run.summary["networks"] if network["retired_round"] != 0]
    assert costs["storage_bytes"] == run.summary["rounds"][-1]["model_bytes"] == sum(in_use)
    for record in run.summary["rounds"]:
        assert record["seconds"] >= record["expected_s"], "new programs are fetched, too"
        slowest = max(row["took_s"] for row in record["clients"])
        assert record["seconds"] == pytest.approx(slowest), "nothing else takes time of the clock"
    assert costs["rounds"]["mean_s"] >= costs["expected_rounds"]["mean_s"]
    for row in rows:
        paced = row["client_id"] == "box"
        assert row["expected_training_s"] == (pytest.approx(row["training_macs"] / PACE) if paced else 0.0)
        assert row["expected_uplink_s"] > 0
    assert costs["paced"] == pytest.approx(1 / 3)
    slowest = [
        max(
            sum(row[f"expected_{phase}_s"] for phase in ("downlink", "training", "uplink")) for row in record["clients"]
        )
        for record in run.summary["rounds"]
    ]
    assert [record["expected_s"] for record in run.summary["rounds"]] == pytest.approx(slowest)
    assert costs["expected_rounds"]["count"] == 6
    assert costs["expected_rounds"]["mean_s"] == pytest.approx(sum(slowest) / 6)


def test_the_output_describes_networks_and_costs(run: FinishedRun) -> None:
    text = "\n".join(run.printed)
    appeared, ready = text.index("network m1 has appeared, replicated from "), text.index("network m1 may be trained")
    assert appeared < ready
    start = run.printed.index("Networks, each indented below its parent:")
    tree = run.printed[start + 1 : start + 4]
    assert [len(line) - len(line.lstrip()) for line in tree] == [2, 4, 6]
    assert tree[1].startswith("    m1: after round 2; section0.block0 wider, as its loss fell by ")
    assert "MACs and" in tree[1]
    assert any(line.startswith("All training took ") for line in run.printed)
    assert "estimated from the speeds of links and, for 33% of the trainings, of devices" in text
    assert "middle half" in text


def test_the_page_shows_the_tree(run: FinishedRun) -> None:
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    _, _, figure = page.partition('<figure class="tree">')
    svg = figure[: figure.index("</svg>") + len("</svg>")]
    ElementTree.fromstring(svg)  # noqa: S314  # our own
    for comment in ("<!-- m1 -->", "<!-- m2 -->", "<!-- section0.block0 wider -->"):
        assert comment in svg
    assert "<td>section0.block0 wider</td>" in page
    assert "All training took" in page
    assert "A round was expected to take" in page


def test_runs_are_compared_by_their_costs(run: FinishedRun) -> None:
    result = CliRunner().invoke(app, ["compare", str(run.folder), "--json"])
    assert result.exit_code == 0, result.output
    (entrant,) = json.loads(result.stdout)
    costs = run.summary["costs"]
    assert entrant["costs"] == {
        "networks": sum(network["retired_round"] != 0 for network in run.summary["networks"]),
        "training_macs": costs["training_macs"],
        "bytes_down": costs["bytes_down"],
        "bytes_up": costs["bytes_up"],
        "storage_bytes": costs["storage_bytes"],
        "round_s": costs["rounds"]["mean_s"],
        "round_deviation_s": costs["rounds"]["deviation_s"],
        "expected_round_s": costs["expected_rounds"]["mean_s"],
        "expected_round_deviation_s": costs["expected_rounds"]["deviation_s"],
    }
    assert entrant["figures"]["own_range"] == run.summary["evaluation"]["accuracy"]["interquartile_range"]
    shown = CliRunner().invoke(app, ["compare", str(run.folder)], env={"COLUMNS": "160"})
    assert "networks" in shown.stdout
    assert f"{costs['bytes_up'] / 1e6:.1f}" in shown.stdout
