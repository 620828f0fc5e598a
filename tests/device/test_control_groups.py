"""Limits within the control groups that a host made for this process, on trees that look like the kernel's."""

import os
from pathlib import Path

import pytest

from subfleet.device.control_groups import OwnGroups

V1 = {
    "memory.limit_in_bytes": "4711",
    "memory.usage_in_bytes": "1000\n",
    "memory.stat": "cache 900\ntotal_active_file 300\ntotal_inactive_file 500\ntotal_mapped_file 100\n",
}
V2 = {
    "memory.max": "4711",
    "memory.current": "1000\n",
    "memory.stat": "file 900\nactive_file 300\ninactive_file 500\nfile_mapped 100\n",
}
LIMITS = {"memory.limit_in_bytes": "-1", "memory.max": "max"}
"""The file of the limit, and what stands in it without one."""


def make_group(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, content in {"cgroup.procs": "", **files}.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize("files", [V1, V2], ids=["v1", "v2"])
def test_a_limit_is_what_is_taken_now_but_for_idle_pages_of_files_and_a_growth(
    files: dict[str, str], tmp_path: Path
) -> None:
    groups = OwnGroups([make_group(tmp_path / "cpu", {}), make_group(tmp_path / "memory", files)])
    assert groups.limits_memory
    limit = next(tmp_path / "memory" / name for name in files if name in LIMITS)
    with groups.limit_growth(50):
        assert limit.read_text(encoding="utf-8") == str(1000 - (300 + 500 - 100) + 50)
    assert limit.read_text(encoding="utf-8") == LIMITS[limit.name]


@pytest.mark.parametrize("files", [V1, V2], ids=["v1", "v2"])
def test_a_process_that_joins_is_free_of_the_limit_of_one_that_died(files: dict[str, str], tmp_path: Path) -> None:
    folders = [make_group(tmp_path / "memory", files), make_group(tmp_path / "cpu", {})]
    OwnGroups(folders).join()
    assert [(folder / "cgroup.procs").read_text(encoding="utf-8") for folder in folders] == [str(os.getpid())] * 2
    limit = next(tmp_path / "memory" / name for name in files if name in LIMITS)
    assert limit.read_text(encoding="utf-8") == LIMITS[limit.name]


def test_without_a_group_for_memory_nothing_is_limited(tmp_path: Path) -> None:
    for groups in (OwnGroups([]), OwnGroups([make_group(tmp_path / "cpu", {})])):
        groups.join()
        assert not groups.limits_memory
        with groups.limit_growth(0):
            pass
