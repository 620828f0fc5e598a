"""The packing width of a processor's kernels, detected from its features."""

import platform
from pathlib import Path

import pytest

from subfleet.device_profiles import detect_packing_width


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("flags\t\t: fpu sse sse2 sse4_2", 8),
        ("flags\t\t: fpu sse2 avx", 16),
        ("flags\t\t: fpu sse2 avx fma avx2", 16),
        ("flags\t\t: fpu avx avx2 avx512f avx512vl", 32),
        ("Features\t: fp asimd evtstrm crc32", 8),
    ],
)
def test_the_width_follows_from_the_features_of_the_processor(tmp_path: Path, line: str, width: int) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n", encoding="utf-8")
    assert detect_packing_width(tmp_path / "cpuinfo") == width


@pytest.mark.parametrize(("machine", "width"), [("x86_64", 16), ("AMD64", 16), ("arm64", 8)])
def test_without_that_file_the_width_follows_from_the_architecture(
    tmp_path: Path, machine: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert detect_packing_width(tmp_path / "none") == width
