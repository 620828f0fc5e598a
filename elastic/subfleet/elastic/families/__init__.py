"""The installed families of networks and published networks, all registered as entry points.

Reading them does not load PyTorch: a family is a record of settings that only imports the code of its network when it
builds it.
"""

from typing import Annotated, Protocol

from subfleet.elastic.families.records.fields import ReplaceableNorm
from subfleet.elastic.network import Family, Places
from subfleet.protocol.registry import Registry, problem_with_record

__all__ = ["FAMILIES", "PRESETS", "AnyFamily", "Preset", "get_predicted_places", "preset"]

_MEMBERS = ("TAG", "input_shape", "class_count", "norm", "learnable_steps", "scaler", "module")


class Preset(Protocol):
    """A published network."""

    def __call__(self, *, input_shape: tuple[int, ...], class_count: int, norm: ReplaceableNorm) -> Family:
        """Its settings for the given inputs.

        Args:
            input_shape: (channels, height, width), or (tokens,) for networks over symbols.
            class_count: number of classes, or of symbols if each next symbol is predicted.
            norm: norm that replaces BatchNorm; networks with other norms keep theirs.

        Raises:
            ConfigError: the numbers are out of range.
        """


def _problem(registered: object, name: str) -> str:
    problem = problem_with_record(registered, name, _MEMBERS)
    return problem or ("" if getattr(registered, "TAG", "") == "family" else "its TAG must be 'family'")


def _callable(registered: object, name: str) -> str:
    return "" if callable(registered) else f"{name!r} must be a function that returns a family's settings"


FAMILIES = Registry[type[Family]]("subfleet.families", "family", tag="family", check=_problem)
"""The record of each family, by its name in a configuration's `[model] family = "..."`."""

AnyFamily = Annotated[Family, FAMILIES]
"""Type of a field that is read from plain data as the record of the named family."""

PRESETS = Registry[Preset]("subfleet.presets", "preset", check=_callable)
"""The published networks, by their name in a configuration's `[model] preset = "..."`."""


def preset(name: str, *, input_shape: tuple[int, ...], class_count: int, norm: ReplaceableNorm = "batch") -> Family:
    """The settings of a published network.

    Args:
        name: a name in `PRESETS`.
        input_shape: as in `Preset`.
        class_count: as in `Preset`.
        norm: as in `Preset`.

    Raises:
        ConfigError: there is no such network, or the numbers are out of range.
    """
    return PRESETS.load(name)(input_shape=input_shape, class_count=class_count, norm=norm)


def get_predicted_places(family: Family) -> Places | None:
    """What networks of a family predict for, from `PREDICTS` of its record; None if it does not say."""
    places: Places | None = getattr(family, "PREDICTS", None)
    return places
