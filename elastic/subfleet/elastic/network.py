"""The declaration of an elastic network as plain data: axes, skippable blocks, operator choices, and tensors."""

import math
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, replace
from functools import lru_cache
from itertools import chain, starmap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from subfleet.elastic.axes import (
    Axis,
    Dim,
    Factors,
    Sums,
    add_sums,
    check_indices,
    factor_sizes,
    factors_of,
    list_indices,
)
from subfleet.elastic.parts import Block, Cell, MatrixProduct, OperatorChoice
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Centre, Prefix

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Family", "Network", "Norm", "Role", "TensorDecl"]

Norm = Literal["group", "batch", "layer", "none"]
"""Kinds of norms; those of kind "batch" have running statistics."""

Places = Literal["sample", "token", "pixel"]
"""What a network predicts for: the whole sample, each token of a sequence, or each pixel of an image."""


class Family(Protocol):
    """The settings of a full network, as a frozen record of its family that does not import PyTorch.

    Its fields are the keys of a configuration's table `[model]`, beside `family`, its name.

    Attributes:
        TAG: "family", the key of the name in plain data.
        TYPE: name of the family.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    TAG: ClassVar[str]
    TYPE: ClassVar[str]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample, such as (channels, height, width)."""

    @property
    def class_count(self) -> int:
        """Number of outputs, at least 1: classes (at least 2), labels or numbers."""

    @property
    def norm(self) -> Norm:
        """Kind of norms."""

    @property
    def learnable_steps(self) -> bool:
        """Whether each skippable block adds a learnable multiple of its output (NeFL, section 3.1)."""

    @property
    def scaler(self) -> bool:
        """Whether a training submodel divides inputs of norms by its fraction of the axis (HeteroFL, section 3.2)."""

    def __hash__(self) -> int:
        """Equal settings have equal hashes."""

    def module(self) -> "nn.Module":
        """The whole network as a PyTorch module with `subfleet.elastic.recording.markers`, which is then recorded.

        PyTorch is imported when this is called.

        Raises:
            ConfigError: settings do not fit each other.
        """


Start = tuple[float, float] | bytes
"""First values of a tensor, see `TensorDecl`."""

Role = Literal["weight", "residual", "gain", "bias", "step", "embedding", "symbol", "mean", "variance"]

Identity = Literal["silent", "passing"]
"""The value of a tensor that makes its block the identity: 0, or weights that pass the input on."""

BUFFER_ROLES = frozenset({"mean", "variance"})
"""Roles of tensors that training measures instead of learning: the running statistics of norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDecl:
    """One tensor of the full network.

    Attributes:
        name: the same in the full network and in every submodel.
        shape: shape in the full network.
        axes: what each dimension is tied to.
        part: the skippable block or operator that owns it; None if it is always kept.
        role: "weight" of a layer (starts normal with variance 2 / fan-in), "residual" weight of the last layer of a
            block (starts at 0, so that every block starts as the identity), "gain" of a norm (starts at 1), "bias"
            (starts at 0), "step" of a block (starts at 1), "embedding" of symbols or positions in a stream
            that is normalised (starts normal with deviation 0.02), "symbol" embedded for layers without a norm (starts
            normal with deviation 1), running "mean" (starts at 0) or "variance" (starts at 1) of a norm.
        positions: number of positions of a sample at which it is applied: 1, or height times width of its output.
        start: its first values if they do not follow from its role: mean and standard deviation of normal ones, or the
            values themselves as little-endian float32.
        frozen: whether training never changes it.
        factors: of each dimension, see `subfleet.elastic.axes.factors_of`; follows from the others.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[Dim, ...]
    part: str | None
    role: Role
    positions: int = 1
    start: Start | None = None
    frozen: bool = False
    factors: tuple[Factors, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(starmap(factors_of, zip(self.axes, self.shape, strict=True))))

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in a submodel with these sizes of axes and sums."""
        return tuple([math.prod(factor_sizes(factors, sizes)) for factors in self.factors])


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShapes:
    """The sizes of a submodel: all that a family needs to build its module.

    Attributes:
        sizes: number of kept indices by axis and sum.
        tensors: shapes of its tensors by name, in network order.
        parts: its skippable blocks and operators.
    """

    sizes: Mapping[str, int]
    tensors: Mapping[str, tuple[int, ...]]
    parts: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The declaration of a network, from which maps, shapes, costs and search spaces are derived.

    Attributes:
        config: the settings.
        id: id among the networks of a run, which its submodels carry; empty for the first network.
        axes: axes by name.
        sums: dimensions that run over several outputs one after another.
        blocks: skippable blocks, in network order.
        cells: all blocks, including the blocks that every submodel keeps.
        choices: operator choices by name, in network order.
        tensors: tensors by name, in network order.
        products: products of computed values, for cost estimates.
        kept_of_norms: numbers that training keeps for each output of a norm: the norm's input and the activation's
            output, and a third if the activation needs its input, too.
        group_size: numbers of a norm that share a mean and a variance, for cost estimates.
        symbols: size of the vocabulary if inputs are tokens; 0 if they are numbers.
        identities: for blocks that do not start as the identity, the values of tensors that make their block the
            identity, by tensor name: the closing tensor is silent, or all layers and norms pass the input on.
    """

    config: Family
    id: str = ""
    axes: Mapping[str, Axis] = field(repr=False)
    sums: Sums = field(default_factory=lambda: MappingProxyType({}), repr=False)
    blocks: tuple[Block, ...] = field(repr=False)
    cells: tuple[Cell, ...] = field(default=(), repr=False)
    choices: Mapping[str, OperatorChoice] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    tensors: Mapping[str, TensorDecl] = field(repr=False)
    products: tuple[MatrixProduct, ...] = field(default=(), repr=False)
    kept_of_norms: int = field(default=2, repr=False)
    group_size: int = field(default=4, repr=False)
    symbols: int = field(default=0, repr=False)
    identities: Mapping[str, Identity] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def __hash__(self) -> int:
        """Everything else follows from these."""
        return hash((self.config, self.id))

    @property
    def sections(self) -> tuple[tuple[str, ...], ...]:
        """Names of the cells of each section."""
        sections = range(1 + max((cell.section for cell in self.cells), default=-1))
        return tuple(tuple(cell.name for cell in self.cells if cell.section == own) for own in sections)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts that a submodel can leave out: the skippable blocks, then the operators of each choice."""
        return (*(block.name for block in self.blocks), *chain(*(choice.parts for choice in self.choices.values())))

    def parts_of(self, architecture: Architecture) -> frozenset[str]:
        """The parts that a submodel keeps; the architecture is not checked."""
        if not self.choices:
            return frozenset(architecture.blocks)
        operators = (f"{name}.{own}" for name, names in self.operators_of(architecture).items() for own in names)
        return frozenset((*architecture.blocks, *operators))

    def operators_of(self, architecture: Architecture) -> dict[str, tuple[str, ...]]:
        """The operators that a submodel keeps of each choice, in network order; the architecture is not checked."""
        chosen = dict(architecture.choices)
        return {name: chosen.get(name, choice.operators) for name, choice in self.choices.items()}

    def is_path(self, architecture: Architecture) -> bool:
        """Whether a submodel is a single network: it keeps one operator of each choice."""
        return all(len(operators) == 1 for operators in self.operators_of(architecture).values())

    def full_architecture(self) -> Architecture:
        """The submodel that keeps everything."""
        return Architecture(blocks=tuple(block.name for block in self.blocks), name="full", network=self.id)

    def check(self, architecture: Architecture) -> None:
        """Check that an architecture is a submodel of this network.

        Raises:
            ConfigError: it belongs to another network; names an unknown axis, block, choice or operator; keeps indices
                that an axis lacks; splits a group; lists blocks or operators out of order; or leaves out a block
                without keeping the same indices of its input and output.
        """
        self._check_held(architecture)
        for tied in self.tied_axes(architecture.blocks):
            first, *others = (
                tuple(list_indices(architecture.make_index_set(name), self.axes[name].size)) for name in tied
            )
            differing = next((name for name, own in zip(tied[1:], others, strict=True) if own != first), None)
            if differing is not None:
                raise ConfigError(
                    f"a submodel leaves out blocks between the axes {tied[0]!r} and {differing!r}, but keeps different "
                    "indices of them; keep the same indices of both, or keep the blocks"
                )

    def _check_held(self, architecture: Architecture) -> None:
        """Check that an architecture is a submodel of this network, or the part of it that an update moves."""
        if architecture.network != self.id:
            raise ConfigError(
                f"a submodel belongs to network {architecture.network!r:.80}, but was used with network {self.id!r}"
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
        names = [name for name, _ in architecture.choices]
        if names != [name for name in self.choices if name in names]:
            raise ConfigError(
                f"a submodel keeps operators of the choices {names}, but must name some of {[*self.choices]}, in order"
                if self.choices
                else f"a submodel keeps operators of the choices {names}, but this network has no choices"
            )
        for name, own in architecture.choices:
            every = self.choices[name].operators
            if list(own) != [operator for operator in every if operator in own]:
                raise ConfigError(
                    f"a submodel keeps the operators {list(own)} of choice {name!r}, but must name some of "
                    f"{list(every)}, in order"
                )

    def tied_axes(self, blocks: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """Chains of axes that must keep the same indices in a submodel with only these skippable blocks."""
        chains: list[list[str]] = []
        for block in self.blocks:
            if block.gives and block.name not in blocks:
                before = next((own for own in chains if block.reads in own), None)
                if before is None:
                    chains.append([block.reads, block.gives])
                else:
                    before.append(block.gives)
        return tuple(map(tuple, chains))

    def list_axes(self, decl: TensorDecl) -> tuple[str, ...]:
        """The axes that a tensor runs over, those of its sums included."""
        parts = chain(*(self.sums.get(str(factor), ((factor,),)) for factor in chain(*decl.factors)))
        return tuple(dict.fromkeys(factor for part in parts for factor in part if isinstance(factor, str)))

    def whole_sizes(self) -> dict[str, int]:
        """The sizes of all axes and sums in the full network."""
        return add_sums(self.sums, {name: axis.size for name, axis in self.axes.items()})

    def sizes(self, architecture: Architecture) -> dict[str, int]:
        """Number of indices by axis and sum that a submodel keeps, or the part that an update moves, as in `shapes`.

        Raises:
            ConfigError: the architecture names what this network lacks, or splits a group.
        """
        self._check_held(architecture)
        kept = {name: len(list_indices(index_set, self.axes[name].size)) for name, index_set in architecture.axes}
        return add_sums(self.sums, {name: kept.get(name, axis.size) for name, axis in self.axes.items()})

    def shapes(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a submodel's tensors, in network order; or of a part that an update moves.

        Such a part may have whole axes on both sides of a missing block, unlike a submodel.

        Raises:
            ConfigError: the architecture names what this network lacks, or splits a group.
        """
        return dict(_compute_shapes(self, architecture))

    def local(self, architecture: Architecture) -> LocalShapes:
        """The sizes of a submodel.

        Raises:
            ConfigError: the architecture is not a submodel of this network.
        """
        self.check(architecture)
        return LocalShapes(
            sizes=self.sizes(architecture), tensors=self.shapes(architecture), parts=self.parts_of(architecture)
        )

    def size_of(self, architecture: Architecture) -> Architecture:
        """The submodel of the same size at the front of every axis; programs and costs depend on nothing else.

        A subspace has the size of the whole supernet, because its program chains whichever operators are drawn.

        Raises:
            ConfigError: the architecture is not a submodel of this network.
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
        """Number of parameters of a submodel, running statistics included.

        Raises:
            ConfigError: the architecture is not a submodel of this network.
        """
        return sum(math.prod(shape) for shape in self.shapes(architecture).values())


@lru_cache(maxsize=64)  # server and devices ask for it several times with each task
def _compute_shapes(network: Network, architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """See `Network.shapes`."""
    sizes, parts = network.sizes(architecture), network.parts_of(architecture)
    return MappingProxyType(
        {
            decl.name: decl.local_shape(sizes)
            for decl in network.tensors.values()
            if decl.part is None or decl.part in parts
        }
    )
