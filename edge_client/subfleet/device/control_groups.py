"""Control groups of Linux, versions 1 and 2: what they leave this process, and limits within one's own."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from subfleet.device_profiles.process_memory import release_free_memory

PROCESSES = "cgroup.procs"
"""The file of a group to which the ids of its processes are written."""
_UNLIMITED_BYTES = 2**60
"""Kernels write a number near 2**63 where there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFiles:
    """The files of a group that limits memory.

    Attributes:
        limit: the limit in bytes.
        unlimited: what stands in it without a limit.
        throttle: lower limits, above which the kernel takes memory back.
        usage: bytes that count.
        cached: names in `memory.stat` of pages of files, the last one of those not in use.
        mapped: the name of pages of files that are mapped.
    """

    limit: str
    unlimited: str
    throttle: tuple[str, ...] = ()
    usage: str
    cached: tuple[str, ...]
    mapped: str


MEMORY_FILES: Mapping[int, MemoryFiles] = MappingProxyType(
    {
        2: MemoryFiles(
            limit="memory.max",
            unlimited="max",
            throttle=("memory.high",),
            usage="memory.current",
            cached=("active_file", "inactive_file"),
            mapped="file_mapped",
        ),
        1: MemoryFiles(
            limit="memory.limit_in_bytes",
            unlimited="-1",
            usage="memory.usage_in_bytes",
            cached=("total_active_file", "total_inactive_file"),
            mapped="total_mapped_file",
        ),
    }
)
"""By version of control groups."""


class OwnGroups:
    """The control groups that the host of this process made for it.

    Args:
        folders: of the groups; at most one of them limits memory.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        found = ((folder, files) for folder in folders for files in MEMORY_FILES.values())
        self._memory = next(((folder, files) for folder, files in found if (folder / files.limit).exists()), None)

    @property
    def limits_memory(self) -> bool:
        """Whether one of them limits memory."""
        return self._memory is not None

    def join(self) -> None:
        """Move this process into its groups. A process that died there may have left its limit.

        Raises:
            OSError: the system refuses it.
        """
        if self._memory is not None:
            folder, files = self._memory
            (folder / files.limit).write_text(files.unlimited, encoding="utf-8")
        for folder in self._folders:
            (folder / PROCESSES).write_text(str(os.getpid()), encoding="utf-8")

    @contextmanager
    def limit_growth(self, growth_bytes: int) -> Iterator[None]:
        """A context in which the kernel limits the group's memory to its present size plus a growth.

        A process that needs more is killed before it has it. What the kernel can drop at any time, unmapped pages of
        files, is not part of the present size. Without a group that limits memory nothing is limited.

        Args:
            growth_bytes: 0 or more.

        Raises:
            OSError: the system refuses the limit.
        """
        if self._memory is None:
            yield
            return
        folder, files = self._memory
        release_free_memory()
        present_bytes = (_read_number(folder / files.usage) or 0) - _read_droppable_bytes(folder, files)
        (folder / files.limit).write_text(str(present_bytes + growth_bytes), encoding="utf-8")
        try:
            yield
        finally:
            with suppress(OSError):  # the next process that joins lifts it
                (folder / files.limit).write_text(files.unlimited, encoding="utf-8")


def _read_droppable_bytes(folder: Path, files: MemoryFiles) -> int:
    statistics = folder / "memory.stat"
    cached_bytes = sum(_read_stat(statistics, name) for name in files.cached)
    return max(cached_bytes - _read_stat(statistics, files.mapped), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHeadroom:
    """The limit and the free memory of the tightest control group.

    Attributes:
        limit_bytes: of that group.
        free_bytes: what the group may still take; page cache that the kernel would give up counts as free.
    """

    limit_bytes: int
    free_bytes: int


class ControlGroups:
    """Reads memory limits of control groups, versions 1 and 2, of this process and of every group above it.

    Args:
        root: where control groups are mounted.
        membership: the file that names this process's groups.
        controllers: the file in which the kernel tells what groups can limit.
        marks: files that container engines leave in each container.
    """

    def __init__(
        self,
        root: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
        controllers: Path = Path("/proc/cgroups"),
        marks: Sequence[Path] = (Path("/.dockerenv"), Path("/run/.containerenv")),
    ) -> None:
        self._root = root
        self._membership = membership
        self._controllers = controllers
        self._marks = marks

    def lacks_memory_limits(self) -> bool:
        """Whether this is a container and the kernel cannot limit its memory, so that its limit is void.

        Raspberry Pi OS starts its kernel so, and container engines say it once, when they start the container.
        """
        if not any(mark.exists() for mark in self._marks):
            return False
        try:
            lines = self._controllers.read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        # Name, hierarchy, number of groups, and 1 where it is enabled.
        enabled = {line.split()[0] for line in lines if not line.startswith("#") and line.split()[-1:] == ["1"]}
        unified = _read_words(self._root / "cgroup.controllers") | _read_words(
            self._root / "unified/cgroup.controllers"
        )
        return bool(lines) and "memory" not in enabled | unified

    def headroom(self) -> MemoryHeadroom | None:
        """The tightest limit; None where there is none."""
        limits = [
            room for folder, version in self._list_folders() if (room := _read_headroom(folder, version)) is not None
        ]
        return min(limits, key=lambda room: room.free_bytes, default=None)

    def _list_folders(self) -> list[tuple[Path, int]]:
        try:
            lines = self._membership.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        folders: list[tuple[Path, int]] = []
        for line in lines:
            _, _, entry = line.partition(":")
            controllers, _, inner = entry.partition(":")
            if "memory" in controllers.split(","):
                folders += [(folder, 1) for folder in _list_parents(self._root / "memory", inner)]
            elif controllers == "":
                folders += [(folder, 2) for folder in _list_parents(self._root, inner)]
                folders += [(folder, 2) for folder in _list_parents(self._root / "unified", inner)]
        return folders


def _list_parents(root: Path, inner: str) -> list[Path]:
    # Inside a container the path may be the host's, which is not mounted: then only the root is there to be read.
    parts = [part for part in inner.split("/") if part not in ("", ".", "..")]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _read_headroom(folder: Path, version: int) -> MemoryHeadroom | None:
    # Above memory.high the kernel takes a group's memory back and slows it down: nobody can train there, either.
    files = MEMORY_FILES[version]
    limit_names, cache_name = (files.limit, *files.throttle), files.cached[-1]
    limits = [limit for name in limit_names if (limit := _read_number(folder / name)) is not None]
    limit_bytes, usage_bytes = min(limits, default=_UNLIMITED_BYTES), _read_number(folder / files.usage)
    if usage_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
        return None
    used_bytes = max(usage_bytes - _read_stat(folder / "memory.stat", cache_name), 0)
    return MemoryHeadroom(limit_bytes=limit_bytes, free_bytes=max(limit_bytes - used_bytes, 0))


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _read_words(path: Path) -> frozenset[str]:
    try:
        return frozenset(path.read_text(encoding="utf-8").split())
    except OSError:
        return frozenset()


def _read_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    number = values.get(name, "0").strip()
    return int(number) if number.isdigit() else 0
