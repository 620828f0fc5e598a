"""The lineage of the networks of a run as plain data: each network's parent, the map of its weights, and rounds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.protocol.bounds import checked
from subfleet.protocol.identifiers import NetworkId
from subfleet.protocol.limits import Amount
from subfleet.protocol.schema import ADDED_LATER


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A network with its parent's settings starts with its parent's weights."""

    TYPE: ClassVar[str] = "copied"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Replicated:
    """A wider or deeper network starts by computing the same as its parent.

    Attributes:
        sources: pairs of an axis of another size and the parent's index that each of its indices copies, sorted by
            axis; see `subfleet.elastic.replication.Replication`.
        noise: standard deviation of noise that is added to copies, as a fraction of that of their tensor; at least 0.
            With noise the network only approximates its parent.
        divided: which weights are divided among copies: the weights that "read" them, which preserves the function of
            the network; or those that "compute" them, as FedTrans' text says, which does not.
        shares: pairs of an axis and the share of each of its indices among the copies of one index, sorted by axis;
            empty for equal shares. See `subfleet.elastic.replication.Replication`.

    Raises:
        ValueError: the noise is below 0 or not a number.
    """

    TYPE: ClassVar[str] = "replicated"
    sources: tuple[tuple[str, tuple[int, ...]], ...] = ()
    noise: Amount = 0.0
    divided: Literal["read", "compute"] = field(default="read", metadata=ADDED_LATER)
    shares: tuple[tuple[str, tuple[float, ...]], ...] = field(default=(), metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A larger network has its parent's weights at the front of every axis and in its blocks; all else is drawn.

    A slice of the parent is then the same slice of the larger network.
    """

    TYPE: ClassVar[str] = "placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A path of its parent, a supernet, starts with the weights of its operators."""

    TYPE: ClassVar[str] = "chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A network starts with weights that are drawn from the run's seed."""

    TYPE: ClassVar[str] = "drawn"


Inheritance = Copied | Replicated | Placed | Chosen | Drawn
"""The map from a parent's weights to the first weights of a network."""


def _check_rounds(id: str, born_round: int, retired_round: int | None) -> Iterator[str]:  # noqa: A002 - the field's name
    if retired_round is not None and retired_round < born_round:
        yield f"network {id!r} was retired in round {retired_round}, but appeared in round {born_round}"


def _check_map(record: "Lineage") -> Iterator[str]:
    if record.parent is None and not isinstance(record.map, Drawn):
        yield f"network {record.id!r} has no parent, so its weights must be drawn"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_rounds, _check_map)
class Lineage:
    """One network of a run.

    Attributes:
        id: unique in the run; empty for the first network.
        config: its settings.
        parent: id of the network that it grew from; None if there is none.
        map: map from its parent's weights to its first weights.
        born_round: round after which it appeared; 0 for the first network.
        retired_round: round after which it was retired; None while it is in use.
        reason: the change to its parent and the reason, for people; may be empty.
        members: networks of clients that it is the union of; its submodels are then only these.

    Raises:
        ProtocolError: the id is not valid in file names.
        ValueError: the rounds contradict each other, or a network without a parent inherits weights.
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
