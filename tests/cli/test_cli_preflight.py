"""`subfleet preflight` exports a run's programs before any device joins."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from shared_programs import share_exporter
from typer.testing import CliRunner, Result

from subfleet.cli.commands import app
from subfleet.cli.preflight import Verdict, show_verdicts
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.submodel import Architecture

pytestmark = [pytest.mark.slow, pytest.mark.export]

CONFIG = """
name = "try"
data.test = "subfleet.tasks:load_digits"
rates = [1.0]
targets = ["onnx"]
[model]
family = "mlp"
input_shape = [64]
class_count = 10
widths = [8]
depths = [2]
group_size = 4
[method]
type = "heterofl"
depth = true
"""


DEVICE_NETWORKS = """
[[fleet.devices]]
id = "small"
log = "laptop"
network = { family = "mlp", widths = [4], depths = [1] }
[[fleet.devices]]
id = "deep"
log = "laptop"
network = { family = "mlp", widths = [8], depths = [2] }
[method]
type = "fedadp"
choice = "declared"
"""


def preflight(folder: Path, config: str, cache: Path) -> Result:
    path = folder / "run.toml"
    path.write_text(config, encoding="utf-8")
    return CliRunner().invoke(app, ["preflight", str(path), "--json"], env={"SUBFLEET_CACHE": str(cache)})


def test_networks_of_devices_are_exported_in_place_of_the_model(
    cache: CacheFolder, exports: ExportPool, tmp_path: Path
) -> None:
    model, _, _ = CONFIG.partition("[method]")
    with share_exporter(exports, "subfleet.cli.preflight"):
        result = preflight(tmp_path, model + DEVICE_NETWORKS, cache.path)
    assert result.exit_code == 0, result.output
    verdicts = json.loads(result.stdout)
    assert [verdict["submodel"].rsplit(" ", 1)[0] for verdict in verdicts] == ["union1 mlp d1", "union1 mlp d2"]
    assert all(verdict["planned_peak_bytes"] > 0 for verdict in verdicts)


def test_every_submodel_is_exported_and_reported(tmp_path: Path) -> None:
    result = preflight(tmp_path, CONFIG, tmp_path / "cache")
    assert result.exit_code == 0, result.output
    verdicts = json.loads(result.stdout)
    assert [verdict["submodel"] for verdict in verdicts] == ["w1 d1", "w1 d2"]
    assert result.stderr.splitlines() == [
        "Exporting: 1 done, last w1 d1 for onnx",
        "Exporting: 2 done, last w1 d2 for onnx",
    ]
    for verdict in verdicts:
        assert (
            verdict["planned_peak_bytes"]
            == sum(size for name, size in verdict["memory"].items() if name != "packings")
            > 0
        )
        assert verdict["program_bytes"] > 0
        assert verdict["problem"] == ""
    assert len(list((tmp_path / "cache").glob("*.program"))) == 2


def test_a_program_that_cannot_be_exported_is_one_sentence_and_an_exit_code(cache: CacheFolder, tmp_path: Path) -> None:
    result = preflight(tmp_path, CONFIG.replace("onnx", "abacus"), cache.path)
    assert result.exit_code == ExitCode.EXPORT
    assert "'abacus'" in result.stderr
    assert "Traceback" not in result.output


def test_a_name_is_no_markup_in_the_table() -> None:
    evil = "[link=http://evil.example]w1[/link]"
    architecture = Architecture(name=evil, axes=(), blocks=())
    verdict = Verdict(submodel=evil, target="[/]", parameters=1, problem=f"layer {evil}", architecture=architecture)
    screen = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    show_verdicts([verdict], screen)
    assert isinstance(screen.file, io.StringIO)
    output = screen.file.getvalue()
    assert output.count(evil) == 3
    assert "\x1b]8" not in output
