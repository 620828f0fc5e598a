"""A failed start leaves no folder; the run's folder is named; no question is asked without a terminal."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from subfleet.cli.commands import app
from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import Progress
from subfleet.observers import open_run_folder
from subfleet.protocol.errors import ConfigError, FileError, RunError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.settings.reading import read_run
from subfleet.settings.run_folder import choose_folder, write_description

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "mqtt://127.0.0.1:1"
PROGRESS = Progress(round=1, round_count=2, answered=0, devices=1, left_s=None)


def invoke(*arguments: str, **options: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), **options)
    return result.exit_code, result.output + (result.stderr if result.stderr_bytes else "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ("run", "quickstart", "--set", "observers=['nobody']", "--host", "batch"),
            ExitCode.CONFIG,
            "no observer 'nobody'",
        ),
        (("run", "quickstart", "--set", "data.test=none.npz", "--host", "batch"), ExitCode.FILE, "none.npz"),
        (("run", "quickstart", "--set", "clock=none", "--host", "batch"), ExitCode.CONFIG, "clock"),
        (("run", "quickstart", "--broker", NOBODY), ExitCode.TRANSPORT, "127.0.0.1"),
        (("serve", "fleet", "--set", "observers=['nobody']"), ExitCode.CONFIG, "no observer 'nobody'"),
        (("serve", "fleet", "--set", "data.test=none.npz", "--broker", NOBODY), ExitCode.FILE, "none.npz"),
        (("serve", "fleet", "--broker", NOBODY, "--http-port", "0"), ExitCode.TRANSPORT, "127.0.0.1"),
    ],
)
def test_a_start_that_fails_leaves_no_folder(
    arguments: tuple[str, ...], code: ExitCode, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exit_code, output = invoke(*arguments)
    assert (exit_code, words in output) == (code, True), output
    assert list(tmp_path.iterdir()) == []


def begin(folder: Path, error: BaseException | None, *, begun: bool = False) -> None:
    with open_run_folder(folder, read_run("fedfa"), Unobserved()) as (run_folder, observer):
        (run_folder / "output").mkdir(exist_ok=True)
        if begun:
            observer.progressed(PROGRESS)  # type: ignore[attr-defined]
        if error is not None:
            raise error


def test_a_folder_is_removed_only_if_it_is_new_and_nothing_began(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "fedfa"
    for error in (FileError("x"), ConfigError("x"), ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            begin(folder, error)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunError):
        begin(folder, RunError("client a ended; see its output"))
    assert (folder / "output").is_dir()
    with pytest.raises(FileError):
        begin(folder, FileError("x"))
    assert (folder / "run.json").exists(), "it existed before"
    with pytest.raises(FileError):
        begin(tmp_path / "other", FileError("the disk is full"), begun=True)
    assert (tmp_path / "other" / "run.json").exists()


def test_only_the_new_folder_is_removed_beside_other_runs(tmp_path: Path) -> None:
    begin(tmp_path / "runs" / "first", None)
    with pytest.raises(FileError):
        begin(tmp_path / "runs" / "second", FileError("x"))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]


def test_the_folder_of_another_run_is_unchanged(tmp_path: Path) -> None:
    write_description(tmp_path, read_run("fedfa", ("seed=5",)))
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ConfigError, match="seed from 5 to 3"):
        begin(tmp_path, None)
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_free_folder_is_chosen_and_not_created(tmp_path: Path) -> None:
    assert choose_folder(tmp_path / "runs", "a", None) == tmp_path / "runs" / "a"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_serve_names_the_folder_as_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    assert invoke("serve", "fleet", "--name", "mine", "--broker", NOBODY, "--http-port", "0")[0] == ExitCode.TRANSPORT
    assert (folder / "run.json").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]
    (folder / "summary.json").write_text("{}", encoding="utf-8")
    code, output = invoke("serve", "fleet", "--name", "mine")
    assert (code, "is already finished" in output) == (ExitCode.CONFIG, True)


@pytest.mark.parametrize("stdin", [io.StringIO(""), None])
def test_a_question_with_closed_standard_input_names_the_option(
    stdin: io.StringIO | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    write_description(folder, read_run("fedfa"))
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(SystemExit) as caught:
        typer.main.get_command(app)(["runs", "remove", "a", "--runs", str(tmp_path)], standalone_mode=False)
    assert caught.value.code == ExitCode.CONFIG
    assert (
        capsys.readouterr().err.strip().endswith("subfleet: standard input is closed, so nobody can confirm; add --yes")
    )
    assert folder.exists()


@pytest.mark.slow
def test_every_question_handles_closed_standard_input() -> None:
    """Only the function that handles a closed standard input may ask a question."""
    prompts = re.compile(r"\b(?:typer|click)\.(?:confirm|prompt|getchar|pause)\(|(?<![\w.])input\(|\bgetpass\(")
    sources = [
        path for folder in ("server", "edge_client", "emulation", "tasks") for path in (ROOT / folder).rglob("*.py")
    ]
    names = [path.name for path in sources for _ in prompts.finditer(path.read_text(encoding="utf-8"))]
    assert names == ["runs.py"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "::ffff:127.0.0.1"])
def test_an_address_of_this_machine_alone_has_no_warning(host: str) -> None:
    from subfleet.reporting.api import HttpAddress

    assert HttpAddress().warning == HttpAddress(host=host).warning == ""


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("0.0.0.0", "reach this one can"),  # noqa: S104 - the warning is about it
        ("::", "reach this one can"),
        ("", "reach this one can"),
        ("192.0.2.7", "reach 192.0.2.7 can"),
        ("fe80::1%eth0", "reach fe80::1%eth0 can"),
        ("127.0.0.1.example", "reach 127.0.0.1.example can"),
    ],
)
def test_an_address_that_other_machines_can_reach_has_a_warning(host: str, words: str) -> None:
    from subfleet.reporting.api import HttpAddress

    warning = HttpAddress(host=host).warning
    assert warning.startswith("the HTTP API does not require a password: every machine that ")
    assert words in warning
    assert warning.count("\n") == 0


@pytest.mark.slow
def test_the_warning_is_logged_when_the_api_is_opened_to_other_machines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from subfleet.reporting.api import HttpAddress, serve_http

    everywhere = HttpAddress(host="0.0.0.0", port=0)  # noqa: S104 - the warning is about it
    for address, lines in ((HttpAddress(port=0), []), (everywhere, [everywhere.warning])):
        caplog.clear()
        with serve_http(tmp_path, address):
            warned = [record.getMessage() for record in caplog.records if record.name == "subfleet.reporting.api"]
        assert warned == lines
