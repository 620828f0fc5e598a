from pathlib import Path

import numpy as np
import pytest

from subfleet.device_profiles.process_memory import release_free_memory
from subfleet.protocol.errors import MemoryLimitError
from subfleet.trainers.memory_watch import MemoryWatch

MEBIBYTE = 2**20


def touch(size_bytes: int) -> None:
    np.ones(size_bytes, np.uint8)


@pytest.mark.slow
def test_a_peak_that_is_given_back_is_measured() -> None:
    watch = MemoryWatch(2**40)
    touch(64 * MEBIBYTE)
    release_free_memory()
    assert 60 * MEBIBYTE < watch.growth_bytes() < 80 * MEBIBYTE


def test_a_new_watch_forgets_what_went_before() -> None:
    touch(64 * MEBIBYTE)
    assert MemoryWatch(2**40).growth_bytes() < 8 * MEBIBYTE


def test_check_names_growth_and_limit() -> None:
    watch = MemoryWatch(32 * MEBIBYTE)
    watch.check()
    touch(64 * MEBIBYTE)
    with pytest.raises(MemoryLimitError) as caught:
        watch.check()
    assert caught.value.limit_bytes == 32 * MEBIBYTE < caught.value.needed_bytes


@pytest.mark.parametrize("short", [0, 1])
def test_growth_of_just_the_limit_is_allowed_and_of_one_byte_more_is_not(tmp_path: Path, short: int) -> None:
    status = tmp_path / "status"
    status.write_text("VmHWM:\t  500 kB\nVmRSS:\t  500 kB\n")
    watch = MemoryWatch(400 * 1024 - short, tmp_path)
    status.write_text("VmHWM:\t  900 kB\nVmRSS:\t  500 kB\n")
    if not short:
        watch.check()
        return
    with pytest.raises(MemoryLimitError) as caught:
        watch.check()
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (400 * 1024, 400 * 1024 - 1)


def test_where_the_mark_cannot_be_reset_the_resident_size_is_sampled(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t  900 kB\nVmRSS:\t  500 kB\n")
    (tmp_path / "clear_refs").mkdir()
    watch = MemoryWatch(2**20, tmp_path)
    assert watch.growth_bytes() == 0
    status.write_text("VmHWM:\t  900 kB\nVmRSS:\t  620 kB\n")
    assert watch.growth_bytes() == 120 * 1024
    status.write_text("VmHWM:\t  900 kB\nVmRSS:\t  510 kB\n")
    assert watch.growth_bytes() == 120 * 1024


def test_a_mark_that_can_be_reset_is_read(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmHWM:\t  500 kB\nVmRSS:\t  500 kB\n")
    watch = MemoryWatch(2**20, tmp_path)
    assert (tmp_path / "clear_refs").read_text() == "5"
    status.write_text("VmHWM:\t  900 kB\nVmRSS:\t  510 kB\n")
    assert watch.growth_bytes() == 400 * 1024


def test_without_a_proc_file_system_growth_is_never_negative(tmp_path: Path) -> None:
    assert MemoryWatch(2**40, tmp_path / "missing").growth_bytes() >= 0


def test_pages_of_libraries_are_no_growth_and_are_not_held(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmHWM:\t  500 kB\nVmRSS:\t  500 kB\nRssAnon:\t  200 kB\nRssFile:\t  300 kB\n")
    watch = MemoryWatch(2**20, tmp_path, held_bytes=100 * 1024)
    status.write_text("VmHWM:\t  900 kB\nVmRSS:\t  680 kB\nRssAnon:\t  230 kB\nRssFile:\t  450 kB\n")
    assert watch.growth_bytes() == (400 + 100 - 150) * 1024
    assert watch.measure_held_bytes() == 130 * 1024
    status.write_text("VmHWM:\t  900 kB\nVmRSS:\t  780 kB\nRssAnon:\t  230 kB\nRssFile:\t  550 kB\n")
    assert watch.growth_bytes() == 350 * 1024, "code that is mapped after a peak does not make it smaller"
    status.write_text("VmHWM:\t  900 kB\nVmRSS:\t  480 kB\nRssAnon:\t  230 kB\nRssFile:\t  250 kB\n")
    assert watch.growth_bytes() == 500 * 1024, "pages that the kernel has dropped are still in the mark"


def test_an_old_kernel_lists_no_pages_of_files(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmHWM:\t  500 kB\nVmRSS:\t  500 kB\n")
    watch = MemoryWatch(2**20, tmp_path)
    status.write_text("VmHWM:\t  900 kB\nVmRSS:\t  620 kB\n")
    assert (watch.growth_bytes(), watch.measure_held_bytes()) == (400 * 1024, 120 * 1024)
