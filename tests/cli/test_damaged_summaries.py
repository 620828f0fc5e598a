"""A `summary.json` that is truncated, damaged or of another release ends every command with one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from subfleet.cli.commands import app
from subfleet.protocol.errors import FileError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.settings.reading import read_runs
from subfleet.settings.run_folder import SUMMARY, read_replay, read_summary, write_description, write_summary

RECORD = {
    "accuracy": 0.5,
    "headline": "accuracy",
    "metrics": {"accuracy": 0.5},
    "rounds": [{"round": 1, "accuracy": 0.5, "clients": []}],
    "participation": 0.5,
    "model": None,
    "evaluation": None,
    "figures": {},
    "outliers": {},
    "networks": [],
    "programs_from": {},
    "costs": {"training_macs": 0, "rounds": None, "expected_rounds": None},
}
DAMAGED: dict[str, bytes] = {
    "half": json.dumps(RECORD).encode()[:30],
    "empty": b"",
    "no text": b"\xff\xfe{}",
    "a list": b"[]",
    "a mapping of nothing": b"{}",
    "deep": b"[" * 100_000,
    "rounds of another type": json.dumps(RECORD | {"rounds": 3}).encode(),
    "accuracy of another type": json.dumps(RECORD | {"metrics": {"accuracy": [1]}}).encode(),
    "metrics of another type": json.dumps(RECORD | {"metrics": 3}).encode(),
    "a model of another type": json.dumps(RECORD | {"model": 7}).encode(),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (run,) = read_runs("heterofl", ("rounds=1",), (1,))
    folder = tmp_path / "runs" / run.name
    folder.mkdir(parents=True)
    write_description(folder, run)
    return folder


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("kind", DAMAGED)
def test_every_command_that_reads_a_damaged_summary_reports_it(folder: Path, kind: str) -> None:
    (folder / SUMMARY).write_bytes(DAMAGED[kind])
    runs = ["--runs", str(folder.parent)]
    for command in (["compare", str(folder)], ["runs", "list", *runs]):
        result = invoke(*command)
        output = " ".join(result.output.split())
        if command[1] == "list" and kind in ("rounds of another type", "accuracy of another type"):
            continue  # the list shows neither of these
        assert result.exit_code == ExitCode.FILE, output
        assert "is damaged, or was written by another release" in output
        assert "Traceback" not in output


def test_an_unfinished_run_has_no_summary(folder: Path) -> None:
    assert read_summary(folder) is None
    result = invoke("compare", str(folder))
    assert (result.exit_code, "is not finished" in " ".join(result.output.split())) == (ExitCode.FILE, True)


def test_a_summary_with_invalid_turns_cannot_be_replayed(folder: Path) -> None:
    write_summary(folder, RECORD | {"programs_from": 3})
    with pytest.raises(FileError, match="is damaged"):
        read_replay(folder)


def test_a_summary_is_written_completely_or_not_at_all(folder: Path) -> None:
    write_summary(folder, RECORD)
    with pytest.raises(TypeError):
        write_summary(folder, {"accuracy": object()})
    assert read_summary(folder) == RECORD
    assert [path.name for path in folder.iterdir() if path.suffix == ".part"] == []
