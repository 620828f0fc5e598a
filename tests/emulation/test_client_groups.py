"""Control groups for client processes, on trees that look like the kernel's, and on its own where it lets us."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from subfleet.emulation.client_groups import ClientGroups, GroupMounts, open_groups

OURS = str(os.getpid())
DEAD = 2**22 + 1
"""No process has this id: it is above the largest one of Linux."""
V2 = {
    "cgroup.controllers": "cpu io memory",
    "cgroup.subtree_control": "",
    "cgroup.procs": "",
    "cgroup.type": "domain",
    "memory.max": "max",
    "memory.swap.max": "max",
    "cpu.max": "max 100000",
}
V1 = {
    "memory": {"cgroup.procs": "", "memory.limit_in_bytes": "9223372036854771712", "memory.swappiness": "60"},
    "cpu": {"cgroup.procs": "", "cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "50000"},
}
NEEDS_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has control groups")


def make_group(folder: Path) -> None:
    """Make a folder with its files, as the kernel does."""
    folder.mkdir()
    kind = next((V1[name] for name in V1 if name in folder.parts), V2)
    for name, content in kind.items():
        (folder / name).write_text(content, encoding="utf-8")


def remove_group(folder: Path) -> None:
    """Remove a folder, unless it has groups or processes."""
    if any(path.is_dir() for path in folder.iterdir()) or read(folder, "cgroup.procs"):
        raise OSError(f"{folder} is busy")
    shutil.rmtree(folder)


def read(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


class Tree:
    """A place with the group `app` of this process."""

    def __init__(
        self,
        folder: Path,
        *versions: int,
        make: Callable[[Path], None] = make_group,
        remove: Callable[[Path], None] = remove_group,
    ) -> None:
        self.root, membership = folder / "cgroup", folder / "membership"
        self.root.mkdir()
        lines = list[str]()
        if 2 in versions:
            lines.append("0::/app")
            make_group(self.root / "app")
        if 1 in versions:
            lines += ["4:memory:/app", "1:cpu:/app"]
            for name in V1:
                (self.root / name).mkdir()
                make_group(self.root / name / "app")
        membership.write_text("\n".join(lines), encoding="utf-8")
        self.mounts = GroupMounts(root=self.root, membership=membership, make=make, remove=remove)

    def list_groups(self) -> list[str]:
        """The groups below `app`."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("app/*") if path.is_dir())


def test_version_2_gives_each_client_a_group_and_this_process_leaves_its_own_meanwhile(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2, remove=shutil.rmtree)  # although this process is still written there
    app = tree.root / "app"
    (app / "cgroup.procs").write_text(OURS, encoding="utf-8")
    with open_groups({"ada": 1, "bob": 2}, tree.mounts) as groups:
        assert groups.memory_limit == "cgroup v2"
        ((ada,), (bob,)) = (groups.folders[name] for name in ("ada", "bob"))
        assert (read(ada, "cpu.max"), read(bob, "cpu.max")) == ("100000 100000", "200000 100000")
        assert (read(ada, "memory.max"), read(ada, "memory.swap.max")) == ("max", "0")
        assert [read(group, "cgroup.subtree_control") for group in (app, ada.parent)] == ["+memory +cpu"] * 2
        assert read(ada.parent / "host", "cgroup.procs") == OURS
        (app / "cgroup.procs").write_text("", encoding="utf-8")  # as the kernel does
    assert read(app, "cgroup.procs") == OURS
    assert read(app, "cgroup.subtree_control") == "-memory -cpu"
    assert tree.list_groups() == []


def test_this_process_stays_in_the_topmost_group_of_version_2(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    app = tree.root / "app"
    (app / "cgroup.type").unlink()
    (app / "cgroup.procs").write_text(f"{OURS}\n{DEAD}", encoding="utf-8")
    with open_groups({"ada": 1}, tree.mounts) as groups:
        assert groups.memory_limit == "cgroup v2"
        assert [path.name for path in groups.folders["ada"][0].parent.iterdir() if path.is_dir()] == ["client-ada"]
    assert tree.list_groups() == []
    assert read(app, "cgroup.procs") == f"{OURS}\n{DEAD}"


def test_version_1_is_used_where_version_2_cannot_be(tmp_path: Path) -> None:
    """Another process is in the group of this one, and is not moved."""
    tree = Tree(tmp_path, 1, 2)
    (tree.root / "app" / "cgroup.procs").write_text(f"{OURS}\n{DEAD}", encoding="utf-8")
    with open_groups({"ada": 3}, tree.mounts) as groups:
        assert groups.memory_limit == "cgroup v1"
        memory, processors = groups.folders["ada"]
        assert memory.parent.parent == tree.root / "memory" / "app"
        assert read(memory, "memory.limit_in_bytes") == "-1"
        assert read(memory, "memory.swappiness") == "0"
        assert (read(processors, "cpu.cfs_quota_us"), read(processors, "cpu.cfs_period_us")) == ("300000", "100000")
    assert tree.list_groups() == []
    assert read(tree.root / "app", "cgroup.procs") == f"{OURS}\n{DEAD}"


@NEEDS_LINUX
def test_without_groups_each_process_limits_itself(tmp_path: Path) -> None:
    nothing = ClientGroups(memory_limit="RLIMIT_DATA")
    with open_groups({"ada": 1}, Tree(tmp_path).mounts) as groups:
        assert groups == nothing
    with open_groups({"ada": 1}, GroupMounts(root=tmp_path, membership=tmp_path / "none")) as groups:
        assert groups == nothing


@NEEDS_LINUX
@pytest.mark.parametrize("version", [1, 2])
def test_what_was_made_is_removed_if_the_system_refuses_the_rest(version: int, tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        if folder.name == "client-bob":
            raise PermissionError("no")
        make_group(folder)

    tree = Tree(tmp_path, version, make=make)
    with open_groups({"ada": 1, "bob": 1}, tree.mounts) as groups:
        assert groups == ClientGroups(memory_limit="RLIMIT_DATA")
        assert tree.list_groups() == []
    assert tree.list_groups() == []


def test_groups_of_a_killed_process_are_removed_by_the_next_one_and_those_of_others_stay(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 1)
    app = tree.root / "memory" / "app"
    for name in (f"subfleet-{DEAD}-0", f"subfleet-{os.getppid()}-0", "subfleet-of-somebody", "other"):
        make_group(app / name)
        make_group(app / name / "client-ada")
    with open_groups({"ada": 1}, tree.mounts):
        assert not (app / f"subfleet-{DEAD}-0").exists()
    assert sorted(path.name for path in app.iterdir() if path.is_dir()) == [
        "other", f"subfleet-{os.getppid()}-0", "subfleet-of-somebody"
    ]  # fmt: skip


def test_a_group_that_is_still_in_use_stays_and_stops_nobody(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 1)
    app = tree.root / "memory" / "app"
    make_group(app / f"subfleet-{DEAD}-0")
    (app / f"subfleet-{DEAD}-0" / "cgroup.procs").write_text("1", encoding="utf-8")
    with open_groups({"ada": 1}, tree.mounts) as groups:
        assert groups.memory_limit == "cgroup v1"
    assert tree.list_groups() == [f"memory/app/subfleet-{DEAD}-0"]


GROWING = """
import sys
from pathlib import Path
from subfleet.device.control_groups import OwnGroups
groups = OwnGroups([Path(folder) for folder in sys.argv[2:]])
groups.join()
with groups.limit_growth(30_000_000):
    taken = bytearray(int(sys.argv[1]))
"""


@pytest.mark.slow
def test_the_kernel_kills_what_exceeds_a_limit_and_nothing_else() -> None:
    with open_groups({"ada": 1}) as groups:
        if not groups.folders:
            pytest.skip("this process may not make control groups")
        folders = groups.folders["ada"]
        run = partial(subprocess.run, capture_output=True, text=True, timeout=60, check=False)
        command = [sys.executable, "-c", GROWING]
        codes = [run([*command, str(size), *map(str, folders)]).returncode for size in (10**7, 10**8, 10**7)]
        assert codes == [0, -signal.SIGKILL, 0], "and the next process is free of the limit"
        most = next(
            path for name in ("memory.peak", "memory.max_usage_in_bytes") if (path := folders[0] / name).exists()
        )
        assert int(most.read_text(encoding="utf-8")) < 60_000_000
    assert not any(folder.exists() for folder in folders)
