"""Cuts a supernet into links (its choices and the modules between them), and finds the pieces that compute them.

Each piece is written once, for all links with equal structure and shapes.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.elastic.families.choice_block import ChoiceBlock
from subfleet.export.chains.link_values import LinkValues
from subfleet.export.steps.layout import weights_of
from subfleet.export.steps.shape_run import run_on_shapes
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorModule:
    """An operator of a link.

    Attributes:
        name: name of the operator; empty in a link without a choice.
        prefix: prefix of the module's tensor names in the supernet.
        module: a module of the supernet, or a sequence of them.
    """

    name: str
    prefix: str
    module: nn.Module

    @property
    def is_identity(self) -> bool:
        """Whether the operator returns its input."""
        return type(self.module) is nn.Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModule:
    """A link: the operators of a choice, or all modules between two choices."""

    name: str
    operators: tuple[OperatorModule, ...]

    @property
    def is_choice(self) -> bool:
        """Whether the link is a choice."""
        return bool(self.operators[0].name)


def links_of(module: nn.Module, choices: Collection[str]) -> tuple[LinkModule, ...]:
    """Cut a supernet into links, from the input to the logits.

    Args:
        module: its choices are nested in `nn.Sequential` only.
        choices: their names, which are the paths of their modules.

    Raises:
        ExportError: a choice lies elsewhere, or two links share a tensor.
    """
    links: list[LinkModule] = []
    for is_open, group in groupby(_flatten(module, "", choices), key=lambda part: part[0] in choices):
        if is_open:
            links += [_choice(path, part) for path, part in group]
        else:
            number = sum(not link.is_choice for link in links)
            row = OperatorModule(
                name="", prefix="", module=_sequence([(path.split("."), part) for path, part in group])
            )
            links.append(LinkModule(name=f"fixed{number}", operators=(row,)))
    _check_own_tensors(links)
    return tuple(links)


def _flatten(module: nn.Module, path: str, choices: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that run one after the other: each choice, and as much as possible between choices."""
    inside = any(name.startswith(f"{path}." if path else "") for name in choices)
    if path in choices or not inside:
        yield path, module
    elif type(module).forward is nn.Sequential.forward:
        for name, child in module.named_children():
            yield from _flatten(child, f"{path}.{name}" if path else name, choices)
    else:
        raise ExportError(
            f"the module {path!r} ({type(module).__name__}) has choices inside, but a supernet's choices must lie in "
            "nn.Sequential; move them there"
        )


def _choice(path: str, module: nn.Module) -> LinkModule:
    if not isinstance(module, ChoiceBlock):
        raise ExportError(f"the module {path!r} is {type(module).__name__}, but a choice must be a ChoiceBlock")
    operators = tuple(
        OperatorModule(name=name, prefix=f"{path}.{name}.", module=operator)
        for name, operator in module.named_children()
    )
    return LinkModule(name=path, operators=operators)


def _sequence(parts: Sequence[tuple[Sequence[str], nn.Module]]) -> nn.Sequential:
    """Nest modules that run one after the other, each at its own path."""
    children = OrderedDict[str, nn.Module]()
    for name, group in groupby(parts, key=lambda part: part[0][0]):
        below = [(path[1:], module) for path, module in group]
        children[name] = below[0][1] if not below[0][0] else _sequence(below)
    return nn.Sequential(children)


def _check_own_tensors(links: Sequence[LinkModule]) -> None:
    owners: dict[int, str] = {}
    for link in links:
        for operator in link.operators:
            own = {id(part) for part in (*operator.module.parameters(), *operator.module.buffers())}
            other = next((owners[key] for key in own if key in owners), None)
            if other is not None:
                raise ExportError(
                    f"the links {other!r} and {link.name!r} share a tensor, but the links of a chain must not; give "
                    "each its own"
                )
            owners |= dict.fromkeys(own, link.name)


_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.layout)
_NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""Values that stand for themselves: two modules that call the same function do the same."""
_OF_STATES = frozenset({
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_is_full_backward_hook",
})  # fmt: skip
"""PyTorch's attributes that define how weights are read and written."""
_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""PyTorch's lists of parameters in recurrent layers."""


def _structure_of(module: nn.Module) -> Hashable:
    """Return a value that is equal for modules that compute the same from the same weights.

    Unknown values are never equal. It consists of the classes of all layers, their attributes, their parameters'
    shapes, and constants.
    """
    carried = set(module.state_dict(keep_vars=True))
    return tuple((path, _layer(layer, path, carried)) for path, layer in module.named_modules(remove_duplicate=False))


def _layer(layer: nn.Module, path: str, carried: set[str]) -> Hashable:
    left_out = _OF_STATES | _OF_PARAMETERS if isinstance(layer, nn.RNNBase) else _OF_STATES
    own = {name: value for name, value in vars(layer).items() if name not in left_out}
    own["_modules"] = {name: child is None for name, child in layer._modules.items()}  # noqa: SLF001 - PyTorch's
    own["_buffers"] = {
        name: _describe_buffer(value) if f"{path}.{name}" in carried or (not path and name in carried) else value
        for name, value in layer._buffers.items()  # noqa: SLF001 - likewise
    }
    return type(layer), _describe(own)


def _describe_buffer(buffer: Tensor | None) -> Any:
    """Describe a floating-point buffer, which is part of the weights; a buffer of another type is a constant."""
    if buffer is None or not buffer.is_floating_point():
        return buffer
    return ("buffer", tuple(buffer.shape), buffer.dtype)


def _describe(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return type(value), tuple((_describe(key), _describe(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_describe, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_describe, value))
    return _describe_leaf(value)


def _describe_leaf(value: Any) -> Hashable:
    if isinstance(value, nn.Parameter):
        return "parameter", tuple(value.shape), value.dtype, value.requires_grad
    if type(value) is Tensor:
        plain = value.detach().cpu().contiguous().reshape(-1)
        return "constant", tuple(value.shape), value.dtype, plain.view(torch.uint8).numpy().tobytes()
    if isinstance(value, _NAMED):
        return value
    return (type(value), value) if isinstance(value, _PLAIN) else _UniqueValue(value)


class _UniqueValue:
    """A value with unknown behaviour: it is only equal to itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UniqueValue) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A module that computes one or more links.

    Attributes:
        name: name of the first operator that it computes.
        module: module of that operator.
        values: its inputs and outputs.
        last: whether the loss follows.
    """

    name: str
    module: nn.Module
    values: LinkValues
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """All pieces of a chain.

    Attributes:
        pieces: the pieces, ordered by the first operator that they compute.
        names: the piece of each link and operator; empty if an operator returns its input.
        reads: the input of each link.
        gives: the output of the last link.
    """

    pieces: tuple[Piece, ...]
    names: Mapping[tuple[str, str], str]
    reads: tuple[ValueInfo, ...]
    gives: ValueInfo


def pieces_of(links: Sequence[LinkModule], sample: ValueInfo, *, training: bool, in_parts: bool) -> Pieces:
    """Determine the inputs and outputs of a supernet's links, and which operators share a piece.

    Args:
        links: from the input to the logits.
        sample: the input of the first link.
        training: whether they are trained.
        in_parts: whether their batch is one of several micro-batches.

    Raises:
        ExportError: a module cannot be run, draws random numbers or has a frozen parameter; or the operators of a
            choice have different output shapes.
    """
    every: dict[Hashable, Piece] = {}
    names: dict[tuple[str, str], str] = {}
    read, reads = sample, list[ValueInfo]()
    for index, link in enumerate(links):
        reads.append(read)
        last, shapes = index == len(links) - 1, set[tuple[int, ...]]()
        for operator in link.operators:
            if operator.is_identity and not last and link.is_choice:
                names[link.name, operator.name] = ""
                shapes.add(read.shape)
                continue
            key = (_structure_of(operator.module), read, last)
            if key not in every:
                name = ".".join(filter(None, (link.name, operator.name)))
                every[key] = _piece(name, operator, read, last=last, training=training, in_parts=in_parts)
            names[link.name, operator.name] = every[key].name
            shapes.add(every[key].values.gives.shape)
        if len(shapes) > 1:
            raise ExportError(
                f"the operators of {link.name!r} give the shapes {sorted(shapes)}, but all operators of a choice must "
                "give the same"
            )
        read = ValueInfo(name="features", dtype="F32", shape=shapes.pop(), role="features")
    return Pieces(pieces=tuple(every.values()), names=names, reads=tuple(reads), gives=read)


def _piece(
    name: str, operator: OperatorModule, read: ValueInfo, *, last: bool, training: bool, in_parts: bool
) -> Piece:
    module = operator.module
    shapes = run_on_shapes(module, read, training=training, in_parts=in_parts)
    frozen = [parameter for parameter, tensor in module.named_parameters() if not tensor.requires_grad]
    if len(shapes.output_shapes) > 1 or shapes.random_shapes or (training and frozen):
        raise ExportError(
            f"the link {name!r} has {len(shapes.output_shapes)} outputs, {len(shapes.random_shapes)} layers that draw "
            f"random numbers and {len(frozen)} parameters that are not trained, but a link must have one output, draw "
            "no random numbers and train all parameters; leave out exits and dropout"
        )
    gives = ValueInfo(name="given", dtype="F32", shape=shapes.output_shapes[0], role="features")
    values = LinkValues(reads=read, gives=replace(gives, role="logits") if last else gives, weights=weights_of(module))
    return Piece(name=name, module=module, values=values, last=last)
