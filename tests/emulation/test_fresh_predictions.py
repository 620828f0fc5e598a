"""Each device's own model is tried in a fresh process, which may end in any way."""

import sys
from pathlib import Path

import pytest

from subfleet.emulation import predictions
from subfleet.protocol.errors import RunError


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What runs in place of Python; a test writes what it does."""
    script = tmp_path / "python"
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return script


def predicted(script: Path, does: str) -> tuple[float, ...]:
    script.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
    return predictions.accuracies([Path("model.onnx"), Path("model.pte")], Path("test.npz"))


def test_the_accuracy_is_what_the_process_tells(process: Path) -> None:
    assert predicted(process, """echo '{"accuracy": 0.5}'""") == (0.5, 0.5)


@pytest.mark.parametrize("does", ["kill -INT $$", "echo 'subfleet-edge: stopped' >&2; exit 130"])
def test_a_process_that_ctrl_c_has_ended_ends_the_run_as_interrupted(process: Path, does: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        predicted(process, does)


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (
            "echo a warning >&2; echo 'subfleet-edge: the data are gone' >&2; exit 12",
            "subfleet-edge: the data are gone",
        ),
        ("kill -KILL $$", "it was killed by signal 9"),
        ("exit 3", "it ended with exit code 3 and said nothing"),
    ],
)
def test_a_process_that_fails_gives_its_reason(process: Path, does: str, reason: str) -> None:
    with pytest.raises(RunError) as caught:
        predicted(process, does)
    assert str(caught.value) == f"predicting with model.onnx failed: {reason}"
