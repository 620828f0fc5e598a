"""The folder of what was exported: found by content id, whole or not at all, and of limited size."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.export.jobs import figure_path
from subfleet.export.requests import MODEL_SUFFIXES, AnyRequest, EstimateRequest, InferRequest
from subfleet.protocol.bounds import checked
from subfleet.protocol.disks import lock
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.limits import Positive
from subfleet.protocol.programs import program_id_of

__all__ = ["DEFAULT_LIMIT_BYTES", "CacheFolder", "ExportCache", "is_whole", "lock_result"]

DEFAULT_LIMIT_BYTES = 4 * 2**30
LEFTOVER_S = 3600.0
"""A half-written file of this age is nobody's: no export takes as long."""
RECENT_S = 60.0
"""Whoever asked for a file has read it after this time; until then it stays, whatever the limit."""
_SUFFIXES = frozenset({".program", ".cost estimates", *MODEL_SUFFIXES.values()})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class CacheFolder:
    """Where exported programs are kept between runs.

    Attributes:
        path: the folder, made where it does not exist.
        limit_bytes: the most that programs and models may take together, 1 or more.
    """

    path: Path
    limit_bytes: Positive = DEFAULT_LIMIT_BYTES


class ExportCache:
    """Exported programs and models on disk. The time of a file's last use is its access time, which is set here."""

    def __init__(self, folder: CacheFolder) -> None:
        """Open the folder, remove what killed processes left half-written, and shrink it to its limit.

        Raises:
            FileError: the folder cannot be made.
        """
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"the folder {folder.path} cannot be made: {error.strerror}; choose another") from error
        self._folder = folder.path
        self._limit_bytes = folder.limit_bytes
        self._checked: dict[str, tuple[int, int]] = {}
        self._remove_leftovers()
        self.trim()

    def path(self, request: AnyRequest) -> Path:
        """Where the result of a request lies, or will lie."""
        return self._folder / request.file_name

    def find(self, request: AnyRequest) -> Path | None:
        """The whole result of a request, marked as used now; None where there is none, or a damaged one."""
        path = self.path(request)
        try:
            status = path.stat()
            state = (status.st_size, status.st_mtime_ns)
            if self._checked.get(path.name) != state:
                if not is_whole(path, request):
                    return None
                self._checked[path.name] = state
            os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
        except OSError:
            return None
        return path

    def trim(self) -> None:
        """Remove the results that were not used for the longest, until the rest is within the limit."""
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                if path.suffix in _SUFFIXES:
                    status = path.stat()
                    files.append((status.st_atime, status.st_size, path))
        surplus = sum(size for _, size, _ in files) - self._limit_bytes
        now_s = time.time()
        for used_s, size, path in sorted(files):
            if surplus <= 0 or now_s - used_s < RECENT_S:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                figure_path(path).unlink(missing_ok=True)
                logger.info("%s leaves the export cache, which holds %d bytes at most", path.name, self._limit_bytes)
            surplus -= size

    def _remove_leftovers(self) -> None:
        """Half-written files of workers that were killed; those of the last hour may be another pool's."""
        for partial in self._folder.glob(".*.part"):
            with contextlib.suppress(OSError):
                if time.time() - partial.stat().st_mtime > LEFTOVER_S:
                    partial.unlink()


def is_whole(path: Path, request: AnyRequest) -> bool:
    """Whether a file is there and is the whole result of a request."""
    try:
        _check(path, request)
    except (OSError, ProtocolError):
        return False
    return True


def _check(path: Path, request: AnyRequest) -> None:
    """Raises OSError or ProtocolError where a file is not the whole result of a request."""
    if isinstance(request, InferRequest):
        figure_path(path).stat()
        if path.stat().st_size == 0:
            raise ProtocolError(f"the model {path} is empty")
        return
    if isinstance(request, EstimateRequest):
        MemoryEstimates.unpack(path.read_bytes())
        return
    written_id = program_id_of(path.read_bytes())
    if written_id != request.program_id:
        raise ProtocolError(f"the program {path} is {written_id}, but must be {request.program_id}")


@contextmanager
def lock_result(path: Path) -> Iterator[None]:
    """Hold the right to write a result: other processes that share the folder wait for it meanwhile.

    One of 256 empty lock files stands for all results whose name begins alike, so that none must ever be removed. The
    system gives the right back when its holder ends, however it ends.
    """
    with path.with_name(f".{path.name[:2]}.lock").open("ab") as file:
        lock(file, wait=True)  # without locks each writes for itself: the last one's file stays, and it is the same
        yield
