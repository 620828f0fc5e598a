"""A supernet's module cut into links: its choices, and what lies between them."""

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

__all__ = ["LinkModule", "OperatorModule", "Piece", "Pieces", "links_of", "pieces_of", "structure_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorModule:
    """One way to compute a link.

    Attributes:
        name: of the operator; empty in a link without a choice.
        prefix: what comes before the module's own names of tensors in the supernet.
        module: the supernet's own, or a row of them.
    """

    name: str
    prefix: str
    module: nn.Module

    @property
    def is_identity(self) -> bool:
        """Whether it passes on what it reads."""
        return type(self.module) is nn.Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModule:
    """One link: the operators of a choice, or all modules between two choices."""

    name: str
    operators: tuple[OperatorModule, ...]

    @property
    def is_choice(self) -> bool:
        """Whether it is a choice."""
        return bool(self.operators[0].name)


def links_of(module: nn.Module, choices: Collection[str]) -> tuple[LinkModule, ...]:
    """Cut a supernet into links, from the input to the logits.

    Args:
        module: choices lie in it by themselves or in `nn.Sequential`, however deep.
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
    """The modules that run one behind another, a choice by itself, and as much as goes between two of them in one."""
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
    """Modules one behind another, each at its own path."""
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
                    f"the links {other!r} and {link.name!r} share a tensor, but a chain's links have none in common; "
                    "give each its own"
                )
            owners |= dict.fromkeys(own, link.name)


_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.layout)
_NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)
"""What stands for itself: two places that call the same function do the same."""
_OF_STATES = frozenset(
    {
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_is_full_backward_hook",
    }
)
"""Attributes of PyTorch's that say how weights are read and written."""
_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Of its recurrent layers, lists of their own parameters."""


def structure_of(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same of the same weights; of what is not known to be equal, never.

    It is told from the classes of all layers, their attributes, their parameters' shapes, and constants.
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
    """A buffer that travels with the weights where it holds numbers; one of another type is a constant."""
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
    """Something of which it is not known what it does: it is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UniqueValue) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A module that computes links.

    Attributes:
        name: of the first place that it computes.
        module: of that place.
        values: that it reads and gives.
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
        pieces: in the order of their first places.
        names: the piece of each place, by link and operator; empty where an operator passes on what it reads.
        reads: what each link reads.
        gives: what the last link gives.
    """

    pieces: tuple[Piece, ...]
    names: Mapping[tuple[str, str], str]
    reads: tuple[ValueInfo, ...]
    gives: ValueInfo


def pieces_of(links: Sequence[LinkModule], sample: ValueInfo, *, training: bool, in_parts: bool) -> Pieces:
    """Find out what a supernet's links read and give, and which of their places are alike.

    Args:
        links: from the input to the logits.
        sample: what the first one reads.
        training: whether they are to be trained.
        in_parts: whether their batch is one of several micro-batches.

    Raises:
        ExportError: a module cannot be run so, draws random numbers or has a parameter that is not trained; or the
            operators of a choice give different shapes.
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
            key = (structure_of(operator.module), read, last)
            if key not in every:
                name = ".".join(filter(None, (link.name, operator.name)))
                every[key] = _piece(name, operator, read, last=last, training=training, in_parts=in_parts)
            names[link.name, operator.name] = every[key].name
            shapes.add(every[key].values.gives.shape)
        if len(shapes) > 1:
            raise ExportError(
                f"the operators of {link.name!r} give the shapes {sorted(shapes)}, but those of a choice must all give "
                "the same"
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
            f"random numbers and {len(frozen)} parameters that are not trained, but one of a chain gives one tensor, "
            "draws none and trains all; leave out exits and dropout"
        )
    gives = ValueInfo(name="given", dtype="F32", shape=shapes.output_shapes[0], role="features")
    values = LinkValues(reads=read, gives=replace(gives, role="logits") if last else gives, weights=weights_of(module))
    return Piece(name=name, module=module, values=values, last=last)
