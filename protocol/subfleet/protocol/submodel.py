"""Submodel architectures: the part of an elastic network that a device trains.

A network declares its axes (classes of tied tensor dimensions) and its blocks in `subfleet.elastic`; an
`Architecture` lists the kept indices of each axis, the kept blocks and the kept operators of each choice. Axes and
choices that it does not name are kept whole.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, ClassVar

from subfleet.protocol.bounds import NAMED_ONCE, Condition, Each, Length, checked
from subfleet.protocol.limits import Count, Positive
from subfleet.protocol.schema import ADDED_LATER, canonical_json, from_plain, parse_json

__all__ = ["Architecture", "Centre", "Explicit", "Full", "IndexSet", "Prefix", "Roll", "parse_architecture"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Prefix:
    """The first `size` indices of an axis (HeteroFL, FjORD)."""

    TYPE: ClassVar[str] = "prefix"
    size: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Roll:
    """`size` indices from `start` on, wrapping around the end of the axis (FedRolex)."""

    TYPE: ClassVar[str] = "roll"
    start: Count
    size: Positive


def _are_indices(indices: tuple[int, ...]) -> bool:
    return min(indices) >= 0 and len(set(indices)) == len(indices)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Explicit:
    """The named indices, in this order, each once (Federated Dropout)."""

    TYPE: ClassVar[str] = "explicit"
    indices: Annotated[
        tuple[int, ...], Length(least=1), Condition(accepts=_are_indices, words="different numbers of 0 or more")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Centre:
    """The middle `size` indices of an axis: a 3x3 kernel is the centre of a 5x5 one (Once-for-all, section 3.2)."""

    TYPE: ClassVar[str] = "centre"
    size: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Every index of an axis."""

    TYPE: ClassVar[str] = "full"


IndexSet = Prefix | Roll | Explicit | Centre | Full


def _check_axes(axes: tuple[tuple[str, IndexSet], ...]) -> Iterator[str]:
    names = [name for name, _ in axes]
    if names != sorted(set(names)):
        yield f"axes are {names}, but must be sorted by name, each once"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_axes)
class Architecture:
    """One submodel of an elastic network.

    Attributes:
        axes: pairs of axis name and kept indices, sorted by name; other axes are whole.
        blocks: names of the kept skippable blocks, in network order. All other parts of a network are always kept.
        choices: pairs of choice name and kept operators, in network order; other choices keep all operators. One
            operator of each choice is a path, a network by itself; more are a subspace, from which a device draws paths
            (FedorAS, section 3.1).
        name: display name, such as "w1/2 d3"; not part of the id.
        network: id of the network within the run; empty for the run's first network. It is part of the id, so that
            programs, weights, cost estimates and refusals of different networks are never mixed up.
    """

    axes: tuple[tuple[str, IndexSet], ...] = ()
    blocks: Annotated[tuple[str, ...], Each()] = ()
    choices: Annotated[tuple[tuple[str, Annotated[tuple[str, ...], Length(least=1), Each()]], ...], NAMED_ONCE] = ()
    name: str = ""
    network: str = field(default="", metadata=ADDED_LATER)

    @property
    def architecture_id(self) -> str:
        """16 hexadecimal digits; equal submodels have equal ids, whatever their display names."""
        return _compute_id(self.axes, self.blocks, self.choices, self.network)

    def __lt__(self, other: "Architecture") -> bool:
        """Order by id."""
        return self.architecture_id < other.architecture_id

    def make_index_set(self, axis: str) -> IndexSet:
        """Return the kept indices of an axis; all if it is not named."""
        return dict(self.axes).get(axis, Full())


@lru_cache(maxsize=2**11)  # the server computes the ids of all written programs for each device
def _compute_id(
    axes: tuple[tuple[str, IndexSet], ...],
    blocks: tuple[str, ...],
    choices: tuple[tuple[str, tuple[str, ...]], ...],
    network: str,
) -> str:
    named = [network] if network else []
    return hashlib.sha256(canonical_json([axes, blocks, choices, *named])).hexdigest()[:16]


MAX_ARCHITECTURE_BYTES = 64 * 1024


def parse_architecture(text: str | bytes) -> Architecture:
    """Read a submodel from JSON, as messages carry it: `{"axes": [["stream", {"type": "prefix", "size": 8}]]}`.

    Raises:
        ProtocolError: the text is not a valid submodel.
    """
    payload = text.encode(errors="replace") if isinstance(text, str) else text
    return from_plain(Architecture, parse_json(payload, max_bytes=MAX_ARCHITECTURE_BYTES))
