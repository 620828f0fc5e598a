"""Finds the installed trainers by entry point, and remembers which runtimes worked since the machine was started."""

import hashlib
import json
import logging
import os
import platform
import secrets
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from subfleet.device.trials import TrialResult, try_runtime
from subfleet.protocol.errors import BrokenError, ConfigError, FileError, MissingExtraError
from subfleet.protocol.homes import find_cache_folder
from subfleet.protocol.jobs import DataSummary, Trainer
from subfleet.protocol.registry import Registry

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
    folders = [(folder, _read_change_time(folder or ".")) for folder in sys.path]
    variables = [os.environ.get(name, "") for name in _LIBRARIES]
    plain = [boot, platform.machine(), sys.executable, sys.version, folders, variables]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def _read_change_time(folder: str) -> int:
    # To install or remove a package renames entries of its folder.
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116 - entries of sys.path are text of any kind
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


_LOG = logging.getLogger(__name__)


TRAINERS = Registry[Callable[..., Trainer]]("subfleet.trainers", "runtime")
"""What makes the trainer of each runtime; loading one imports what it needs."""
CPU = "cpu"
"""The provider that every runtime has."""


def load_trainer(name: str, provider: str = CPU) -> Trainer:
    """Load one trainer.

    Args:
        name: of its entry point.
        provider: what is to compute.

    Raises:
        ConfigError: there is no trainer of that name, or it does not know the provider.
        MissingExtraError: a package that it needs is not installed.
    """
    try:
        make = TRAINERS.load(name)
        trainer = make()
    except ModuleNotFoundError as error:
        raise _explain_missing(error) from error
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise _explain_missing(error.__cause__) from error
        raise
    if provider not in trainer.providers:
        raise ConfigError(f"runtime {name!r} has no provider {provider!r:.80}; choose one of {list(trainer.providers)}")
    return trainer if provider == trainer.providers[0] else make(provider=provider)


def _explain_missing(error: ModuleNotFoundError) -> MissingExtraError:
    return MissingExtraError((error.name or TRAINERS.group).partition(".")[0], "edge")


def choose_trainer(
    names: Iterable[str], data: str, provider: str = CPU, *, attempt: Callable[[str, str], TrialResult] = try_once
) -> tuple[Trainer, DataSummary]:
    """Load the first trainer with a working runtime, and summarise the data with it.

    Each is tried in a process of its own before it is loaded in this one, where its end would be the agent's.

    Args:
        names: of the trainers.
        data: what to summarise.
        provider: what is to compute.
        attempt: tries a runtime by its name and its provider.

    Raises:
        ConfigError: a name is unknown, or a runtime that would be chosen lacks the provider.
        BrokenError: none works, and one that is installed is broken; names the first of those.
        MissingExtraError: no runtime is installed; names what the first one lacks.
        DataError: the data cannot be used.
        FileError: the data cannot be read.
    """
    broken: list[str] = []
    missing: list[MissingExtraError] = []
    for name in names:
        try:
            check_runtime(name, provider, attempt=attempt)
            trainer = load_trainer(name, provider)
            summary = trainer.describe(data)
        except BrokenError as error:
            broken.append(str(error))
        except MissingExtraError as error:
            missing.append(error)
        else:
            for sentence in broken:
                _LOG.warning("%s", sentence)
            return trainer, summary
    if broken:
        raise BrokenError("; ".join(broken))
    if missing:
        raise missing[0]
    raise ConfigError(f"no runtime is named; choose one of {list(TRAINERS.names)}")


def check_runtime(name: str, provider: str = CPU, *, attempt: Callable[[str, str], TrialResult] = try_once) -> None:
    """Try a required runtime before it is loaded in this process.

    Raises:
        BrokenError: it is installed, and does not work here.
    """
    tried = attempt(name, provider)
    if tried.broken:
        raise BrokenError(f"the runtime {name!r} does not work here: {tried.sentence}")


def find_trainer(path: Path) -> Trainer:
    """Find the trainer for an inference model by its file ending.

    Raises:
        ConfigError: no trainer runs such files.
        MissingExtraError: a package that trainers need is not installed.
    """
    trainers = {trainer.suffix: trainer for trainer in map(load_trainer, TRAINERS.names)}
    if path.suffix not in trainers:
        raise ConfigError(f"the model is {path.name!r:.80}, but its name must end in one of {sorted(trainers)}")
    return trainers[path.suffix]
