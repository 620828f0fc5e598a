"""Every error is reported with one sentence and an exit code."""

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from subfleet.cli.commands import app
from subfleet.cli.errors import describe_error
from subfleet.protocol.errors import ConfigError, MemoryLimitError
from subfleet.protocol.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Runs a command in this process, with its modules already imported, and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, list(arguments), prog_name="subfleet")


def test_errors_carry_their_exit_codes() -> None:
    assert describe_error(ConfigError("wrong")) == (ExitCode.CONFIG, "wrong")
    assert describe_error(MemoryLimitError(needed_bytes=2, limit_bytes=1))[0] == ExitCode.TRAINING
    code, sentence = describe_error(ModuleNotFoundError("No module named 'flwr_datasets'", name="flwr_datasets"))
    assert code == ExitCode.MISSING_EXTRA
    assert "pip install 'subfleet[emulation]'" in sentence
    assert describe_error(ZeroDivisionError("x"))[0] == ExitCode.INTERNAL


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text(encoding="utf-8")
    documented = {int(code): name for code, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", page, re.MULTILINE)}
    assert documented == {int(code): code.name for code in ExitCode}


@pytest.mark.slow
def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    """No GPU is visible, whichever build of PyTorch is installed."""
    command = [sys.executable, "-m", "subfleet.cli.main", "run", "quickstart", "--set", "device=cuda"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False, env=hidden)
    assert result.returncode == ExitCode.CONFIG
    assert "device is 'cuda', but PyTorch" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("run", "nothing"), ExitCode.FILE, "quickstart"),
        (("run", "quickstart", "--set", "rounds=0"), ExitCode.CONFIG, "rounds is 0"),
        (("run", "quickstart", "--set", "rounds"), ExitCode.CONFIG, "--set is 'rounds'"),
        (("run", "quickstart", "--seeds", "3..1"), ExitCode.CONFIG, "--seeds is '3..1'"),
        (("run", "fleet"), ExitCode.CONFIG, "has no devices to emulate"),
        (("run", "quickstart", "--no-such-option"), ExitCode.USAGE, "--no-such-option"),
        (("serve", "missing.toml"), ExitCode.FILE, "missing.toml"),
        (("preflight", "missing.toml"), ExitCode.FILE, "missing.toml"),
        (("data", "show", "mnits"), ExitCode.CONFIG, "fashion_mnist"),
        (("run", "quickstart", "--broker", "mqtt://127.0.0.1:1"), ExitCode.TRANSPORT, "127.0.0.1:1"),
    ],
)
def test_a_wrong_command_gives_one_sentence(
    arguments: tuple[str, ...], code: ExitCode, words: str, run_cli: Callable[..., Result], tmp_path: Path
) -> None:
    result = run_cli(*arguments)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir()), "nothing is created before the error"


@pytest.mark.slow
def test_a_state_folder_of_an_older_release_is_one_sentence(run_cli: Callable[..., Result], tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.savez(tmp_path / "test.npz", x=numpy.zeros((4, 3), numpy.float32), y=numpy.array([0, 1, 0, 1]))
    (tmp_path / "fleet.toml").write_text(
        'name = "old"\nrounds = 1\ndata.test = "test.npz"\n'
        '[model]\nfamily = "mlp"\ninput_shape = [3]\nclass_count = 2\nwidths = [4]\ndepths = [1]\n',
        encoding="utf-8",
    )
    state = tmp_path / "runs" / "old" / "server"
    state.mkdir(parents=True)
    with sqlite3.connect(state / "subfleet.sqlite") as connection:
        connection.execute("CREATE TABLE runs (run_id VARCHAR PRIMARY KEY, name VARCHAR NOT NULL UNIQUE)")
    result = run_cli("serve", "fleet.toml", "--broker", "mqtt://127.0.0.1:1")
    assert result.exit_code == ExitCode.FILE, result.output
    assert "was written by another release" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_the_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "subfleet.cli.main", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"subfleet {version('subfleet')}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["subfleet.protocol.errors", "subfleet.cli.commands", "torch"])
def test_ctrl_c_while_packages_are_loaded_is_one_sentence(name: str, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == interrupted:\n"
        "            sys.meta_path.remove(Interrupting)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            signal.pause()\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "interrupted = sys.argv.pop()\n"
        "from subfleet.cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "run", "quickstart", name],
        capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (ExitCode.INTERRUPTED, "")
    assert result.stderr == "subfleet: interrupted; run the same command again to continue\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["run", "serve", "inspect", "preflight", "example", "examples", "data list", "data show"]
)
def test_help_shows_an_example(command: str, run_cli: Callable[..., Result]) -> None:
    result = run_cli(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: subfleet {command}" in result.stdout


@pytest.mark.slow
def test_without_the_server_packages_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; from subfleet.cli.main import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == ExitCode.MISSING_EXTRA
    assert "pip install 'subfleet[server]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [("run", "quickstart"), ("serve", "none.toml")])
@pytest.mark.parametrize("address", ["nonsense", "mqtt://here:0"])
def test_a_wrong_address_is_refused_before_anything_is_loaded_or_cut(
    command: tuple[str, ...], address: str, tmp_path: Path
) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('loaded', sorted({'torch', 'numpy', 'rich.table'} & set(sys.modules))))\n"
        "from subfleet.cli.main import main\n"
        "main()\n"
    )
    call = [sys.executable, "-c", code, *command, "--broker", address]
    result = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (ExitCode.CONFIG, "loaded []\n")
    assert result.stderr.count("\n") == 1
    assert "the broker's address" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_not_written_over(tmp_path: Path) -> None:
    from subfleet.settings.reading import read_run
    from subfleet.settings.run_folder import check_not_over, choose_folder, create_folder, write_description

    first = choose_folder(tmp_path, "quickstart", None)
    assert first.name == "quickstart"
    write_description(create_folder(first), read_run("quickstart"))
    assert choose_folder(tmp_path, "quickstart", "quickstart") == first, "an unfinished run is resumed by its name"
    (first / "summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="already finished"):
        check_not_over(first, read_run("quickstart"))
    assert choose_folder(tmp_path, "quickstart", None).name == "quickstart-2"


@pytest.mark.slow
def test_text_of_a_device_does_not_control_the_operators_terminal(tmp_path: Path) -> None:
    code = (
        "import logging; from subfleet.cli.errors import report_errors; from subfleet.protocol.errors import RunError\n"
        "with report_errors(verbose=False):\n"
        "    logging.getLogger('x').warning('device %s', 'a\\x1b]8;;http://evil\\x07\\nb')\n"
        "    raise RunError('device a\\x1b]8;;http://evil\\x07 failed')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    logged, sentence = result.stderr.splitlines()
    assert logged.endswith(r"x WARNING device a\x1b]8;;http://evil\x07\nb")
    assert sentence == "subfleet: device a ]8;;http://evil  failed"


@pytest.mark.parametrize(
    ("verbose", "lines"), [(True, ["subfleet.x DEBUG ours", "y WARNING theirs"]), (False, ["y WARNING theirs"])]
)
def test_verbose_shows_debug_messages_of_subfleet_and_not_of_libraries(
    verbose: bool, lines: list[str], tmp_path: Path
) -> None:
    code = (
        "import logging; from subfleet.cli.errors import report_errors\n"
        f"with report_errors(verbose={verbose}):\n"
        "    logging.getLogger('subfleet.x').debug('ours')\n"
        "    logging.getLogger('y').debug('theirs in detail')\n"
        "    logging.getLogger('y').warning('theirs')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert [line.split(maxsplit=2)[2] for line in result.stderr.splitlines()] == lines
