"""Remembers the runtimes that worked since this machine was started, so that a restarted agent need not try them.

A wrong note costs little: a runtime that dies takes the agent with it, as without a trial.
"""

import hashlib
import json
import os
import platform
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from subfleet.device.trials import TrialResult, try_runtime
from subfleet.protocol.errors import FileError
from subfleet.protocol.homes import find_cache_folder

__all__ = ["try_once"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LIBRARIES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
"""Variables that a runtime's libraries are found by."""


def try_once(
    name: str,
    provider: str,
    *,
    file: Path | None = None,
    attempt: Callable[[str, str], TrialResult] = try_runtime,
) -> TrialResult:
    """Try a runtime, unless it has worked with the installed packages since the machine was started.

    Args:
        name: of its trainer's entry point.
        provider: what is to compute.
        file: of what is known; one in the user's cache where it is None.
        attempt: tries it.
    """
    state, key = _describe_state(), f"{name} {provider}"
    with suppress(FileError):
        file = file or find_cache_folder() / "subfleet" / "runtimes.json"
    if file is None or not state:
        return attempt(name, provider)
    known = _read(file)
    if known.get(key) == state:
        return TrialResult(text="has worked since this machine was started")
    tried = attempt(name, provider)
    if tried.works:
        _write(file, {**_read(file), key: state})
    return tried


def _describe_state() -> str:
    """Identify the start of the machine, the interpreter and the installed packages; "" if unknown."""
    try:
        boot = _BOOT.read_text(encoding="utf-8")
    except OSError:
        return ""
    folders = [(place, _read_change_time(place or ".")) for place in sys.path]
    variables = [os.environ.get(name, "") for name in _LIBRARIES]
    plain = [boot, platform.machine(), sys.executable, sys.version, folders, variables]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def _read_change_time(place: str) -> int:
    # To install or remove a package renames entries of its folder.
    try:
        return os.stat(place).st_mtime_ns  # noqa: PTH116 - entries of sys.path are text of any kind
    except (OSError, ValueError):
        return 0


def _read(file: Path) -> dict[str, str]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(file: Path, known: dict[str, str]) -> None:
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    with suppress(OSError):  # the next start tries again, and no more than that
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(known), encoding="utf-8")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
