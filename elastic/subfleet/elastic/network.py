"""What an elastic network consists of, as plain data: axes, skippable blocks, choices of operators, and tensors."""

import math
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from subfleet.elastic.axes import Axis, Dim, check_indices, kept_indices, local_size
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Centre, Prefix

if TYPE_CHECKING:
    from subfleet.elastic.families.blueprint import Blueprint

__all__ = [
    "BUFFER_ROLES",
    "Block",
    "Family",
    "Identity",
    "LocalShapes",
    "MatrixProduct",
    "Network",
    "Norm",
    "OperatorChoice",
    "Places",
    "Role",
    "Supernet",
    "TensorDecl",
    "get_predicted_places",
]


Norm = Literal["group", "batch", "layer", "none"]
"""Kinds of norms; those of kind "batch" have running statistics."""


Places = Literal["sample", "token", "pixel"]
"""What a network has outputs for: the whole sample, each token of a sequence, or each pixel of an image."""


class Family(Protocol):
    """The full network in the words of its family: a frozen record of its settings, which loads no PyTorch.

    Its fields stand in a configuration's table `[model]`, beside `family`, its name.

    Attributes:
        TAG: "family", the key of that name in plain data.
        TYPE: its name.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    TAG: ClassVar[str]
    TYPE: ClassVar[str]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """One sample without the batch, such as (channels, height, width)."""

    @property
    def class_count(self) -> int:
        """Number of outputs, 1 or more: classes, of which there are 2 at least, or labels, or numbers."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks of each section, 1 or more; the first of a section is always kept, the others are its `Block`s."""

    @property
    def norm(self) -> Norm:
        """Which kind of norms it has."""

    @property
    def learnable_steps(self) -> bool:
        """Each skippable block adds a learnable multiple of what it computes (NeFL, section 3.1)."""

    @property
    def scaler(self) -> bool:
        """While it trains, a submodel divides what enters a norm by its share of that axis (HeteroFL, section 3.2)."""

    def __hash__(self) -> int:
        """Equal settings have equal hashes."""

    def blueprint(self) -> "Blueprint":
        """How the network is built; whatever needs PyTorch is imported in here.

        Raises:
            ConfigError: settings do not fit each other.
        """


def get_predicted_places(family: Family) -> Places | None:
    """What networks of a family have outputs for, where its record says so as `PREDICTS`; None where it does not."""
    found: Places | None = getattr(family, "PREDICTS", None)
    return found


@runtime_checkable
class Supernet(Protocol):
    """The settings of a supernet: a family's record that says which operators each block has."""

    @property
    def open_choices(self) -> int:
        """How many blocks have more than one."""

    def with_operators(self, kept: Mapping[str, tuple[str, ...]]) -> Any:
        """The same record with these operators of some choices, by the choice's name; with one it is none any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the network that a submodel may leave out.

    Attributes:
        name: unique in its network; prefix of the names of its tensors.
        section: index of the section that it belongs to.
        reads: axis of what it reads, where it gives another one; empty where both are the same.
        gives: that axis. A submodel without the block passes on what it would have read, and so keeps of both the same.
    """

    name: str
    section: int
    reads: str = ""
    gives: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChoice:
    """A place of the network with alternative operators, of which a path has one (FedorAS, section 3.1).

    Attributes:
        name: unique in its network, and the path of its module.
        operators: their names, two or more, in the family's order.
    """

    name: str
    operators: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The operators' names among the parts of the network, which are the paths of their modules."""
        return tuple(f"{self.name}.{operator}" for operator in self.operators)


Role = Literal["weight", "residual", "gain", "bias", "step", "embedding", "symbol", "mean", "variance"]

Identity = Literal["silent", "passing"]
"""What makes a tensor's block the identity: that it is 0, or that it passes on what it is given."""

BUFFER_ROLES = frozenset({"mean", "variance"})
"""Of tensors that training measures instead of learning them: the running statistics of norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDecl:
    """One tensor of the full network.

    Attributes:
        name: the same in the full network and in every submodel.
        shape: in the full network.
        axes: what each dimension is tied to.
        part: the skippable block or the operator that owns it, or None if it is always kept.
        role: "weight" of a layer (starts normal with variance 2 / fan-in), "residual" weight of the last layer of a
            block (starts at 0, so that every block starts as the identity), "gain" of a norm (starts at 1), "bias"
            (starts at 0), "step" of a block (starts at 1), "embedding" of symbols or positions in a stream
            that is normalised (starts normal with deviation 0.02), "symbol" embedded for layers without a norm (starts
            normal with deviation 1), running "mean" (starts at 0) or "variance" (starts at 1) of a norm.
        positions: at how many places of one sample it is applied: 1, or height times width of what it computes.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[Dim, ...]
    part: str | None
    role: Role
    positions: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """A product of computed values with each other, such as of queries with keys, which no tensor's shape tells.

    Attributes:
        result: sizes of what one sample's product gives: names of axes, and sizes that are never cut.
        summed: sizes of what is summed over, in the same words.
        part: the skippable block or the operator that computes it, or None if it always is.
    """

    result: tuple[str | int, ...]
    summed: tuple[str | int, ...]
    part: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShapes:
    """How large a submodel is: all that a family needs to build its module.

    Attributes:
        sizes: how many indices it keeps, by axis.
        tensors: shape of each of its tensors, in network order.
        parts: the skippable blocks and the operators that it has.
    """

    sizes: Mapping[str, int]
    tensors: Mapping[str, tuple[int, ...]]
    parts: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The declaration that everything else is derived from.

    Attributes:
        config: what it was declared from.
        id: among the networks of a run, which its submodels carry; empty for the one that the run begins with.
        axes: by name.
        blocks: the skippable ones, in network order.
        choices: by name, in network order; a choice of one operator is none.
        tensors: by name, in network order.
        products: of computed values, for what they cost.
        kept_of_norms: how many numbers training keeps for each that a norm gives: its input and what the activation
            behind it gives; and where the activation needs what it was given, too, that is a third.
        group_size: how many numbers of a norm share a mean and a spread, for what these cost.
        symbols: how many there are, where inputs are tokens; 0 where they are numbers.
        other_sizes: sizes in its programs that neither its inputs nor its tensors show, such as the number of patches.
        identities: of tensors in blocks that do not start as the identity, what they are where their block is that, by
            name: of each such block what closes it is silent, or all its layers and norms pass on.
    """

    config: Family
    id: str = ""
    axes: Mapping[str, Axis] = field(repr=False)
    blocks: tuple[Block, ...] = field(repr=False)
    choices: Mapping[str, OperatorChoice] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    tensors: Mapping[str, TensorDecl] = field(repr=False)
    products: tuple[MatrixProduct, ...] = field(default=(), repr=False)
    kept_of_norms: int = field(default=2, repr=False)
    group_size: int = field(default=4, repr=False)
    symbols: int = field(default=0, repr=False)
    other_sizes: tuple[int, ...] = field(default=(), repr=False)
    identities: Mapping[str, Identity] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def __hash__(self) -> int:
        """By what everything else follows from."""
        return hash((self.config, self.id))

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all that a submodel may leave out: the skippable blocks, then the operators of each choice."""
        operators = (part for choice in self.choices.values() for part in choice.parts)
        return (*(block.name for block in self.blocks), *operators)

    def parts_of(self, architecture: Architecture) -> frozenset[str]:
        """Of these, what a submodel keeps; the architecture is not checked."""
        if not self.choices:
            return frozenset(architecture.blocks)
        operators = (f"{name}.{one}" for name, kept in self.operators_of(architecture).items() for one in kept)
        return frozenset((*architecture.blocks, *operators))

    def operators_of(self, architecture: Architecture) -> dict[str, tuple[str, ...]]:
        """The operators that a submodel keeps of each choice, in network order; the architecture is not checked."""
        kept = dict(architecture.choices)
        return {name: kept.get(name, choice.operators) for name, choice in self.choices.items()}

    def is_path(self, architecture: Architecture) -> bool:
        """Whether a submodel is a network by itself: of each choice it keeps one operator."""
        return all(len(kept) == 1 for kept in self.operators_of(architecture).values())

    def full_architecture(self) -> Architecture:
        """The submodel that keeps everything."""
        return Architecture(blocks=tuple(block.name for block in self.blocks), name="full", network=self.id)

    def check(self, architecture: Architecture) -> None:
        """Make sure that an architecture is a submodel of this network.

        Raises:
            ConfigError: it is of another network of the run, names an unknown axis, block, choice or operator, keeps
                indices that an axis lacks, splits a group of tied indices, lists its blocks or operators out of order,
                or leaves out a block without keeping the same of what it gives as of what it reads.
        """
        self._check_held(architecture)
        for tied in self.tied_axes(architecture.blocks):
            first, *others = (
                tuple(kept_indices(architecture.make_index_set(name), self.axes[name].size)) for name in tied
            )
            differing = next((name for name, kept in zip(tied[1:], others, strict=True) if kept != first), None)
            if differing is not None:
                raise ConfigError(
                    f"a submodel leaves out blocks between the axes {tied[0]!r} and {differing!r}, but keeps other "
                    "indices of the one than of the other; keep the same of both, or keep the blocks"
                )

    def _check_held(self, architecture: Architecture) -> None:
        """Make sure that an architecture is one of this network: a submodel, or what an update moves."""
        if architecture.network != self.id:
            raise ConfigError(
                f"a submodel is one of network {architecture.network!r:.80}, but was taken for one of {self.id!r}"
            )
        for name, index_set in architecture.axes:
            if name not in self.axes:
                raise ConfigError(f"a submodel names the axis {name!r}, but the network has {sorted(self.axes)}")
            check_indices(self.axes[name], index_set)
        order = [block.name for block in self.blocks]
        if list(architecture.blocks) != [name for name in order if name in architecture.blocks]:
            raise ConfigError(
                f"a submodel keeps the blocks {list(architecture.blocks)}, but must name some of {order}, in order"
            )
        self._check_choices(architecture)

    def _check_choices(self, architecture: Architecture) -> None:
        told, kept = [name for name, _ in architecture.choices], dict(architecture.choices)
        if told != [name for name in self.choices if name in kept]:
            raise ConfigError(
                f"a submodel keeps operators of the choices {told}, but must name some of {[*self.choices]}, in order"
                if self.choices
                else f"a submodel keeps operators of the choices {told}, but this network has no choices"
            )
        for name, own in architecture.choices:
            every = self.choices[name].operators
            if list(own) != [operator for operator in every if operator in own]:
                raise ConfigError(
                    f"a submodel keeps the operators {list(own)} of choice {name!r}, but must name some of "
                    f"{list(every)}, in order"
                )

    def tied_axes(self, blocks: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """Axes that keep the same indices in a submodel with these skippable blocks, as no block is between them."""
        chains: list[list[str]] = []
        for block in self.blocks:
            if block.gives and block.name not in blocks:
                before = next((chain for chain in chains if block.reads in chain), None)
                if before is None:
                    chains.append([block.reads, block.gives])
                else:
                    before.append(block.gives)
        return tuple(map(tuple, chains))

    def sizes(self, architecture: Architecture) -> dict[str, int]:
        """How many indices a submodel keeps, by axis; or a part that an update moves, as in `shapes`.

        Raises:
            ConfigError: the architecture names what this network lacks, or splits a group.
        """
        self._check_held(architecture)
        sizes = {name: axis.size for name, axis in self.axes.items()}
        sizes.update({name: len(kept_indices(index_set, sizes[name])) for name, index_set in architecture.axes})
        return sizes

    def shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a submodel's tensors, in network order; or of a part that an update moves.

        Such a part may have whole axes on both sides of a block that it lacks, which no submodel could pass on.

        Raises:
            ConfigError: the architecture names what this network lacks, or splits a group.
        """
        sizes = self.sizes(architecture)
        kept = self.parts_of(architecture)
        return {
            decl.name: tuple(local_size(dim, size, sizes) for size, dim in zip(decl.shape, decl.axes, strict=True))
            for decl in self.tensors.values()
            if decl.part is None or decl.part in kept
        }

    def local(self, architecture: Architecture) -> LocalShapes:
        """How large a submodel is.

        Raises:
            ConfigError: the architecture is no submodel of this network.
        """
        self.check(architecture)
        return LocalShapes(
            sizes=self.sizes(architecture), tensors=self.shapes(architecture), parts=self.parts_of(architecture)
        )

    def size_of(self, architecture: Architecture) -> Architecture:
        """The submodel of the same size that is at the front of every axis: all that programs and costs depend on.

        A subspace has the size of the whole supernet, whose program chains whatever is drawn.

        Raises:
            ConfigError: the architecture is no submodel of this network.
        """
        self.check(architecture)
        sizes = self.sizes(architecture)
        axes = tuple(
            (name, index_set if isinstance(index_set, Centre) else Prefix(size=sizes[name]))
            for name, index_set in architecture.axes
            if sizes[name] < self.axes[name].size
        )
        return replace(architecture, axes=axes, choices=architecture.choices if self.is_path(architecture) else ())

    def parameter_count(self, architecture: Architecture) -> int:
        """How many numbers a submodel holds, running statistics included.

        Raises:
            ConfigError: the architecture is no submodel of this network.
        """
        return sum(math.prod(shape) for shape in self.shapes(architecture).values())
