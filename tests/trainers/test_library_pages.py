from pathlib import Path

import numpy as np
import pytest

from subfleet.trainers.library_pages import map_library


def test_the_code_of_a_loaded_library_is_mapped() -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs the proc file system")
    mapped_bytes = map_library(Path(np.__file__).parent)
    libraries = {
        line.split(maxsplit=5)[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(Path(np.__file__).parent) in line
    }
    assert 0 < mapped_bytes <= sum(Path(library).stat().st_size + 2**16 for library in libraries)


def test_nothing_is_done_for_other_libraries_or_without_a_table(tmp_path: Path) -> None:
    assert map_library(tmp_path) == 0
    assert map_library(Path(np.__file__).parent, tmp_path / "maps") == 0


def test_writable_pages_are_ignored(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f0000000000-7f0000001000 rw-p 00000000 08:01 1 {tmp_path}/library.so\n")
    assert map_library(tmp_path, maps) == 0
