"""`subfleet inspect` shows how a network can be cut, and what its submodels cost."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_programs import share_exporter
from typer.testing import CliRunner, Result

from subfleet.cli.commands import app
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.protocol.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.export]

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(6, width), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(width + 4)
        self.block = nn.Sequential(Add(width + 4))
        self.head = nn.Linear(width + 4, 3)

    def forward(self, inputs):
        joined = self.norm(torch.cat([self.left(inputs), self.right(inputs)], 1))
        return self.head(self.block(joined))


class Add(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, inputs):
        return inputs + self.layer(inputs)
"""
RUN = """
name = "tiny"
data.test = "subfleet.tasks:load_digits"
targets = ["onnx"]
[model]
family = "mlp"
input_shape = [64]
class_count = 10
widths = [8]
depths = [2]
group_size = 4
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inspected_net.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "inspected_net", raising=False)


@pytest.fixture(autouse=True)
def one_exporter(exports: ExportPool) -> Iterator[None]:
    with share_exporter(exports, "subfleet.cli.inspection"):
        yield


def inspect(cache: CacheFolder, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments], env={"SUBFLEET_CACHE": str(cache.path), "COLUMNS": "120"})


def test_a_module_is_described_with_what_its_submodels_cost(cache: CacheFolder) -> None:
    result = inspect(cache, "inspected_net:Net", "--argument", "width=8", "--input-shape", "6", "--json")
    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)
    axes = {axis["name"]: axis for axis in described["axes"]}
    assert {name: (axis["size"], axis["mixed"]) for name, axis in axes.items()} == {
        "left": (8, True), "right": (4, True), "class": (3, False),
    }  # fmt: skip
    assert axes["right"]["tensors"][:2] == ["right.weight", "right.bias"]
    assert (described["family"], described["blocks"]) == ("recorded", ["block.0"])
    assert described["whole"] == {"the shape of a sample": ["left.weight[1]", "right.weight[1]"]}
    smallest, quarter, whole = described["submodels"]
    assert smallest["parameters"] < quarter["parameters"] < whole["parameters"]
    assert whole["parameters"] == 12 * 7 + 2 * 12 + 12 * 13 + 3 * 13
    assert whole["forward_macs"] == 12 * 6 + 12 * 12 + 12 * 3
    for submodel in described["submodels"]:
        for target in ("onnx", "executorch"):
            trial = submodel["runtimes"][target]
            if trial["problem"]:  # ExecuTorch is not installed
                assert "executorch" in trial["problem"]
            else:
                assert trial["step_s"] > 0
            assert trial["planned_peak_bytes"] > trial["program_bytes"] > 0


def test_a_drawing_shows_each_layer_with_its_axes(cache: CacheFolder) -> None:
    result = inspect(cache, "inspected_net:Net", "--argument", "width=8", "--input-shape", "6")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("recorded: 303 parameters, 0.0 million multiplications for a sample of 6, 3 outputs")
    drawn = {line.split()[0]: line for line in lines if "█" in line}
    assert list(drawn) == ["left", "right", "block.0.layer", "head"]
    assert "12[1+2] x 12[1+2]" in drawn["block.0.layer"]
    assert drawn["block.0.layer"].rstrip().endswith("yes")
    assert drawn["block.0.layer"].count("█") > drawn["head"].count("█")
    assert "A submodel can leave out 1 parts: block.0" in result.stdout
    assert "Kept whole (the shape of a sample): left.weight[1], right.weight[1]" in result.stdout


def test_a_run_is_described_on_its_runtimes(cache: CacheFolder, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RUN, encoding="utf-8")
    result = inspect(cache, "tiny.toml", "--set", "model.widths=[16]", "--json")
    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)
    assert described["family"] == "mlp"
    assert {axis["size"] for axis in described["axes"] if axis["name"].endswith("stream")} == {16}
    assert all(list(submodel["runtimes"]) == ["onnx"] for submodel in described["submodels"])


def test_a_module_that_cannot_be_cut_is_tried_as_a_whole(cache: CacheFolder, tmp_path: Path) -> None:
    (tmp_path / "whole_net.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(4, 3)\n")
    result = inspect(cache, "whole_net:build", "--input-shape", "4", "--json")
    assert result.exit_code == 0, result.output
    assert [submodel["name"] for submodel in json.loads(result.stdout)["submodels"]] == ["whole"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspected_net:Net",), "--input-shape is '', but must be the shape of one sample, such as 3,64,64"),
        (("inspected_net:Net", "--input-shape", "6,x"), "--input-shape is '6,x'"),
        (
            ("inspected_net:Net", "--input-shape", "6", "--argument", "width"),
            "--argument is 'width', but must be like width=32",
        ),
        (("inspected_net:Net", "--input-shape", "6"), "with the arguments {} fails"),
        (("inspected_net:Net", "--input-shape", "6", "--set", "rounds=1"), "a module has none; use --argument"),
        (("quickstart", "--input-shape", "6"), "describe a module, but 'quickstart' is a run"),
    ],
)
def test_a_wrong_command_gives_one_sentence(arguments: tuple[str, ...], message: str, cache: CacheFolder) -> None:
    result = inspect(cache, *arguments)
    assert result.exit_code == ExitCode.CONFIG
    assert message in result.stderr
    assert "Traceback" not in result.output
