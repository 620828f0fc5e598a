"""Where the networks of a run come from, as plain data: which network each grew from, by which map, and when."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.protocol.bounds import checked
from subfleet.protocol.identifiers import NetworkId
from subfleet.protocol.limits import Amount
from subfleet.protocol.schema import ADDED_LATER

__all__ = ["Chosen", "Copied", "Drawn", "Inheritance", "Lineage", "Placed", "Replicated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A network of its parent's settings begins with its parent's weights."""

    TYPE: ClassVar[str] = "copied"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Replicated:
    """A wider or deeper network begins as one that computes what its parent does.

    Attributes:
        sources: pairs of axis and the parent's index that each of its own indices copies, sorted by axis; those of the
            axes that differ in size. See `subfleet.elastic.replication.Replication`.
        noise: what is added to copies: its deviation as a fraction of that of the tensor that they are in, 0 or more.
            The network then computes what its parent does only nearly.
        divided: which weights are divided among copies: those that "read" them, which keeps what the network computes;
            or those that "compute" them, as FedTrans' text prints it, which does not.
        shares: pairs of axis and how much each of its indices counts among the copies of one, sorted by axis; none
            where all copies count alike. See `subfleet.elastic.replication.Replication`.

    Raises:
        ValueError: the noise is below 0 or no number.
    """

    TYPE: ClassVar[str] = "replicated"
    sources: tuple[tuple[str, tuple[int, ...]], ...] = ()
    noise: Amount = 0.0
    divided: Literal["read", "compute"] = field(default="read", metadata=ADDED_LATER)
    shares: tuple[tuple[str, tuple[float, ...]], ...] = field(default=(), metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A larger network has its parent's weights in front of every axis and in its blocks; all else is drawn.

    A slice of the parent is then the same slice of it.
    """

    TYPE: ClassVar[str] = "placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A path of its parent, a supernet, begins with the weights of the operators that it has of that."""

    TYPE: ClassVar[str] = "chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A network begins with first weights of its own, drawn from the run's seed."""

    TYPE: ClassVar[str] = "drawn"


Inheritance = Copied | Replicated | Placed | Chosen | Drawn
"""The map from a parent's weights to those that a network begins with."""


def _check_rounds(id: str, born_round: int, retired_round: int | None) -> Iterator[str]:  # noqa: A002 - the field's name
    if retired_round is not None and retired_round < born_round:
        yield f"network {id!r} was retired in round {retired_round}, but appeared in {born_round}"


def _check_map(record: "Lineage") -> Iterator[str]:
    if record.parent is None and not isinstance(record.map, Drawn):
        yield f"network {record.id!r} has no parent, so that its weights must be drawn"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_rounds, _check_map)
class Lineage:
    """One network of a run.

    Attributes:
        id: which no other network of the run ever has; empty for the one that it begins with.
        config: its settings, from which all else of it follows.
        parent: id of the network that it grew from; None where there is none.
        map: from its parent's weights to its own first ones.
        born_round: after whose aggregation it appeared; 0 for the one that the run begins with.
        retired_round: after whose aggregation it was given up; None where it is in use.
        reason: what of its parent was changed in it and why, for people; empty where there is nothing to tell.
        members: networks that clients bring, of which it is the union; its sizes are then theirs and no others.

    Raises:
        ProtocolError: the id is none; it stands in names of files.
        ValueError: the rounds contradict each other, or a network without a parent inherits.
    """

    id: NetworkId
    config: AnyFamily
    parent: str | None = None
    map: Inheritance = Drawn()
    born_round: int = 0
    retired_round: int | None = None
    reason: str = ""
    members: tuple[AnyFamily, ...] = field(default=(), metadata=ADDED_LATER)

    @property
    def living(self) -> bool:
        """Whether it is in use."""
        return self.retired_round is None
