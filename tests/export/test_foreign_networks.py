"""Third-party networks are exported or refused with a helpful message: `benchmarks/foreign_networks.py`.

They need the extra `networks`, which `make test-long` installs.
"""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
TARGETS = ("onnx", "executorch")
NAMES = (
    "ResNet-18",
    "ResNet-18, frozen", "ShuffleNet V2", "MnasNet", "RegNet", "SqueezeNet", "ConvNeXt", "Swin", "GhostNet", "RepVGG",
    "ConvMixer", "BERT", "DistilBERT", "GPT-2", "Llama", "ViT", "Whisper's encoder", "wav2vec 2", "U-Net",
    "TCN with weight norm", "Conformer block", "GRU tagger", "autoencoder",
)  # fmt: skip
REFUSED: Mapping[tuple[str, str], str] = MappingProxyType({})
"""Part of the message, by network and target."""


@cache
def run_benchmark(*arguments: str) -> tuple[int, Mapping[str, Any]]:
    """Run the benchmark; return its exit code and its last line."""
    command = [sys.executable, str(BENCHMARKS / "foreign_networks.py"), *arguments, "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stdout, process.stderr
    return process.returncode, json.loads(process.stdout.splitlines()[-1])


def test_every_network_is_tried_and_enough_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test below checks the result of each network."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert set(importlib.import_module("foreign.registry").NETWORKS) == set(NAMES)
    goals = importlib.import_module("foreign_networks").GOALS
    assert dict(goals) == {"onnx": 18, "executorch": 16}
    for target, goal in goals.items():
        assert len(NAMES) - sum(refused == target for _, refused in REFUSED) >= goal


@pytest.mark.long
@pytest.mark.export
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_a_network_is_exported_as_planned_or_refused_with_layer_and_remedy(name: str, target: str) -> None:
    code, report = run_benchmark("--network", name, "--target", target)
    (program,) = report["programs"]
    assert REFUSED.get((name, target), "") in program["refused"]
    assert bool(program["refused"]) == ((name, target) in REFUSED), program["refused"]
    assert not report["faults"]
    assert code == 0


@pytest.mark.long
@pytest.mark.export
def test_the_networks_are_of_the_pinned_versions() -> None:
    extra = re.search(r"^networks = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None
    pinned = dict(entry.strip(' "').split("==") for entry in extra[1].split(","))
    assert pinned == {name: version(name) for name in ("torchvision", "timm", "transformers")}


@pytest.mark.long
@pytest.mark.export
@pytest.mark.parametrize(("plant", "message"), [("gradient", "is off by"), ("plan", "its plan is 0.")])
def test_a_planted_error_is_found(plant: str, message: str) -> None:
    """A program with a wrong gradient is never written, and a plan without activations is too small."""
    code, report = run_benchmark("--network", "SqueezeNet", "--target", "onnx", "--plant", plant)
    (program,) = report["programs"]
    assert code == 1
    assert message in program["refused"] + " ".join(report["faults"])
