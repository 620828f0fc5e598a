"""Control groups of client processes: the memory and the processors that an emulated device has.

They are made below the group of this process and removed at the end; what a killed process left is removed by the next
one. Version 2 is used where it limits memory, else version 1. Both need the right to write there: root has it, and so
has a service or scope of systemd with `Delegate=yes`.
"""

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from subfleet.device.control_groups import MEMORY_FILES, PROCESSES
from subfleet.device.monitor import load_psutil

_LOG = logging.getLogger(__name__)
_PREFIX = "subfleet"
_CONTROLLERS = ("memory", "cpu")
_SUBTREE = "cgroup.subtree_control"
_TYPE = "cgroup.type"
"""Every group has this file but the topmost one, which may have both processes and limited groups (version 2)."""
_PERIOD_US = 100_000
_REMOVE_S = 2.0
"""How long the last processes of a group may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMounts:
    """Where control groups are, and how one is made and removed.

    Attributes:
        root: where they are mounted.
        membership: the file that names the groups of this process.
        make: makes a group.
        remove: removes a group without processes.
    """

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")
    make: Callable[[Path], None] = Path.mkdir
    remove: Callable[[Path], None] = Path.rmdir

    def find_own(self, controller: str) -> Path:
        """Find the group of this process that a controller of version 1 limits, or with "" that of version 2.

        Raises:
            OSError: there is none.
        """
        for line in self.membership.read_text(encoding="utf-8").splitlines():
            controllers, _, inner = line.partition(":")[2].partition(":")
            if controller in controllers.split(","):
                root = self.root / controller
                own = root / inner.strip("/")
                # Inside a container the path may be the host's, which is not mounted: the root is the own group then.
                return own if own.is_dir() else root
        raise OSError(f"no group is limited by {controller or 'version 2'!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGroups:
    """What limits the clients of a run.

    Attributes:
        memory_limit: what limits their memory: "cgroup v2", "cgroup v1", or "RLIMIT_DATA", the limit of each process;
            empty if nothing does.
        folders: by client id, the groups for the process that trains.
    """

    memory_limit: str
    folders: Mapping[str, Sequence[Path]] = field(default_factory=lambda: MappingProxyType({}))


@contextmanager
def open_groups(threads: Mapping[str, int], mounts: GroupMounts | None = None) -> Iterator[ClientGroups]:
    """A context with groups for each client, or without any where this process cannot make them.

    Args:
        threads: by client id, how many processors its training may use.
        mounts: where control groups are.
    """
    groups = ClientGroups(memory_limit="RLIMIT_DATA" if sys.platform.startswith("linux") else "")
    tree = _Tree(mounts or GroupMounts())
    for version, make in _MAKERS.items():
        try:
            groups = ClientGroups(memory_limit=f"cgroup v{version}", folders=make(tree, threads))
            break
        except OSError as error:
            _LOG.debug("no control groups of version %d: %s", version, error)
            tree.close()
    try:
        yield groups
    finally:
        tree.close()


class _Tree:
    """The groups that this process has made."""

    def __init__(self, mounts: GroupMounts) -> None:
        self.mounts = mounts
        self._made: list[Path] = []
        self._enabling: list[Path] = []
        self._moved: tuple[Path, Path] | None = None

    def make_base(self, own: Path) -> Path:
        """Make the group for those of the clients, and remove those of processes that have ended."""
        for base in own.glob(f"{_PREFIX}-*-*"):
            process_id = base.name.split("-")[1]
            if process_id.isdecimal() and not load_psutil().pid_exists(int(process_id)):
                for group in (*base.glob("*/"), base):
                    with suppress(OSError):
                        self.mounts.remove(group)
        return self.make(own / f"{_PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:8]}")

    def make(self, folder: Path) -> Path:
        """Make a group."""
        self.mounts.make(folder)
        self._made.append(folder)
        return folder

    def enable(self, group: Path, controllers: Sequence[str]) -> None:
        """Let controllers limit the groups below a group (version 2)."""
        if not set(controllers) <= set((group / _SUBTREE).read_text(encoding="utf-8").split()):
            (group / _SUBTREE).write_text(" ".join(f"+{name}" for name in controllers), encoding="utf-8")
            self._enabling.append(group)

    def leave(self, own: Path, folder: Path) -> None:
        """Move this process and its children to another group: one with groups below has no processes (version 2).

        Raises:
            OSError: there are others, which have to stay.
        """
        present = _list_processes(own)
        family = {os.getpid(), *(child.pid for child in load_psutil().Process().children(recursive=True))}
        if others := sorted(set(present) - family):
            raise OSError(f"other processes are in {str(own)!r}, such as {others[0]}")
        self._moved = own, folder
        _move(present, folder)

    def close(self) -> None:
        """Remove all groups, and return to the own one."""
        for group in reversed(self._enabling):
            with suppress(OSError):
                (group / _SUBTREE).write_text(" ".join(f"-{name}" for name in _CONTROLLERS), encoding="utf-8")
        if self._moved is not None:
            with suppress(OSError):
                _move(_list_processes(self._moved[1]), self._moved[0])
        for folder in reversed(self._made):
            self._remove(folder)
        self._made, self._enabling, self._moved = [], [], None

    def _remove(self, folder: Path) -> None:
        until_s = time.monotonic() + _REMOVE_S
        while True:
            try:
                self.mounts.remove(folder)
            except OSError as error:
                if time.monotonic() < until_s:
                    time.sleep(0.02)
                    continue
                _LOG.debug("the control group %s stays: %s", folder, error)
            return


def _make_unified(tree: _Tree, threads: Mapping[str, int]) -> Mapping[str, Sequence[Path]]:
    own = tree.mounts.find_own("")
    offered = (own / "cgroup.controllers").read_text(encoding="utf-8").split()
    controllers = [name for name in _CONTROLLERS if name in offered]
    if "memory" not in controllers:
        raise OSError(f"memory is not limited in {str(own)!r}")
    base = tree.make_base(own)
    if (own / _TYPE).exists() and _list_processes(own):
        tree.leave(own, tree.make(base / "host"))
    tree.enable(own, controllers)
    tree.enable(base, controllers)
    folders = {name: (tree.make(base / f"client-{name}"),) for name in threads}
    for name, (folder,) in folders.items():
        _write(folder, {MEMORY_FILES[2].limit: MEMORY_FILES[2].unlimited})
        with suppress(OSError):  # without swap
            _write(folder, {"memory.swap.max": "0"})
        if "cpu" in controllers:
            _write(folder, {"cpu.max": f"{threads[name] * _PERIOD_US} {_PERIOD_US}"})
    return MappingProxyType(folders)


def _make_separate(tree: _Tree, threads: Mapping[str, int]) -> Mapping[str, Sequence[Path]]:
    memory, folders = tree.make_base(tree.mounts.find_own("memory")), dict[str, Sequence[Path]]()
    try:
        processors = tree.make_base(tree.mounts.find_own("cpu"))
    except OSError as error:
        _LOG.debug("processors are not limited: %s", error)
        processors = None
    for name, count in threads.items():
        folder = tree.make(memory / f"client-{name}")
        _write(folder, {MEMORY_FILES[1].limit: MEMORY_FILES[1].unlimited, "memory.swappiness": "0"})
        folders[name] = (folder,)
        if processors is not None:
            other = tree.make(processors / f"client-{name}")
            _write(other, {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(count * _PERIOD_US)})
            folders[name] = folder, other
    return MappingProxyType(folders)


_MAKERS: Mapping[int, Callable[[_Tree, Mapping[str, int]], Mapping[str, Sequence[Path]]]] = MappingProxyType(
    {2: _make_unified, 1: _make_separate}
)


def _list_processes(group: Path) -> list[int]:
    return [int(word) for word in (group / PROCESSES).read_text(encoding="utf-8").split()]


def _move(processes: Sequence[int], group: Path) -> None:
    for process_id in processes:
        with suppress(ProcessLookupError):
            (group / PROCESSES).write_text(str(process_id), encoding="utf-8")


def _write(group: Path, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        (group / name).write_text(value, encoding="utf-8")
