"""Modules with several inputs: a sample holds them one after another."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from subfleet.elastic.families.records.fields import Counts
from subfleet.protocol.bounds import checked
from subfleet.protocol.limits import Count


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class InputPart:
    """One of several inputs of a module.

    Attributes:
        shape: of one sample.
        symbols: size of its vocabulary if it has tokens; 0 if it has numbers.
    """

    shape: Counts
    symbols: Count = 0


Inputs = Mapping[str, InputPart]
"""The inputs of a module by their names, in the order in which a sample holds them; empty for a module with one."""


def count_numbers(inputs: Inputs) -> int:
    """The length of a sample that holds all inputs."""
    return sum(math.prod(part.shape) for part in inputs.values())


def count_symbols(inputs: Inputs) -> int:
    """The size of the vocabulary of samples, which is 0 if any input has numbers."""
    return max(part.symbols for part in inputs.values()) if all(part.symbols for part in inputs.values()) else 0
