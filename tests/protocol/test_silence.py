"""Every process turns telemetry of libraries off before it loads them; the settings of the user take precedence."""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from subfleet.cli import main as server_cli
from subfleet.edge_client import cli as edge_cli
from subfleet.protocol.registry import Registry
from subfleet.protocol.silence import SWITCHES, import_silently, silence

SILENT = {switch.variable: switch.value for switch in SWITCHES}
LOUD = "import os\nSEEN = dict(os.environ)\n"
"""A module that records the environment variables at its import."""


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that records the environment, where nothing is turned off yet."""
    for variable in SILENT:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loud_library.py").write_text(LOUD, encoding="utf-8")
    yield "loud_library"
    sys.modules.pop("loud_library", None)


def test_each_variable_occurs_once() -> None:
    assert len(SILENT) == len(SWITCHES) >= 5


def test_what_the_user_has_set_stays() -> None:
    environment = {"ORT_DISABLE_TELEMETRY": "0", "HOME": "/home/me"}
    silence(environment)
    assert environment == {**SILENT, "ORT_DISABLE_TELEMETRY": "0", "HOME": "/home/me"}


def test_a_library_is_imported_silently(loud: str) -> None:
    seen = import_silently(loud).SEEN
    assert {variable: seen.get(variable) for variable in SILENT} == SILENT


def test_a_library_that_is_not_there_is_a_module_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_silently("no_such_library")


def test_plugins_are_loaded_silently(loud: str) -> None:
    entry = EntryPoint(name="theirs", value=f"{loud}:SEEN", group="group")
    seen = Registry[dict[str, str]]("group", "thing", find=lambda group: [entry]).load("theirs")
    assert {variable: seen.get(variable) for variable in SILENT} == SILENT


@pytest.mark.usefixtures("loud")
def test_both_commands_are_silent_before_they_do_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for main in (lambda: edge_cli.main(["--version"]), server_cli.main):
        for variable in SILENT:
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(sys, "argv", ["subfleet", "--version"])
        with pytest.raises(SystemExit):
            main()
        assert {variable: os.environ.get(variable) for variable in SILENT} == SILENT
    assert capsys.readouterr().out.count("0.1.0") == 2
