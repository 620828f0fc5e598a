"""Each device's own model is evaluated in a new process, which may end in any way."""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from subfleet.emulation.predictions import evaluate_models
from subfleet.protocol.errors import RunError
from subfleet.reporting.results import measure_models


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that runs instead of Python; tests write its content."""
    script = tmp_path / "python"
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return script


def evaluate(script: Path, command: str, contents: Sequence[str] = ("model", "model")) -> tuple[float, ...]:
    script.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    models = [script.parent / name for name in ("model.onnx", "model.pte", "same.onnx", "other.onnx")[: len(contents)]]
    for model, content in zip(models, contents, strict=True):
        model.write_text(content, encoding="utf-8")
    rows = [
        {"sha256": hashlib.sha256(model.read_bytes()).hexdigest(), "target": model.suffix, "file": model.name}
        for model in models
    ]
    measured = measure_models(script.parent, rows, lambda files: evaluate_models(files, Path("test.npz")))
    return tuple(row["own"] for row in measured)


def test_the_value_is_that_of_the_process(process: Path) -> None:
    assert evaluate(process, """echo '{"headline": "rmse", "metrics": {"rmse": 0.5, "r2": 1}}'""") == (0.5, 0.5)


def test_models_with_the_same_bytes_are_evaluated_once(process: Path) -> None:
    """The same bytes in another format are another model."""
    log = process.parent / "tried.txt"
    command = f"""echo "$4" >> {log}; printf '{{"headline": "rmse", "metrics": {{"rmse": 0.%d}}}}' $(wc -c < "$4")"""
    assert evaluate(process, command, ["model", "model", "model", "another"]) == (0.5, 0.5, 0.5, 0.7)
    names = sorted(Path(line).name for line in log.read_text(encoding="utf-8").splitlines())
    assert names == ["model.onnx", "model.pte", "other.onnx"]


@pytest.mark.parametrize("command", ["kill -INT $$", "echo 'subfleet-edge: stopped' >&2; exit 130"])
def test_a_process_that_ctrl_c_has_ended_ends_the_run_as_interrupted(process: Path, command: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(process, command)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            "echo a warning >&2; echo 'subfleet-edge: the data are gone' >&2; exit 12",
            "subfleet-edge: the data are gone",
        ),
        ("kill -KILL $$", "it was killed by signal 9"),
        ("exit 3", "it ended with exit code 3 and no message"),
    ],
)
def test_a_process_that_fails_gives_its_reason(process: Path, command: str, reason: str) -> None:
    with pytest.raises(RunError) as caught:
        evaluate(process, command)
    assert str(caught.value) == f"predicting with {process.parent / 'model.onnx'} failed: {reason}"
