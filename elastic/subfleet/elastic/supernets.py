"""Supernets: networks with a choice of operators at some places (FedorAS, section 3.1), and their paths."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture


@runtime_checkable
class Supernet(Protocol):
    """The settings of a supernet: a family's record that lists the operators of each block."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def operators(self) -> tuple[tuple[str, ...], ...]:
        """Operators of all blocks together, or of each block."""

    @property
    def of_blocks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Name and operators of each block."""


def count_choices(config: object) -> int:
    """The number of blocks with more than one operator; 0 for settings that are not those of a supernet."""
    return sum(len(own) > 1 for _, own in config.of_blocks) if isinstance(config, Supernet) else 0


def keep_operators(config: Supernet, kept: Mapping[str, tuple[str, ...]]) -> Any:
    """The same settings with fewer operators for some choices, by name; a choice with one operator is no choice."""
    return replace(config, operators=tuple(kept.get(name, own) for name, own in config.of_blocks))


def path_architecture(network: Network, operators: Sequence[str], *, name: str = "") -> Architecture:
    """The path with one operator for each choice of the network, in order.

    Raises:
        ConfigError: the number of operators differs, or a choice lacks its operator.
    """
    if len(operators) != len(network.choices):
        raise ConfigError(f"a path has {len(operators)} operators, but the network has {len(network.choices)} choices")
    chosen = tuple((choice, (operator,)) for choice, operator in zip(network.choices, operators, strict=True))
    architecture = replace(network.full_architecture(), choices=chosen, name=name)
    network.check(architecture)
    return architecture


def specialise_family(network: Network, path: Architecture) -> AnyFamily:
    """The settings of a path as a network of its own; names and shapes of its tensors are those of the path.

    Raises:
        ConfigError: the architecture is not a path of this network, or its family has no operators.
    """
    network.check(path)
    if not network.is_path(path):
        raise ConfigError(
            f"a submodel keeps the operators {dict(path.choices)}, but a path has exactly one of each choice"
        )
    if not isinstance(network.config, Supernet):
        raise ConfigError(f"family {network.config.TYPE!r} has no operators to choose from")
    family: AnyFamily = keep_operators(network.config, network.operators_of(path))
    return family
