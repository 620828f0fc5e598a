"""Both commands in restricted environments: without a home folder, with an ASCII console, on Windows."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from subfleet.edge_client import options
from subfleet.protocol.exit_codes import ExitCode

pytestmark = pytest.mark.slow

COMMANDS = ("subfleet.cli.main", "subfleet.edge_client.cli")
UNKNOWN = 12345
"""A user id without a name on this system."""
# With the capability to read files of this user, such as a Python in a home folder, which a container has elsewhere.
AS_USER = ("setpriv", f"--reuid={UNKNOWN}", f"--regid={UNKNOWN}", "--clear-groups", "--inh-caps=+dac_read_search",
           "--ambient-caps=+dac_read_search")  # fmt: skip
NAMES = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "SUBFLEET_CACHE", "LOGNAME", "USER", "LNAME", "USERNAME")

needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root, with util-linux, can become an unknown user"
)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which every user may write, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def run(
    command: tuple[str, ...], folder: Path, *, environment: Mapping[str, str], prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, *command],
        capture_output=True, encoding="utf-8", cwd=folder, timeout=120, check=False, env=environment,
    )  # fmt: skip


@needs_root
@pytest.mark.parametrize("home", [None, "/", "/nonexistent"])
def test_a_user_without_a_home_or_a_name_has_a_folder(home: str | None, open_folder: Path) -> None:
    """As in a container that is started with a numeric user id."""
    environment = {name: text for name, text in os.environ.items() if name not in NAMES} | {"TMPDIR": str(open_folder)}
    if home is not None:
        environment["HOME"] = home
    libraries = (
        "from subfleet.protocol.starting import settle; settle('test')\n"
        "import getpass, os, matplotlib\n"
        "print(getpass.getuser(), os.path.expanduser('~'), matplotlib.get_cachedir())\n"
    )
    created = open_folder / f"subfleet-{UNKNOWN}"
    for arguments, code, words in (
        (("-m", COMMANDS[0], "data", "list"), ExitCode.OK, "digits"),
        (("-m", COMMANDS[1], "join", "mqtt://127.0.0.1:1", "--data", "digits:train"), ExitCode.TRANSPORT, str(created)),
        (("-c", libraries), ExitCode.OK, f"uid{UNKNOWN} {created} {created}"),
    ):
        result = run((sys.executable, *arguments), open_folder, environment=environment, prefix=AS_USER)
        assert result.returncode == code, result.stderr
        assert words in result.stdout + result.stderr
        assert "defect" not in result.stderr
    assert created.stat().st_uid == UNKNOWN


ASCII = ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
# All in one process, so that modules are imported once.
EVERY_HELP = """
import sys
import typer.main
from subfleet.cli.main import main
from subfleet.cli.commands import app
def commands(group, path=()):
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))
asked = [[*path, "--help"] for path in commands(typer.main.get_group(app))]
asked += [["data", "list"], ["methods"], ["examples"], ["example", "fleet"]]
for arguments in asked:
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
print("\\u2500 \\udce9 after", len(asked))
"""


@pytest.mark.parametrize("console", ASCII, ids=["encoding", "locale"])
def test_a_console_that_cannot_show_everything_is_given_replacements(console: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, **console}
    result = run((sys.executable, "-c", EVERY_HELP), tmp_path, environment=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("? ? after ")
    for name in ("", *options.COMMANDS):
        help_result = run(
            (sys.executable, "-m", COMMANDS[1], *name.split(), "--help"), tmp_path, environment=environment
        )
        assert (help_result.returncode, help_result.stderr) == (0, "")


@pytest.mark.parametrize("console", ASCII, ids=["encoding", "locale"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_argument_that_cannot_be_encoded_does_not_break_the_error_message(
    console: dict[str, str], command: str, tmp_path: Path
) -> None:
    commands = {COMMANDS[0]: ("run", "naïve─.toml"), COMMANDS[1]: ("predict", "naïve─.onnx", "--data", "digits:test")}
    result = run((sys.executable, "-m", command, *commands[command]), tmp_path, environment={**os.environ, **console})
    assert result.returncode == ExitCode.FILE, result.stderr
    assert "Traceback" not in result.stderr
    assert "defect" not in result.stderr


WINDOWS = """
import sys
command = sys.argv.pop(1)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # which Windows does not have
sys.platform = "win32"
if command == "subfleet":
    from subfleet.cli.main import main
else:
    from subfleet.edge_client.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("arguments", [(), ("--help",), ("doctor",)])
@pytest.mark.parametrize("command", ["subfleet", "subfleet-edge"])
def test_windows_is_one_sentence_for_every_command(command: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = run((sys.executable, "-c", WINDOWS, command, *arguments), tmp_path, environment=os.environ)
    assert (result.returncode, result.stdout) == (ExitCode.SYSTEM, "")
    assert result.stderr == f"{command}: Subfleet does not support Windows; use WSL 2\n"
