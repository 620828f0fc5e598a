"""Commands in a network that leads nowhere, with a home of their own: what they sent, and what they left behind."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["Outcome", "cannot_seal", "sealed"]

_NOWHERE = Path(__file__).with_name("nowhere.py")
_LINGERING = Path(__file__).parent / "lingering"
"""Keeps each Python of a command alive for a moment after its end: threads that wait to report get to it."""
_TIMEOUT_S = 200.0
_PATH = os.pathsep.join([str(Path(sys.executable).parent), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: its exit code.
        output: what it printed, and its errors.
        heard: what it sent to anywhere but this machine, and the names that it looked up.
        left: files below its home, temporary ones included.
    """

    code: int
    output: str
    heard: tuple[str, ...]
    left: tuple[str, ...]

    def complaints(self, documented: Sequence[str] = ()) -> tuple[str, ...]:
        """What it should not have done: whatever was heard, and files that match none of the patterns."""
        odd = [path for path in self.left if not any(fnmatch(path, pattern) for pattern in documented)]
        return (*self.heard, *(f"leaves {path}" for path in odd))


def sealed(folder: Path, command: Sequence[str], *, linger_s: float = 0.3, **variables: str) -> Outcome:
    """Run a command with an empty home, in a folder that it may share with others.

    Args:
        folder: gets the home and the report; `work` beside them is where the command runs.
        command: the program and its arguments.
        linger_s: how long each Python process stays after it has ended.
        variables: set beside HOME, PATH and what it takes to linger; nothing else is inherited, neither our own
            switches nor the variables of continuous integration, by which libraries know that nobody is there.
    """
    home, work, report = folder / "home", folder.parent / "work", folder / "heard.txt"
    (home / "tmp").mkdir(parents=True)
    work.mkdir(exist_ok=True)
    given = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "PATH": _PATH, "OMP_NUM_THREADS": "1"}
    given |= {"PYTHONPATH": str(_LINGERING), "LINGER_S": str(linger_s), **variables}
    done = subprocess.run(
        [*_unshare(), *_nowhere(report), *command],
        cwd=work,
        env=given,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert report.exists(), f"the command did not run: {done.stdout}"
    left = sorted(str(path.relative_to(home)) for path in home.rglob("*") if not path.is_dir())
    heard = report.read_text(encoding="utf-8").splitlines()
    return Outcome(code=done.returncode, output=done.stdout, heard=tuple(heard), left=tuple(left))


def cannot_seal() -> str:
    """Why this machine cannot run a command so; empty where it can."""
    return "" if _unshare() else "this machine lets us make no network of our own (unshare --net --mount), root or not"


def _nowhere(report: Path) -> tuple[str, ...]:
    return (sys.executable, "-I", str(_NOWHERE), str(report))


@cache
def _unshare() -> tuple[str, ...]:
    """The command in front of the others: as root, else as the root of a user namespace; empty where neither works."""
    for more in ((), ("--map-root-user",)):
        command = ("unshare", "--net", "--mount", *more)
        with TemporaryDirectory() as folder:
            trial = [*command, *_nowhere(Path(folder, "heard.txt")), "true"]
            try:
                done = subprocess.run(trial, capture_output=True, check=False)
            except FileNotFoundError:
                return ()
        if done.returncode == 0:
            return command
    return ()
