"""Finds the trainers that are installed, by entry point; nothing here knows a runtime."""

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from subfleet.protocol.errors import ConfigError, MissingExtraError
from subfleet.protocol.programs import DataSummary, Trainer
from subfleet.protocol.suggestion import did_you_mean

__all__ = ["CPU", "GROUP", "choose_trainer", "installed", "load_trainer", "trainer_of_file"]

GROUP = "subfleet.trainers"
CPU = "cpu"
"""The provider that every runtime has."""


def installed() -> Mapping[str, EntryPoint]:
    """The entry points by name; loading one imports what it needs."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def load_trainer(name: str, provider: str = CPU) -> Trainer:
    """Load one trainer.

    Args:
        name: of its entry point.
        provider: what is to compute.

    Raises:
        ConfigError: there is no trainer of that name, or it does not know the provider.
        MissingExtraError: a package that it needs is not installed.
    """
    known = installed()
    if name not in known:
        raise ConfigError(f"there is no runtime {name!r:.80}; choose one of {sorted(known)}{did_you_mean(name, known)}")
    try:
        make: Callable[..., Trainer] = known[name].load()
        trainer = make()
    except ModuleNotFoundError as error:
        raise MissingExtraError((error.name or name).partition(".")[0], "edge") from error
    if provider not in trainer.providers:
        raise ConfigError(f"runtime {name!r} has no provider {provider!r:.80}; choose one of {list(trainer.providers)}")
    return trainer if provider == trainer.providers[0] else make(provider=provider)


def choose_trainer(names: Iterable[str], data: str, provider: str = CPU) -> tuple[Trainer, DataSummary]:
    """The first of some trainers whose runtime is installed, and its view of the data: a device pays for one runtime.

    Raises:
        ConfigError: a name is unknown, or a runtime that would be chosen lacks the provider.
        MissingExtraError: no runtime is installed; names what the first one lacks.
        DataError: the data cannot be used.
        FileError: the data cannot be read.
    """
    missing: MissingExtraError | None = None
    for name in names:
        trainer = load_trainer(name, provider)
        try:
            return trainer, trainer.describe(data)
        except MissingExtraError as error:
            missing = missing or error
    raise missing or ConfigError(f"no runtime is named; choose one of {sorted(installed())}")


def trainer_of_file(path: Path) -> Trainer:
    """The trainer whose inference models end as a file does.

    Raises:
        ConfigError: no trainer runs such files.
        MissingExtraError: a package that trainers need is not installed.
    """
    trainers = {trainer.suffix: trainer for trainer in map(load_trainer, installed())}
    if path.suffix not in trainers:
        raise ConfigError(f"the model is {path.name!r:.80}, but its name must end in one of {sorted(trainers)}")
    return trainers[path.suffix]
