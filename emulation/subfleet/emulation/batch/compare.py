"""Many independent virtual runs side by side, each in a worker process, each with a result file of its own.

An experiment whose result is there, with the same fingerprint, is not run again: what was interrupted goes on where it
was. The fingerprint tells of settings and samples, not of the program's own version: begin with an empty folder after a
change of the code.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from subfleet.emulation.batch.exports import AwaitedExports
from subfleet.emulation.batch.figures import figures
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathered import GatheredRun, fingerprint
from subfleet.export.cache import CacheFolder
from subfleet.protocol.errors import FileError, RunError, SubfleetError
from subfleet.protocol.messages import check_client_id

__all__ = ["Build", "compare"]

Build = Callable[[], GatheredRun]
"""Makes an experiment, in the process that runs it: a function of a module, or `functools.partial` of one."""


def compare(
    builds: Mapping[str, Build],
    folder: Path,
    cache: CacheFolder,
    *,
    processes: int = 2,
    say: Callable[[str], None] = lambda _: None,
) -> Mapping[str, Mapping[str, Any]]:
    """Run every experiment that has no result yet.

    Args:
        builds: the experiments by name, of letters, digits, "_", "." and "-".
        folder: of the results, `<name>.json` each; made if missing.
        cache: of exported programs, which all of them share.
        processes: how many run at once; 1 runs them here, one after the other.
        say: is told what happens, a sentence at a time.

    Returns:
        The results by name: `figures` of each run, and its `fingerprint`.

    Raises:
        RunError: some of them failed; the others have their results all the same.
        FileError: the folder cannot be written.
        ProtocolError: a name cannot name a file.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}, but must be 1 or more")
    jobs = [_Job(name=check_client_id(name), build=build, folder=folder, cache=cache) for name, build in builds.items()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"the folder {folder} cannot be made: {error.strerror}; choose another") from error
    failures = _run_all(jobs, processes, say)
    if failures:
        first = min(failures)
        raise RunError(f"{len(failures)} of {len(jobs)} experiments failed, first {first}: {failures[first]}")
    return MappingProxyType({job.name: json.loads(job.path.read_text(encoding="utf-8")) for job in jobs})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    name: str
    build: Build
    folder: Path
    cache: CacheFolder

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.json"


def _run_all(jobs: list[_Job], processes: int, say: Callable[[str], None]) -> Mapping[str, str]:
    """Run the jobs; returns why some failed, by name."""
    failures: dict[str, str] = {}

    def note(job: _Job, failure: str, number: int) -> None:
        if failure:
            failures[job.name] = failure
        say(f"{number} of {len(jobs)}: {job.name} {f'failed: {failure}' if failure else 'is done'}")

    if processes == 1:
        for number, job in enumerate(jobs, start=1):
            note(job, _run(job), number)
        return failures
    # Spawned, not forked: PyTorch and ONNX Runtime have threads. One thread each, as bits are promised for one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=processes, mp_context=context, initializer=_one_thread) as pool:
        futures = {pool.submit(_run, job): job for job in jobs}
        for number, future in enumerate(as_completed(futures), start=1):
            note(futures[future], _outcome(future), number)
    return failures


def _outcome(future: "Future[str]") -> str:
    try:
        return future.result()
    except BrokenProcessPool:
        return "its process was ended from outside; free some memory, or run fewer at once"


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _run(job: _Job) -> str:
    """Run one experiment unless its result is there; returns why it failed, or nothing."""
    try:
        experiment = job.build()
        mark = fingerprint(experiment)
        if _known_mark(job.path) == mark:
            return ""
        with AwaitedExports(job.cache) as exports:
            found = figures(experiment, run_batch(experiment, exports))
        _write(job.path, {"name": job.name, "fingerprint": mark, **found})
    # An error crosses processes as text: not every exception can.
    except SubfleetError as error:
        return str(error)
    except OSError as error:
        return f"the result {job.path} cannot be written: {error.strerror}"
    return ""


def _known_mark(path: Path) -> str | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("fingerprint") if isinstance(found, dict) else None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """The whole result or none."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    os.replace(partial, path)  # noqa: PTH105 - the same call, and atomic on every system
