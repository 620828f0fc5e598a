"""Networks and weights of other runs, that a run begins with."""

from dataclasses import dataclass, field
from typing import Annotated

from subfleet.protocol.bounds import Length, checked
from subfleet.settings.parts import NO_PART

__all__ = ["FIRST", "FirstWeights", "ModelOf"]

FIRST = "first"
"""Stands for the network that a run begins with, whose id is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class ModelOf:
    """A network of a run that is over, which takes the place of a run's model.

    Attributes:
        run: the name of that run's folder beside the run's own, or a path to it, which has a slash in it.
        network: its id, "first" for the one that the run began with; or, of those that were in use when that run ended,
            "smallest", "middle" or "largest" by the numbers that they hold. Of two in the middle the smaller.
        weights: it begins with the weights that it had when that run ended; else with first ones of its own.
    """

    run: Annotated[str, Length(least=1)]
    network: Annotated[str, Length(least=1)] = "largest"
    weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """Weights that a run begins with in place of drawn ones.

    Attributes:
        file: a safetensors file as runs leave it, `model.safetensors`.
        sha256: of its bytes: with others, it would be another run.
        network: which of that file's networks they are of; empty for the one that its run began with.
    """

    file: str = field(metadata=NO_PART)
    sha256: str
    network: str = ""
