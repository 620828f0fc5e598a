"""Chains: training programs of supernets in pieces, which a device runs one after another along a drawn path.

A supernet is a sequence of links; each link reads the output of the previous one. A link with several operators is
a choice, and a batch goes through one of them (FedorAS, section 3.1). Links of equal shape share their pieces. The
forward pass keeps only the input of each link; in the backward pass its piece computes the link again and returns
gradients. The optimiser's step is a separate piece, as clipping needs the gradients of the whole
path.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated

from subfleet.protocol.bounds import Each, Length, checked
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.limits import Count

Step = str
"""The purpose of a program: "forward", "backward" or "update"; the last link has "evaluate" instead of "forward"."""


def name_program(piece: str, step: Step) -> str:
    """Name a piece's program in the body of its chain."""
    return f"{piece}/{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LinkOperator:
    """One way to compute a link.

    Attributes:
        name: of the operator; empty in a link without a choice.
        piece: the piece that computes it; empty if it returns its input.
        prefix: prefix of its tensors' names in the supernet; the piece's names follow.
        weight_bytes: size of its parameters and buffers.
        state_bytes: size of its optimiser states.
        kept_bytes: size of its input, which is kept for the backward pass, and of its gradients, for one batch.
        peak_bytes: peak memory of its largest program, including outputs.
        forward_macs: multiplications of one sample's forward pass.
        needs: operators that the device's runtime must have, sorted; empty if unknown.
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
        name: of its choice; for other links any unique name.
        operators: a single one, or those of the choice that the program's target can run.
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
        if unknown := sorted({operator.piece for operator in link.operators} - pieces - {""}):
            yield f"link {link.name!r:.80} names the piece {unknown[0]!r:.80}, but must name one of runtime_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_pieces)
class Chain:
    """The links of a chain and their memory, without the programs.

    Attributes:
        links: from the input to the loss.
        fixed_bytes: memory of the runtime and of one batch, for any path.
        runtime_bytes: memory of the runtime for the programs of each piece, by the piece's name.
    """

    links: Annotated[tuple[Link, ...], Length(least=1), Each(key=attrgetter("name"))]
    fixed_bytes: Count
    runtime_bytes: tuple[tuple[str, Count], ...]

    def restrict(self, choices: Mapping[str, Collection[str]]) -> "tuple[Link, ...]":
        """Restrict the links to a subspace's operators; a choice that is not named keeps all.

        Raises:
            ProtocolError: the subspace has an operator that the chain lacks, or a choice without operators.
        """
        links = tuple(_restrict(link, choices) for link in self.links)
        unknown = sorted(choices.keys() - {link.name for link in self.links if link.open})
        empty = [link.name for link in links if not link.operators]
        if unknown or empty:
            raise ProtocolError(f"a subspace keeps operators of {(unknown or empty)[0]!r:.80} that the chain lacks")
        return links

    def plan_memory(self, links: Sequence[Link]) -> "ChainMemory":
        """Plan the memory of a subspace's paths."""
        operators = [operator for link in links for operator in link.operators]
        pieces = {operator.piece for operator in operators}
        held_bytes = self.fixed_bytes + sum(size_bytes for name, size_bytes in self.runtime_bytes if name in pieces)
        held_bytes += sum(operator.weight_bytes + operator.state_bytes for operator in operators)
        return ChainMemory(links=tuple(links), held_bytes=held_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainMemory:
    """The memory of a subspace's paths: what all paths share, what each link keeps, and the largest program.

    Attributes:
        links: of the subspace.
        held_bytes: for any path: runtime, batch, and the weights and optimiser states of all operators.
    """

    links: tuple[Link, ...]
    held_bytes: int

    def select_operators(self, memory_bytes: int) -> "tuple[tuple[Link, ...], int]":
        """Select the operators that fit a memory limit, and compute how much a path's operators may keep together.

        Operators with the largest programs are left out until the leanest path of the others fits; the largest program
        of these is then reserved once.

        Returns:
            The links, and the remaining bytes; no links if not even the leanest path fits.
        """
        for links, peak_bytes in reversed(list(self._restrict_programs())):
            left_bytes = memory_bytes - self.held_bytes - peak_bytes
            if _sum_least_bytes(links) <= left_bytes:
                return links, left_bytes
        return (), 0

    @property
    def least_peak_bytes(self) -> int:
        """Planned peak of the leanest path: with less memory nothing can be trained."""
        return min(self.held_bytes + peak + _sum_least_bytes(links) for links, peak in self._restrict_programs())

    @property
    def evaluation_peak_bytes(self) -> int:
        """Planned peak of evaluating any path: each link is released before the next one."""
        operators = (operator for link in self.links for operator in link.operators)
        return self.held_bytes + max(operator.kept_bytes + operator.peak_bytes for operator in operators)

    @property
    def largest_peak_bytes(self) -> int:
        """Planned peak if every link draws the operator that keeps most, and one has the largest program."""
        kept_bytes = sum(max(operator.kept_bytes for operator in link.operators) for link in self.links)
        peaks = (operator.peak_bytes for link in self.links for operator in link.operators)
        return self.held_bytes + kept_bytes + max(peaks)

    def _restrict_programs(self) -> Iterator[tuple[tuple[Link, ...], int]]:
        """List limits on programs from the smallest, each with the links whose operators keep within it."""
        for peak_bytes in sorted({operator.peak_bytes for link in self.links for operator in link.operators}):
            links = tuple(_limit_programs(link, peak_bytes) for link in self.links)
            if all(link.operators for link in links):
                yield links, peak_bytes


def _restrict(link: Link, choices: Mapping[str, Collection[str]]) -> Link:
    if not link.open or link.name not in choices:
        return link
    selected = choices[link.name]
    if unknown := sorted(set(selected) - {operator.name for operator in link.operators}):
        raise ProtocolError(f"a subspace keeps {unknown[0]!r:.80}, which link {link.name!r:.80} lacks")
    return Link(name=link.name, operators=tuple(operator for operator in link.operators if operator.name in selected))


def _limit_programs(link: Link, peak_bytes: int) -> Link:
    operators = (operator for operator in link.operators if operator.peak_bytes <= peak_bytes)
    return Link(name=link.name, operators=tuple(operators))


def _sum_least_bytes(links: Sequence[Link]) -> int:
    return sum(min(operator.kept_bytes for operator in link.operators) for link in links)
