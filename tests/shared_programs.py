"""Exported programs that all tests share, written once for each state of the exporter.

They are stored in `build/test-programs/`, in a folder named by a digest of the sources that determine a program: later
runs reuse them until one of these sources changes. Tests of the exporter itself export their own.
"""

import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import pytest

from subfleet.export.cache import CacheFolder, ExportCache, is_whole
from subfleet.export.jobs import ExportJob
from subfleet.export.pool import ExportPool
from subfleet.export.requests import ProgramRequest
from subfleet.export.worker import run_job
from subfleet.protocol.programs import Program, decode_program

__all__ = ["folder_of_programs", "program_bytes", "program_of", "share_exporter"]

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "build" / "test-programs"
_SOURCES = ("protocol/subfleet", "tasks/subfleet", "elastic/subfleet", "export/subfleet")
_MAX_FOLDERS = 3


@cache
def folder_of_programs() -> CacheFolder:
    """The folder of the programs of these sources; the oldest folders are removed."""
    digest = hashlib.sha256(sys.version.encode())
    for source in _SOURCES:
        for path in sorted((_ROOT / source).rglob("*.py")):
            digest.update(str(path.relative_to(_ROOT)).encode())
            digest.update(path.read_bytes())
    folder = _FOLDER / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    folder.touch()
    folders = sorted(_FOLDER.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in folders[_MAX_FOLDERS:]:
        shutil.rmtree(old, ignore_errors=True)
    return CacheFolder(path=folder)


@cache
def program_bytes(request: ProgramRequest) -> bytes:
    """A request's packed program, exported in this process if no test has exported it before."""
    path = ExportCache(folder_of_programs()).path(request)
    if not is_whole(path, request):
        run_job(ExportJob(request=request, result_path=str(path)))
    return path.read_bytes()


@cache
def program_of(request: ProgramRequest) -> Program:
    """A request's program; see `program_bytes`."""
    return decode_program(program_bytes(request))


@contextmanager
def share_exporter(exports: ExportPool, module: str = "subfleet.export.pool") -> Iterator[None]:
    """Let a command or host in this process use the exporter of all tests, where it would start its own for seconds.

    Args:
        exports: the exporter of all tests; the command must have its cache.
        module: in which the command finds `ExportPool`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.ExportPool", lambda *_, **__: nullcontext(exports))
        yield
