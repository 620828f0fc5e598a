"""Finds the trainers that are installed, by entry point; nothing here knows a runtime."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from subfleet.device.known_runtimes import tried_once
from subfleet.device.trying import Tried
from subfleet.protocol.errors import BrokenError, ConfigError, MissingExtraError
from subfleet.protocol.jobs import DataSummary, Trainer
from subfleet.protocol.registry import Registry

_LOG = logging.getLogger(__name__)

__all__ = ["CPU", "TRAINERS", "check_runtime", "choose_trainer", "load_trainer", "trainer_of_file"]

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
        make = TRAINERS.named(name)
        trainer = make()
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise _missing(error.__cause__) from error
        raise
    if provider not in trainer.providers:
        raise ConfigError(f"runtime {name!r} has no provider {provider!r:.80}; choose one of {list(trainer.providers)}")
    return trainer if provider == trainer.providers[0] else make(provider=provider)


def _missing(error: ModuleNotFoundError) -> MissingExtraError:
    return MissingExtraError((error.name or TRAINERS.group).partition(".")[0], "edge")


def choose_trainer(
    names: Iterable[str], data: str, provider: str = CPU, *, attempt: Callable[[str, str], Tried] = tried_once
) -> tuple[Trainer, DataSummary]:
    """The first of some trainers whose runtime works, and its view of the data: a device pays for one runtime.

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


def check_runtime(name: str, provider: str = CPU, *, attempt: Callable[[str, str], Tried] = tried_once) -> None:
    """Try a runtime that there is no choice about, before it is loaded in this process.

    Raises:
        BrokenError: it is installed, and does not work here.
    """
    tried = attempt(name, provider)
    if tried.broken:
        raise BrokenError(f"the runtime {name!r} does not work here: {tried.sentence}")


def trainer_of_file(path: Path) -> Trainer:
    """The trainer whose inference models end as a file does.

    Raises:
        ConfigError: no trainer runs such files.
        MissingExtraError: a package that trainers need is not installed.
    """
    trainers = {trainer.suffix: trainer for trainer in map(load_trainer, TRAINERS.names)}
    if path.suffix not in trainers:
        raise ConfigError(f"the model is {path.name!r:.80}, but its name must end in one of {sorted(trainers)}")
    return trainers[path.suffix]
