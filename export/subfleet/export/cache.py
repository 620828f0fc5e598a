"""The cache folder of exported files: found by content id, complete or absent, and limited in size."""

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
from subfleet.protocol.errors import ConfigError, ProtocolError, explain_os_errors
from subfleet.protocol.homes import find_cache_folder
from subfleet.protocol.limits import Positive
from subfleet.protocol.programs import program_id_of

_DEFAULT_LIMIT_BYTES = 4 * 2**30
LEFTOVER_S = 3600.0
"""A half-written file of this age was abandoned: no export takes that long."""
RECENT_S = 60.0
"""A file that was used within this time is never removed, so that whoever requested it can still read it."""
_SUFFIXES = frozenset({".program", ".cost estimates", *MODEL_SUFFIXES.values()})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class CacheFolder:
    """A folder that keeps exported programs between runs.

    Attributes:
        path: the folder; it is created if it does not exist.
        limit_bytes: the largest total size of programs and models, 1 or more.
    """

    path: Path
    limit_bytes: Positive = _DEFAULT_LIMIT_BYTES


def open_default_cache() -> CacheFolder:
    """$SUBFLEET_CACHE, or the user's cache folder; $SUBFLEET_CACHE_BYTES limits its size.

    Raises:
        ConfigError: the limit is not a whole number of 1 or more.
        FileError: there is no home folder, and no other folder can be used.
    """
    chosen = os.environ.get("SUBFLEET_CACHE")
    limit = os.environ.get("SUBFLEET_CACHE_BYTES") or str(_DEFAULT_LIMIT_BYTES)
    if not limit.isascii() or not limit.isdigit() or int(limit) < 1:
        raise ConfigError(f"SUBFLEET_CACHE_BYTES is {limit!r}, but must be a whole number of bytes, 1 or more")
    path = Path(chosen) if chosen else find_cache_folder() / "subfleet" / "programs"
    return CacheFolder(path=path, limit_bytes=int(limit))


class ExportCache:
    """Exported programs and models on disk. A file's access time, which is set here, is the time of its last use."""

    def __init__(self, folder: CacheFolder) -> None:
        """Open the folder, remove half-written files of killed processes, and trim it to its limit.

        Raises:
            FileError: the folder cannot be created.
        """
        with explain_os_errors(f"the folder {folder.path} cannot be created", "choose another"):
            folder.path.mkdir(parents=True, exist_ok=True)
        self._folder = folder.path
        self._limit_bytes = folder.limit_bytes
        self._checked: dict[str, tuple[int, int]] = {}
        self._remove_leftovers()
        self.trim()

    def path(self, request: AnyRequest) -> Path:
        """Return the path of a request's result, whether or not it exists."""
        return self._folder / request.file_name

    def find(self, request: AnyRequest) -> Path | None:
        """Return the path of a request's complete result and mark it as used; None if it is missing or damaged."""
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

    def is_empty(self) -> bool:
        """Return whether the folder holds no result."""
        return not any(path.suffix in _SUFFIXES for path in self._folder.iterdir())

    def trim(self) -> None:
        """Remove the least recently used results until the rest is within the limit."""
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
                logger.info(
                    "removed %s from the export cache, which is limited to %d bytes", path.name, self._limit_bytes
                )
            surplus -= size

    def _remove_leftovers(self) -> None:
        """Remove half-written files of killed workers; younger ones may belong to another pool."""
        for partial in self._folder.glob(".*.part"):
            with contextlib.suppress(OSError):
                if time.time() - partial.stat().st_mtime > LEFTOVER_S:
                    partial.unlink()


def is_whole(path: Path, request: AnyRequest) -> bool:
    """Return whether a file exists and is the complete result of a request."""
    try:
        if isinstance(request, InferRequest):
            return figure_path(path).is_file() and path.stat().st_size > 0
        content = path.read_bytes()
        if isinstance(request, EstimateRequest):
            MemoryEstimates.unpack(content)
            return True
        return program_id_of(content) == request.program_id
    except (OSError, ProtocolError):
        return False


@contextmanager
def lock_result(path: Path) -> Iterator[None]:
    """Hold the lock on a result while it is written; other processes that share the folder wait.

    There are 256 empty lock files, one for all results with the same first two characters, so none ever needs to be
    removed. The system releases a lock when its holder ends, however it ends.
    """
    with path.with_name(f".{path.name[:2]}.lock").open("ab") as file:
        lock(file, wait=True)  # without locks each process writes its own copy; they are the same
        yield
