"""Detects properties of this machine's processor."""

import platform
from pathlib import Path

from subfleet.protocol.memory_plan import PackingWidth

_CPUINFO = Path("/proc/cpuinfo")


def detect_packing_width(cpuinfo: Path = _CPUINFO) -> PackingWidth:
    """Detect how many outputs XNNPACK's product kernels compute at once on this processor (`gemm-config.c`).

    Args:
        cpuinfo: file in which Linux lists the features of the processor.
    """
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return 16 if platform.machine().lower() in {"x86_64", "amd64"} else 8
    if "avx512f" in flags:
        return 32
    return 16 if "avx" in flags else 8
