"""Runs commands in an isolated network with an empty home; records their traffic and their files."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["Outcome", "find_obstacle", "run_sealed"]

_NOWHERE = Path(__file__).with_name("nowhere.py")
_LINGERING = Path(__file__).parent / "lingering"
"""Delays the end of each Python process of a command, so that threads that wait to report can do so."""
_TIMEOUT_S = 200.0
_PATH = os.pathsep.join([str(Path(sys.executable).parent), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: its exit code.
        output: standard output and standard error.
        traffic: what it sent to other machines, and the names that it looked up.
        files: files in its home, including temporary ones.
    """

    code: int
    output: str
    traffic: tuple[str, ...]
    files: tuple[str, ...]

    def complaints(self, documented: Sequence[str] = ()) -> tuple[str, ...]:
        """All traffic, and files that match none of the documented patterns."""
        undocumented = [path for path in self.files if not any(fnmatch(path, pattern) for pattern in documented)]
        return (*self.traffic, *(f"leaves {path}" for path in undocumented))


def run_sealed(folder: Path, command: Sequence[str], *, linger_s: float = 0.3, **variables: str) -> Outcome:
    """Run a command with an empty home, in a folder that it may share with others.

    Args:
        folder: gets the home and the report; the command runs in the folder `work` beside it.
        command: the program and its arguments.
        linger_s: delay of the end of each Python process.
        variables: environment variables besides HOME, PATH and those of the delay. No others are inherited, such as
            our own switches, or the variables by which libraries recognise continuous integration.
    """
    home, work, report = folder / "home", folder.parent / "work", folder / "heard.txt"
    (home / "tmp").mkdir(parents=True)
    work.mkdir(exist_ok=True)
    environment = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "PATH": _PATH, "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(_LINGERING), "LINGER_S": str(linger_s), **variables}
    process = subprocess.run(
        [*_unshare(), *_make_command(report), *command],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert report.exists(), f"the command did not run: {process.stdout}"
    files = sorted(str(path.relative_to(home)) for path in home.rglob("*") if not path.is_dir())
    traffic = report.read_text(encoding="utf-8").splitlines()
    return Outcome(code=process.returncode, output=process.stdout, traffic=tuple(traffic), files=tuple(files))


def find_obstacle() -> str:
    """Why this machine cannot isolate commands; empty if it can."""
    return "" if _unshare() else "this machine lets us make no network of our own (unshare --net --mount), root or not"


def _make_command(report: Path) -> tuple[str, ...]:
    return (sys.executable, "-I", str(_NOWHERE), str(report))


@cache
def _unshare() -> tuple[str, ...]:
    """The prefix of isolated commands: as root, else in a user namespace; empty if neither works."""
    for options in ((), ("--map-root-user",)):
        command = ("unshare", "--net", "--mount", *options)
        with TemporaryDirectory() as folder:
            trial = [*command, *_make_command(Path(folder, "heard.txt")), "true"]
            try:
                process = subprocess.run(trial, capture_output=True, check=False)
            except FileNotFoundError:
                return ()
        if process.returncode == 0:
            return command
    return ()
