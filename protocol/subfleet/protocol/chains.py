"""Chains: training programs of supernets in pieces, which a device runs one after another along a drawn path.

A supernet is a row of links. Each link reads what the one before it gives; a link with several operators is a choice,
and a batch goes through one of them (FedorAS, section 3.1). Places of equal shape share the pieces that compute them.
On the way there a link's input alone is kept; on the way back its piece computes the link again and gives gradients;
the optimiser's step is a piece of its own, as clipping looks at the gradients of the whole path.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated

from subfleet.protocol.bounds import Each, Length, checked
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.limits import Count

Step = str
"""What one program of a piece does: "forward", "backward" or "update"; the last link has "evaluate" for "forward"."""


def name_program(piece: str, step: Step) -> str:
    """Name a piece's program in the body of its chain."""
    return f"{piece}/{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LinkOperator:
    """One way to compute a link.

    Attributes:
        name: of the operator; empty in a link without a choice.
        piece: that computes it; empty where it passes on what it reads.
        prefix: what the names of its tensors begin with in the supernet; the piece's own names follow.
        weight_bytes: of its parameters and buffers.
        state_bytes: of its optimiser states.
        kept_bytes: of its input, which is kept for the way back, and of its gradients, both of one batch.
        peak_bytes: the most that one of its programs takes at once, what it gives included.
        forward_macs: multiplications of one sample's forward pass.
        needs: operators that the device's runtime must have for it, sorted; empty where it is not told.
    """

    name: str
    piece: str
    prefix: str
    weight_bytes: Count = 0
    state_bytes: Count = 0
    kept_bytes: Count = 0
    peak_bytes: Count = 0
    forward_macs: Count = 0
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Link:
    """One part of a chain.

    Attributes:
        name: of its choice; of another link any name that no other has.
        operators: one, or those of the choice that the program's target can run.
    """

    name: str
    operators: Annotated[tuple[LinkOperator, ...], Each(key=attrgetter("name"))]

    @property
    def open(self) -> bool:
        """Whether it is a choice."""
        return bool(self.operators and self.operators[0].name)


def _check_pieces(links: tuple[Link, ...], runtime_bytes: tuple[tuple[str, int], ...]) -> Iterator[str]:
    pieces = {name for name, _ in runtime_bytes}
    for link in links:
        if not link.operators:
            yield f"link {link.name!r:.80} has no operators, but must have one or more"
        if unknown := sorted({one.piece for one in link.operators} - pieces - {""}):
            yield f"link {link.name!r:.80} names the piece {unknown[0]!r:.80}, but must name one of runtime_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_pieces)
class Chain:
    """The links of a chain and their memory; its programs are separate.

    Attributes:
        links: from the input to the loss.
        fixed_bytes: of the runtime and of one batch, whatever is drawn.
        runtime_bytes: what the runtime takes for the programs of each piece, by the piece's name.
    """

    links: Annotated[tuple[Link, ...], Length(least=1), Each(key=attrgetter("name"))]
    fixed_bytes: Count
    runtime_bytes: tuple[tuple[str, Count], ...]

    def kept(self, choices: Mapping[str, Collection[str]]) -> "tuple[Link, ...]":
        """Restrict the links to a subspace's operators; a choice that is not named keeps all.

        Raises:
            ProtocolError: it names an operator that the chain lacks, or leaves a choice without any.
        """
        found = tuple(_restrict(link, choices) for link in self.links)
        lacking = sorted(choices.keys() - {link.name for link in self.links if link.open})
        empty = [link.name for link in found if not link.operators]
        if lacking or empty:
            raise ProtocolError(f"a subspace keeps operators of {(lacking or empty)[0]!r:.80} that the chain lacks")
        return found

    def room(self, links: Sequence[Link]) -> "ChainRoom":
        """Compute the memory that a subspace takes on every path, and that of the paths."""
        pieces = {one.piece for link in links for one in link.operators}
        held_bytes = self.fixed_bytes + sum(size_bytes for name, size_bytes in self.runtime_bytes if name in pieces)
        held_bytes += sum(one.weight_bytes + one.state_bytes for link in links for one in link.operators)
        return ChainRoom(links=tuple(links), held_bytes=held_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRoom:
    """The memory of a subspace's paths: shared memory, what each link keeps, and the largest program.

    Attributes:
        links: of the subspace.
        held_bytes: whatever is drawn: runtime, batch, and the weights and optimiser states of all operators.
    """

    links: tuple[Link, ...]
    held_bytes: int

    def within(self, memory_bytes: int) -> "tuple[tuple[Link, ...], int]":
        """Select the operators that fit a memory limit, and compute the bytes that those of a path may keep together.

        Operators with the largest programs are left out first, until the leanest path of the others has room; so the
        most that any program of them takes is set aside once.

        Returns:
            The links, and what is left; no links where not even the leanest path has room.
        """
        for peak_bytes in sorted({one.peak_bytes for link in self.links for one in link.operators}, reverse=True):
            links = tuple(_find_leanest(link, peak_bytes) for link in self.links)
            left_bytes = memory_bytes - self.held_bytes - peak_bytes
            if all(link.operators for link in links) and _sum_least_bytes(links) <= left_bytes:
                return links, left_bytes
        return (), 0

    @property
    def least_peak_bytes(self) -> int:
        """Planned peak of the leanest path: with less, nothing can be trained."""
        peaks = sorted({one.peak_bytes for link in self.links for one in link.operators})
        found = []
        for peak_bytes in peaks:
            links = tuple(_find_leanest(link, peak_bytes) for link in self.links)
            if all(link.operators for link in links):
                found.append(self.held_bytes + peak_bytes + _sum_least_bytes(links))
        return min(found)

    @property
    def evaluation_peak_bytes(self) -> int:
        """Planned peak of evaluating any path: each link is released before the next one."""
        return self.held_bytes + max(one.kept_bytes + one.peak_bytes for link in self.links for one in link.operators)

    @property
    def largest_peak_bytes(self) -> int:
        """Planned peak if every link draws the operator that keeps most, and one has the largest program."""
        kept_bytes = sum(max(one.kept_bytes for one in link.operators) for link in self.links)
        return self.held_bytes + kept_bytes + max(one.peak_bytes for link in self.links for one in link.operators)


def _restrict(link: Link, choices: Mapping[str, Collection[str]]) -> Link:
    if not link.open or link.name not in choices:
        return link
    selected = choices[link.name]
    own = {one.name for one in link.operators}
    if not own.issuperset(selected):
        raise ProtocolError(
            f"a subspace keeps {sorted(set(selected) - own)[0]!r:.80}, which link {link.name!r:.80} lacks"
        )
    return Link(name=link.name, operators=tuple(one for one in link.operators if one.name in selected))


def _find_leanest(link: Link, peak_bytes: int) -> Link:
    return Link(name=link.name, operators=tuple(one for one in link.operators if one.peak_bytes <= peak_bytes))


def _sum_least_bytes(links: Sequence[Link]) -> int:
    return sum(min(one.kept_bytes for one in link.operators) for link in links)
