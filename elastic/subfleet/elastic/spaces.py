"""Spaces of submodels: all width rates with all depths, and spaces of genes that are too large to list."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from types import MappingProxyType
from typing import Literal

from subfleet.elastic.axes import Axis, AxisKind
from subfleet.elastic.cost import Costs
from subfleet.elastic.index_sets import count_indices, named_sets, tied_sets
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, IndexSet

__all__ = ["uniform_space"]

_MOST_DEPTHS = 256
_SCALED: frozenset[AxisKind] = frozenset({"channel", "squeeze", "head_dim", "ffn", "embed"})
"""Kinds of axes that a width rate cuts. All heads are kept and become narrower, as in HeteroFL's transformers."""


def uniform_space(network: Network, rates: Sequence[float]) -> tuple[Architecture, ...]:
    """Every width rate with every depth: nested prefixes of all scaled axes, and the first blocks of each section.

    An axis keeps `ceil(rate * size)` indices, rounded up to whole groups, or its fewest. Rates with the same widths
    give one submodel, named after the largest rate. A name such as "w1/2 d2-1" contains the rate and the number of
    blocks of each section, also of blocks that are always kept. If the sections have more than 256 combinations of
    depths, they shrink together: the k-th depth keeps the same fraction of each section's blocks. If a block with
    different input and output axes is left out, both axes keep the size of the shorter.

    Args:
        network: the network.
        rates: widths relative to the full network, from 0.001 to 1.

    Returns:
        Distinct submodels in ascending order of parameters.

    Raises:
        ConfigError: there is no rate, or a rate is out of range.
    """
    fractions = sorted(_fractions(rates), reverse=True)
    distinct: dict[object, Architecture] = {}
    for architecture in itertools.chain.from_iterable(_list_depths(network, rate) for rate in fractions):
        distinct.setdefault((architecture.axes, architecture.blocks), architecture)
    architectures = [*distinct.values()]
    sizes = [parameters for parameters, _ in Costs(network).of(architectures)]
    return tuple(
        architecture
        for _, architecture in sorted(zip(sizes, architectures, strict=True), key=lambda pair: (pair[0], pair[1].name))
    )


def _fractions(rates: Sequence[float]) -> set[Fraction]:
    if not rates or not all(0.001 <= rate <= 1 for rate in rates):
        raise ConfigError(f"width rates are {list(rates)}, but must be at least one number from 0.001 to 1")
    # 0.1 means one tenth: as a float, 0.1 * 30 is slightly above 3 for ceil().
    return {Fraction(rate).limit_denominator(1000) for rate in rates}


def _depths(network: Network) -> list[tuple[int, ...]]:
    """Numbers of kept skippable blocks of each section."""
    most = [len(names) for names in _sections(network)]
    if math.prod(count + 1 for count in most) <= _MOST_DEPTHS:
        return list(itertools.product(*(range(count + 1) for count in most)))
    steps = max(most)
    return [tuple(math.ceil(Fraction(step * count, steps)) for count in most) for step in range(steps + 1)]


def _sections(network: Network) -> list[list[str]]:
    """Names of the skippable blocks of each section."""
    skippable = {block.name for block in network.blocks}
    return [[name for name in names if name in skippable] for names in network.sections]


def _list_depths(network: Network, rate: Fraction) -> Iterator[Architecture]:
    """The submodels of one width and every depth."""
    sections = _sections(network)
    always = [len(names) - len(own) for names, own in zip(network.sections, sections, strict=True)]
    cut = [axis for axis in network.axes.values() if axis.kind in _SCALED]
    axes = dict(named_sets(cut, [_scaled_size(axis, rate) for axis in cut]))
    for depth in _depths(network):
        blocks = tuple(name for names, count in zip(sections, depth, strict=True) for name in names[:count])
        counts = "-".join(str(count + more) for count, more in zip(depth, always, strict=True))
        yield Architecture(
            axes=tied_sets(network, axes, blocks),
            blocks=blocks,
            name=f"w{rate} d{counts}" if counts else f"w{rate}",
            network=network.id,
        )


def _scaled_size(axis: Axis, rate: Fraction) -> int:
    least = max(rate * axis.size, Fraction(axis.least))
    return min(axis.size, math.ceil(least / axis.granularity) * axis.granularity)


Genes = tuple[int, ...]
"""One submodel of a space: the index of the chosen option of each gene."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a gene.

    Attributes:
        axes: axes that it cuts, with their index sets, sorted by name; the gene's other axes are kept whole.
        blocks: skippable blocks that it keeps.
    """

    axes: tuple[tuple[str, IndexSet], ...] = ()
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gene:
    """One open decision of a space.

    Attributes:
        name: what it decides on.
        axes: axes that this gene alone sizes.
        blocks: blocks that this gene alone keeps or drops.
        options: in ascending order; each keeps at least the elements of the previous one.
    """

    name: str
    axes: tuple[str, ...]
    blocks: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """All combinations of the options of genes: the space (w, S) of dynamic model selection (section 3.1).

    Options are in ascending order, so a submodel of larger genes contains the submodel of smaller ones. If a dropped
    block has different input and output axes, both keep the size of the shorter.

    Attributes:
        network: the network.
        genes: in the order of `Genes`.
        owners: axes that only skippable blocks use and none passes on, with these blocks. Without these blocks the axis
            is unused, and not named.
    """

    network: Network = field(repr=False)
    genes: tuple[Gene, ...]
    owners: Mapping[str, frozenset[str]] = field(repr=False)

    @property
    def smallest(self) -> Genes:
        """The genes of the submodel that all others contain."""
        return (0,) * len(self.genes)

    @property
    def largest(self) -> Genes:
        """The genes of the submodel that contains all others."""
        return tuple(len(gene.options) - 1 for gene in self.genes)

    def count(self) -> int:
        """Number of combinations. Some may be the same submodel, when a gene sizes a dropped block."""
        return math.prod(len(gene.options) for gene in self.genes)

    def canonical(self, genes: Genes) -> Genes:
        """The smallest genes of the same submodel."""
        blocks = self._list_blocks(genes)
        return self._canonical(genes, blocks, self._sets(genes, blocks))

    def _canonical(self, genes: Genes, blocks: frozenset[str], axes: tuple[tuple[str, IndexSet], ...]) -> Genes:
        """For genes that size unused or tied axes, the first option that keeps enough."""
        tied, sets = {axis for chain in self.network.tied_axes(blocks) for axis in chain}, dict(axes)
        return tuple(
            option
            if gene.blocks or not any(axis in tied or self._unused(axis, blocks) for axis in gene.axes)
            else self._find_option(gene, sets, blocks)
            for gene, option in zip(self.genes, genes, strict=True)
        )

    def architecture(self, genes: Genes) -> Architecture:
        """The submodel of these genes. Equal submodels have equal architectures and names, whatever their genes."""
        blocks = self._list_blocks(genes)
        axes = self._sets(genes, blocks)
        return Architecture(
            axes=axes,
            blocks=tuple(block.name for block in self.network.blocks if block.name in blocks),
            name=".".join(map(str, self._canonical(genes, blocks, axes))),
            network=self.network.id,
        )

    def genes_of(self, architecture: Architecture) -> Genes:
        """The genes of a submodel.

        Raises:
            ConfigError: the submodel is not in this space.
        """
        sets, blocks = dict(architecture.axes), frozenset(architecture.blocks)
        genes = tuple(self._find_option(gene, sets, blocks) for gene in self.genes)
        own = self.architecture(genes)
        if (own.axes, own.blocks, own.network) != (architecture.axes, architecture.blocks, architecture.network):
            raise ConfigError(f"submodel {architecture.name!r} is not in the search space; choose one of its submodels")
        return genes

    def holds(self, architecture: Architecture) -> bool:
        """Whether a submodel is in this space."""
        try:
            self.genes_of(architecture)
        except ConfigError:
            return False
        return True

    def random(self, rng: Random) -> Genes:
        """Draw each option uniformly."""
        return tuple(rng.randrange(len(gene.options)) for gene in self.genes)

    def spread(self, rng: Random) -> Genes:
        """Draw a submodel with all sizes about equally likely; independent draws of many genes are mostly medium.

        The genes keep about the same fraction of their options, or one that rises or falls along the network.
        """
        share, slope, noise = rng.random(), rng.uniform(-1, 1), rng.uniform(0, 0.6)
        span = max(len(self.genes) - 1, 1)
        shares = (share + slope * (index / span - 0.5) + rng.uniform(-noise, noise) for index in range(len(self.genes)))
        most = self.largest
        return tuple(round(min(max(own, 0), 1) * last) for own, last in zip(shares, most, strict=True))

    def corner(self, rng: Random) -> Genes:
        """Draw a submodel in which each gene is smallest or largest, with all sizes about equally likely.

        The submodel with the most parameters within a budget is near one of these: memory goes to the genes that give
        the most parameters for it.
        """
        share = rng.random()
        return tuple(last if rng.random() < share else 0 for last in self.largest)

    def enumerate(self, limit: int = 200_000) -> Iterator[Genes]:
        """Every distinct submodel once, from the smallest to the largest.

        Raises:
            ConfigError: there are more combinations than `limit`.
        """
        if self.count() > limit:
            raise ConfigError(
                f"the search space has {self.count()} combinations, but at most {limit} can be listed; use fewer rates"
            )
        every = itertools.product(*(range(len(gene.options)) for gene in self.genes))
        return (genes for genes in every if self.canonical(genes) == genes)

    def _list_blocks(self, genes: Genes) -> frozenset[str]:
        return frozenset(
            name for gene, index in zip(self.genes, genes, strict=True) for name in gene.options[index].blocks
        )

    def _unused(self, axis: str, blocks: frozenset[str]) -> bool:
        owners = self.owners.get(axis)
        return owners is not None and owners.isdisjoint(blocks)

    def _sets(self, genes: Genes, blocks: frozenset[str]) -> tuple[tuple[str, IndexSet], ...]:
        """The index sets of a submodel of these genes."""
        chosen = (pair for gene, index in zip(self.genes, genes, strict=True) for pair in gene.options[index].axes)
        return tied_sets(self.network, {axis: own for axis, own in chosen if not self._unused(axis, blocks)}, blocks)

    def _find_option(self, gene: Gene, sets: Mapping[str, IndexSet], blocks: frozenset[str]) -> int:
        """The index of the first option with these blocks that keeps enough of each used axis."""
        used = [axis for axis in gene.axes if not self._unused(axis, blocks)]
        own_blocks = blocks.intersection(gene.blocks)
        needed = [count_indices(self.network, sets, axis) for axis in used]
        for index, option in enumerate(gene.options):
            own = dict(option.axes)
            enough = all(
                count_indices(self.network, own, axis) >= least for axis, least in zip(used, needed, strict=True)
            )
            if own_blocks == set(option.blocks) and enough:
                return index
        return 0


def search_space(
    network: Network,
    rates: Sequence[float] = (),
    *,
    width: Literal["network", "section", "axis"] = "axis",
    depth: Literal["whole", "section", "block"] = "block",
    kernels: bool = False,
) -> SearchSpace:
    """The search space of a network.

    The paper's space, with its ratio set S as `rates`, has a width for each axis and a depth for each block: a layer's
    ratio of 0 drops its block, any other ratio sizes the axes of the block.

    Args:
        network: the network.
        rates: widths relative to the full network, from 0.001 to 1; if empty, every whole number of groups.
        width: "axis" sizes each axis by itself, and the axes of one skippable block together, with the block itself if
            `depth` is "block"; "section" sizes all axes of one kind in a section together; "network" sizes all by one
            rate, as in HeteroFL, and leaves numbers of heads alone.
        depth: "block" keeps or drops each skippable block, "section" keeps the first blocks of each section, "whole"
            keeps all.
        kernels: also cut kernels to their centres, each by itself, down to a side of 3.

    Raises:
        ConfigError: a rate is out of range.
    """
    fractions = _fractions(rates) if rates else None
    owners = _owners(network)
    genes: list[Gene] = []
    for name, axes in _groups(network, width, owners).items():
        sizes = [named_sets(axes, chosen) for chosen in _sizes(axes, fractions)]
        options = tuple(Option(axes=chosen) for chosen in sizes)
        blocks = owners.get(axes[0].name, frozenset()) if width == "axis" and depth == "block" else frozenset()
        if len(blocks) == 1:
            options = (Option(), *(Option(axes=chosen, blocks=tuple(blocks)) for chosen in sizes))
        genes.append(_gene(name, [axis.name for axis in axes], options))
    genes += _depth_genes(network, depth, frozenset(name for gene in genes for name in gene.blocks))
    genes += [_kernel_gene(axis) for axis in network.axes.values() if kernels and axis.kind == "kernel"]
    return SearchSpace(network=network, genes=tuple(genes), owners=MappingProxyType(owners))


def _gene(name: str, axes: Sequence[str], options: tuple[Option, ...]) -> Gene:
    return Gene(name=name, axes=tuple(axes), blocks=options[-1].blocks, options=options)


def _owners(network: Network) -> dict[str, frozenset[str]]:
    """Axes that only skippable blocks use and none passes on, with these blocks."""
    passed = {axis for block in network.blocks for axis in (block.reads, block.gives)}
    users: dict[str, set[str | None]] = {}
    for decl in network.tensors.values():
        for axis in network.list_axes(decl):
            users.setdefault(axis, set()).add(decl.part)
    return {
        axis: frozenset(block for block in blocks if block is not None)
        for axis, blocks in users.items()
        if None not in blocks and axis not in passed
    }


def _groups(network: Network, width: str, owners: Mapping[str, frozenset[str]]) -> dict[str, list[Axis]]:
    """Axes that are sized together, by the name of their gene."""
    groups: dict[str, list[Axis]] = {}
    for axis in network.axes.values():
        if axis.kind in _SCALED or (axis.kind == "head" and width != "network"):
            own = owners.get(axis.name, frozenset())
            by_axis = next(iter(own)) if len(own) == 1 else axis.name
            by_section = f"{axis.name.partition('.')[0]} {axis.kind}"
            name = {"network": "width", "section": by_section, "axis": by_axis}[width]
            groups.setdefault(name, []).append(axis)
    return groups


def _sizes(axes: Sequence[Axis], fractions: set[Fraction] | None) -> list[tuple[int, ...]]:
    """Sizes of axes that are sized together, from the smallest to the largest."""
    if fractions is None:
        most = max(axis.size // axis.granularity for axis in axes)
        fractions = {Fraction(step, most) for step in range(1, most + 1)}
    return list(dict.fromkeys(tuple(_scaled_size(axis, rate) for axis in axes) for rate in sorted(fractions)))


def _depth_genes(network: Network, depth: str, decided: frozenset[str]) -> Iterator[Gene]:
    if depth == "whole":
        whole = Option(blocks=tuple(block.name for block in network.blocks))
        yield _gene("depth", (), (whole,))
    elif depth == "section":
        for section, names in enumerate(_sections(network)):
            options = tuple(Option(blocks=tuple(names[:count])) for count in range(len(names) + 1))
            yield _gene(f"section{section} depth", (), options)
    else:
        for block in network.blocks:
            if block.name not in decided:
                yield _gene(block.name, (), (Option(), Option(blocks=(block.name,))))


def _kernel_gene(axis: Axis) -> Gene:
    sizes = [axis.size, *range(axis.size - axis.granularity, 2, -axis.granularity)]
    options = tuple(Option(axes=named_sets([axis], [size])) for size in reversed(sizes))
    return _gene(axis.name, (axis.name,), options)
