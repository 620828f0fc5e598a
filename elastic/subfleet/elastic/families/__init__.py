"""The families of networks and the published networks that are installed: entry points, ours like everybody else's.

Reading them loads no PyTorch: a family is a record of settings, which imports what builds its network when it is built.
"""

from typing import Annotated, Literal, Protocol

from subfleet.elastic.network import Family
from subfleet.protocol.registry import Registry, problem_with_record

__all__ = ["FAMILIES", "PRESETS", "AnyFamily", "Preset", "PublishedNorm", "preset"]

PublishedNorm = Literal["group", "batch", "none"]
"""What may take the place of BatchNorm in a published network."""

_MEMBERS = ("TAG", "input_shape", "class_count", "depths", "norm", "learnable_steps", "scaler", "blueprint")


class Preset(Protocol):
    """A published network."""

    def __call__(self, *, input_shape: tuple[int, ...], class_count: int, norm: PublishedNorm) -> Family:
        """Its settings for other inputs.

        Args:
            input_shape: (channels, height, width); of networks over symbols (tokens,).
            class_count: number of classes; where each next symbol is predicted, of symbols.
            norm: instead of BatchNorm, where the published network has that; others keep theirs.

        Raises:
            ConfigError: the numbers are out of range.
        """


def _problem(found: object, name: str) -> str:
    problem = problem_with_record(found, name, _MEMBERS)
    return problem or ("" if getattr(found, "TAG", "") == "family" else "its TAG must be 'family'")


def _callable(found: object, name: str) -> str:
    return "" if callable(found) else f"{name!r} must be a function that gives a family's settings"


FAMILIES = Registry[type[Family]]("subfleet.families", "family", tag="family", check=_problem)
"""The record of each family, by the name that a configuration's `[model] family = "..."` gives."""

AnyFamily = Annotated[Family, FAMILIES]
"""A field of this type is read from plain data as the record of the family that it names."""

PRESETS = Registry[Preset]("subfleet.presets", "preset", check=_callable)
"""The published networks, by the name that a configuration's `[model] preset = "..."` gives."""


def preset(name: str, *, input_shape: tuple[int, ...], class_count: int, norm: PublishedNorm = "batch") -> Family:
    """The settings of a published network.

    Args:
        name: a name in `PRESETS`.
        input_shape: as in `Preset`.
        class_count: as in `Preset`.
        norm: as in `Preset`.

    Raises:
        ConfigError: there is no such network, or the numbers are out of range.
    """
    return PRESETS.named(name)(input_shape=input_shape, class_count=class_count, norm=norm)
