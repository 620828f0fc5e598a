"""Follows the operators of a module's run, and finds what each tensor dimension runs over."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subfleet.elastic.recording.cheap_products import compute_cheaply
from subfleet.elastic.recording.dimensions import Dim, keep_whole, make_dim, make_whole_dim, measure, resolve
from subfleet.elastic.recording.functions import get_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product or convolution of a run.

    Attributes:
        weight: name of the tensor of the module that is one of its factors; empty if both were computed.
        result: dimensions of the result.
        summed: dimensions that are summed.
        layer: path of the layer that computes it.
    """

    weight: str
    result: tuple[Dim, ...]
    summed: tuple[Dim, ...]
    layer: str


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An ATen operator that has just run.

    Attributes:
        follower: knows the dimensions of its arguments, and is told those of its results.
        name: name without overload, such as "convolution".
        args: positional arguments.
        kwargs: named arguments.
        out: its result.
    """

    follower: "DimensionFollower"
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any

    def get(self, position: int, name: str = "", default: Any = None) -> Any:
        """An argument by its position or its name."""
        return get_argument(self.args, self.kwargs, position, name, default)

    def dims(self, position: int) -> tuple[Dim, ...]:
        """The dimensions of a tensor argument."""
        return self.follower.dims_of(self.args[position])

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return list_tensors((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Tensor]:
        """All tensors among the results."""
        return list_tensors(self.out)

    @property
    def result(self) -> Tensor:
        """The only result, or the first one."""
        return self.outputs[0]

    def assign(self, dims: Sequence[Dim], tensor: Tensor | None = None) -> None:
        """Set the dimensions of a result, by default the first one."""
        self.follower.assign(self.result if tensor is None else tensor, dims)

    def keep_all_whole(self, reason: str) -> None:
        """Forbid to cut any dimension of the arguments and results."""
        for tensor in self.inputs:
            for dim in self.follower.dims_of(tensor):
                keep_whole(dim, reason)
        for tensor in self.outputs:
            self.assign([make_whole_dim(size, reason) for size in tensor.shape], tensor)


Rule = Callable[[Operation], None]
"""Ties the dimensions of an operator's arguments, and assigns those of its results."""


@dataclass(eq=False)
class DimensionFollower:
    """What is known about the tensors of a run.

    Attributes:
        rules: by operator name.
        kernels: names of the weights of convolutions whose kernels may be cut.
        layer: path of the running layer.
        products: the products so far.
        mixed: dimensions whose indices are mixed, for example by a norm: a submodel's results differ from the masked
            whole's.
        averaged: dimensions that are mixed only by means over all their indices, as in a layer norm: equally many
            copies of each index give the same.
    """

    rules: Mapping[str, Rule]
    kernels: frozenset[str] = frozenset()
    layer: str = ""
    products: list[Product] = field(default_factory=list)
    mixed: list[Dim] = field(default_factory=list)
    averaged: list[Dim] = field(default_factory=list)
    _dims: dict[int, tuple[Dim, ...]] = field(default_factory=dict)
    _weights: dict[int, str] = field(default_factory=dict)
    _computed: set[int] = field(default_factory=set)
    _alive: list[Tensor] = field(default_factory=list)

    def dims_of(self, tensor: Tensor) -> tuple[Dim, ...]:
        """The dimensions of a tensor; new ones for an unknown tensor."""
        if id(tensor) not in self._dims:
            self.assign(tensor, [make_dim(size) for size in tensor.shape])
        return self._dims[id(tensor)]

    def assign(self, tensor: Tensor, dims: Sequence[Dim]) -> None:
        """Set the dimensions of a tensor."""
        sizes = [measure(dim) for dim in dims]
        if sizes != list(tensor.shape):
            raise AssertionError(f"dimensions of {sizes} for a tensor of {list(tensor.shape)}")
        self._dims[id(tensor)] = tuple(tuple(dim) for dim in dims)
        self._alive.append(tensor)  # so that no other tensor gets its id

    def list_dims(self) -> Iterator[Dim]:
        """The dimensions of all tensors, in the order in which they were first seen."""
        return chain.from_iterable(self._dims.values())

    def name_weight(self, tensor: Tensor, name: str) -> None:
        """Name a tensor of the module, or a view of it."""
        self._weights[id(tensor)] = name
        self._alive.append(tensor)

    def find_weight(self, tensor: Tensor) -> str:
        """The name of the module's tensor that this one is, or is a view of; empty for a computed one."""
        return self._weights.get(id(tensor), "")

    def mark_computed(self, tensor: Tensor) -> None:
        """Note that a tensor is the input of the module, or depends on it."""
        self._computed.add(id(tensor))
        self._alive.append(tensor)

    def is_computed(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the input of the module."""
        return id(tensor) in self._computed

    def mark_attention(self, queries: Tensor, values: Tensor) -> None:
        """Note the heads and their width in attention, whose usual scale follows from the width."""
        heads, width = self.dims_of(queries)[1:-2][-1:], self.dims_of(queries)[-1]
        self.mixed.append(width)
        kinds = [*((dim, "head") for dim in heads), (width, "head_dim"), (self.dims_of(values)[-1], "head_dim")]
        for dim, kind in kinds:
            for leaf in resolve(dim):
                leaf.kind = leaf.kind or kind

    def follow(self, operation: Operation) -> None:
        """Apply the rule of an operator that has run; one without a rule keeps everything whole."""
        if any(self.is_computed(tensor) for tensor in operation.inputs):
            for tensor in operation.outputs:
                self.mark_computed(tensor)
        rule = self.rules.get(operation.name) or self.rules.get(_name_functional(operation.name))
        if rule is None:
            operation.keep_all_whole(f"the operator {operation.name} reads it")
            return
        rule(operation)

    def add_product(self, *factors: Tensor, result: Sequence[Dim], summed: Sequence[Dim]) -> None:
        """Note a product."""
        weight = next(filter(None, map(self.find_weight, factors)), "")
        self.products.append(Product(weight=weight, result=tuple(result), summed=tuple(summed), layer=self.layer))


class FollowingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a follower see each operator. Values do not matter, so that large products are not computed in full."""

    def __init__(self, follower: DimensionFollower) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._follower = follower

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first call loads PyTorch's compiler, which takes a second and 100 MB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.utils._python_dispatch.TorchDispatchMode`."""
        kwargs = kwargs or {}
        out = compute_cheaply(func, args, kwargs)
        self._follower.follow(Operation(self._follower, func.overloadpacket.__name__, tuple(args), kwargs, out))
        return out


def list_tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, also in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, (int, float, str)):
        return []  # nearly all arguments; to ask whether they are mappings takes longest
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in list_tensors(item)]


def _name_functional(name: str) -> str:
    """The name of the operator that does the same to a copy."""
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name
