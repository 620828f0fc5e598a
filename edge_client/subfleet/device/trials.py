"""Tries packages and runtimes in child processes: one that aborts ends only its child.

A build for a newer processor ends its process at the first instruction that this one lacks, without an exception that
could be caught; so does a library that calls `abort`, or one for which there is no memory.
"""

import json
import logging
import platform
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from subfleet.protocol.children import make_child_command
from subfleet.protocol.errors import BrokenError
from subfleet.protocol.exit_codes import ExitCode

_LOG = logging.getLogger(__name__)

DEADLINE_S = 300.0
"""A board with an SD card reads PyTorch for a minute; what takes longer than this hangs."""
_TRIAL = "subfleet.device.trial_process"
_INSTALLED_FILE = re.compile(r'^  File ".*?/(?:site|dist)-packages/((?!subfleet/)[^/"]+)', re.MULTILINE)
"""A line of what Python writes down when a signal ends it, the innermost call first; our own files only call others."""
_NOISE = re.compile(r'^(Fatal Python error|Current thread|Thread 0x|Extension modules|  File "|  \.\.\.|\s*$)')

_ANOTHER = (
    "install another build of {package}, newer, older or made for this kind of board, or choose another runtime with "
    "--runtime"
)
_DEATHS: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        signal.SIGILL: (
            "this processor ({machine}) lacks an instruction that {package} was built with (SIGILL)",
            "that build is for a newer processor; " + _ANOTHER,
        ),
        signal.SIGSEGV: ("{package} accessed invalid memory (SIGSEGV)", _ANOTHER),
        signal.SIGBUS: (
            "{package} accessed a truncated file or faulty memory (SIGBUS)",
            "check the disk, and install {package} again",
        ),
        signal.SIGFPE: ("{package} caused an arithmetic error (SIGFPE)", _ANOTHER),
        signal.SIGABRT: ("{package} aborted (SIGABRT{said})", _ANOTHER),
        signal.SIGKILL: (
            "it was killed (SIGKILL), probably because memory ran out",
            "free some memory, add swap, or raise the limit of the container",
        ),
        signal.SIGSYS: (
            "{package} made a system call that is forbidden here (SIGSYS)",
            "loosen the sandbox, or choose another runtime with --runtime",
        ),
    }
)
_OTHER_DEATH = ("it was terminated by signal {number}", _ANOTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a trial of a package or a runtime.

    Attributes:
        code: OK where it works, else what a command would end with because of it.
        text: what it says of itself, or what is wrong.
        remedy: what to do; empty where it works.
        installed: whether it is there at all, and has what was asked for.
    """

    code: ExitCode = ExitCode.OK
    text: str
    remedy: str = ""
    installed: bool = True

    @property
    def works(self) -> bool:
        """Whether it works."""
        return self.code is ExitCode.OK

    @property
    def broken(self) -> bool:
        """Whether it is installed and does not work."""
        return self.installed and not self.works

    @property
    def sentence(self) -> str:
        """The problem and its remedy."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


def try_packages(packages: Mapping[str, str], *, deadline_s: float = DEADLINE_S) -> dict[str, TrialResult]:
    """Import packages; the `text` of a result is the version. Another process tries the rest if one ends it.

    Args:
        packages: the modules that are imported, by the names that they are installed by.
        deadline_s: how long each process may take.
    """
    results: dict[str, TrialResult] = {}
    while rest := [name for name in packages if name not in results]:
        pairs = [text for name in rest for text in (packages[name], name)]
        results.update(zip(rest, _try(["packages", *pairs], rest, deadline_s), strict=False))
    return results


def try_runtime(name: str, provider: str, *, deadline_s: float = DEADLINE_S) -> TrialResult:
    """Load a runtime and train with it; `text` is then its description.

    Args:
        name: of its trainer's entry point.
        provider: what is to compute.
        deadline_s: how long that may take.
    """
    return _try(["runtime", name, provider], ["the runtime"], deadline_s)[0]


def _try(trial: Sequence[str], subjects: Sequence[str], deadline_s: float) -> list[TrialResult]:
    """Return the result of each subject up to the one that ended the process, at least one."""
    try:
        done = _run(trial, deadline_s)
    except subprocess.TimeoutExpired as error:
        stage, results = _read_reports(error.stdout or b"")
        remedy = "install it again, or choose another runtime with --runtime"
        return [*results, _make_broken(f"it did not finish within {deadline_s:g} s while it was being {stage}", remedy)]
    except OSError as error:
        remedy = "let this user start Python, or free memory"
        broken = _make_broken(f"no process can be started to try it ({error.strerror})", remedy)
        return [broken for _ in subjects]
    stderr_text = done.stderr.decode(errors="replace")
    _LOG.debug("trying %s ended with %d: %s", " ".join(trial), done.returncode, stderr_text)
    stage, results = _read_reports(done.stdout)
    if len(results) < len(subjects):
        results.append(explain_death(done.returncode, stderr_text, stage, subjects[len(results)]))
    return results


def _run(trial: Sequence[str], deadline_s: float) -> subprocess.CompletedProcess[bytes]:
    with tempfile.TemporaryDirectory(prefix="subfleet-trial-") as work:  # a child that dies leaves its files
        command = make_child_command(_TRIAL, work, *trial)
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False)


def _read_reports(output: bytes) -> tuple[str, list[TrialResult]]:
    """Read the last stage of the child, and its reports."""
    stage = "started"
    results: list[TrialResult] = []
    for line in output.splitlines():
        report = json.loads(line)
        if "stage" in report:
            stage = report["stage"]
        else:
            results.append(_make_result(report))
    return stage, results


def _make_result(report: Mapping[str, Any]) -> TrialResult:
    if "problem" not in report:
        return TrialResult(text=report["text"])
    text, _, remedy = report["problem"].partition("; ")
    code = ExitCode(int(report.get("code", BrokenError.exit_code)))
    return TrialResult(code=code, text=text, remedy=remedy, installed=report.get("installed", True))


def explain_death(returncode: int, stderr_text: str, stage: str, package: str) -> TrialResult:
    """Explain why a child process ended without a report.

    Args:
        returncode: of the process; below 0 it is a signal's.
        stderr_text: what it wrote to standard error.
        stage: that it had reached.
        package: that was tried.
    """
    lines = [line for line in stderr_text.splitlines() if not _NOISE.match(line)]
    last = f"{lines[-1]:.200}" if lines else ""
    if returncode >= 0:
        return _make_broken(
            f"its process ended with exit code {returncode} while it was being {stage}{f' ({last})' if last else ''}",
            _ANOTHER.format(package=package),
        )
    what, remedy = _DEATHS.get(-returncode, _OTHER_DEATH)
    struck = _INSTALLED_FILE.search(stderr_text)
    words = {
        "package": struck[1] if struck else package,
        "machine": platform.machine(),
        "number": -returncode,
        "said": f": {last}" if last else "",
    }
    return _make_broken(f"{what.format(**words)} while it was being {stage}", remedy.format(**words))


def _make_broken(text: str, remedy: str) -> TrialResult:
    return TrialResult(code=BrokenError.exit_code, text=text, remedy=remedy)
