"""`subfleet methods` lists the methods and checks them."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from subfleet.cli.commands import app
from subfleet.emulation import method_checks
from subfleet.methods import METHODS
from subfleet.methods.describing import Setting, join_departures, list_departures
from subfleet.protocol.exit_codes import ExitCode


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, dict[str, str]]:
    """The verdicts of the checks of methods, by method and norms."""
    verdicts = {name: {"averaged": "ok", "bank": "ok"} for name in METHODS}

    def check_methods(exports: object) -> Iterator[tuple[str, str, str]]:
        for name, row in verdicts.items():
            for norms, verdict in row.items():
                yield name, norms, verdict

    monkeypatch.setattr(method_checks, "check_methods", check_methods)
    monkeypatch.setenv("SUBFLEET_CACHE", str(tmp_path))
    return verdicts


def test_every_method_is_listed_with_its_paper() -> None:
    result = CliRunner().invoke(app, ["methods"], env={"COLUMNS": "3000"})  # wide enough that no cell is wrapped
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.replace("│", " ").split())
    for name, kind in METHODS.items():
        assert name in words
        assert kind.INFO.paper in words
    assert "check" not in result.output


def test_the_list_as_json_has_the_same_fields_for_all() -> None:
    result = CliRunner().invoke(app, ["methods", "--json"])
    assert result.exit_code == 0, result.output
    listed = json.loads(result.stdout)
    assert list(listed) == list(METHODS)
    for name, row in listed.items():
        info = METHODS[name].INFO
        parameters = row.pop("parameters")
        assert {path.partition(".")[0] for path in parameters} == {field.name for field in fields(METHODS[name])}
        assert row == {
            "title": info.title,
            "paper": info.paper,
            "varies": list(info.varies),
            "runtimes": list(info.runtimes),
            "status": join_departures(list_departures(METHODS[name](), Setting())),
        }
    assert listed["fedavg"]["status"] == "exact"
    assert "no learnable steps" in listed["nefl"]["status"]


def test_a_methods_parameters_are_shown_beside_the_values_of_its_paper() -> None:
    result = CliRunner().invoke(app, ["methods", "fedtrans"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in result.output.splitlines() if "│" in line]
    assert ["alpha", "0.9", "0.9"] in rows
    assert ["shares", "drawn", "equal"] in rows
    assert ["delta", "5", "open"] in rows
    assert "copies have drawn fractions" in result.output
    as_json = CliRunner().invoke(app, ["methods", "pyramidfl", "--json"])
    assert json.loads(as_json.stdout)["parameters"]["oort.cutoff"] == {"default": 0.95, "paper": 0.95}
    assert CliRunner().invoke(app, ["methods", "fedavg", "--check"]).exit_code == ExitCode.CONFIG
    unknown = CliRunner().invoke(app, ["methods", "fedtran"])
    assert unknown.exit_code == ExitCode.CONFIG
    assert "fedtran" in unknown.stderr


def test_a_check_as_json_is_one_object(checks: dict[str, dict[str, str]]) -> None:
    result = CliRunner().invoke(app, ["methods", "--check", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == checks


def test_a_check_is_a_column_of_the_table(checks: dict[str, dict[str, str]]) -> None:
    result = CliRunner().invoke(app, ["methods", "--check"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "check" in result.output
    assert result.output.count("averaged: ok") == result.output.count("bank: ok") == len(checks)


@pytest.mark.parametrize("options", [["--check"], ["--check", "--json"]])
def test_methods_that_fail_give_an_exit_code_and_one_sentence(
    options: list[str], checks: dict[str, dict[str, str]]
) -> None:
    checks["fjord"]["bank"], checks["nefl"]["averaged"] = "the loss does not fall", "it moved"
    result = CliRunner().invoke(app, ["methods", *options])
    assert result.exit_code == ExitCode.RUN
    last = result.stderr.strip().splitlines()[-1]
    first = "first fjord with norms 'bank': the loss does not fall"
    assert last == f"subfleet: 2 of {2 * len(METHODS)} checks of methods fail, {first}"
    assert "Traceback" not in result.output
    if "--json" in options:
        assert json.loads(result.stdout) == checks


def test_a_verdict_is_no_markup(checks: dict[str, dict[str, str]]) -> None:
    checks["fjord"]["bank"] = "[/]"
    result = CliRunner().invoke(app, ["methods", "--check"], env={"COLUMNS": "200"})
    assert result.exit_code == ExitCode.RUN
    assert "[/]" in result.stdout
