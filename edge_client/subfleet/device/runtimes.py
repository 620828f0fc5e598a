"""Finds the trainers that are installed, by entry point; nothing here knows a runtime."""

from collections.abc import Callable, Iterable
from pathlib import Path

from subfleet.protocol.errors import ConfigError, MissingExtraError
from subfleet.protocol.programs import DataSummary, Trainer
from subfleet.protocol.registry import Registry

__all__ = ["CPU", "TRAINERS", "choose_trainer", "load_trainer", "trainer_of_file"]

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
    raise missing or ConfigError(f"no runtime is named; choose one of {list(TRAINERS.names)}")


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
