"""A supernet's module cut into links: its choices, and what lies between them."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from subfleet.elastic.families.choice_block import ChoiceBlock
from subfleet.protocol.errors import ExportError

__all__ = ["LinkModule", "OperatorModule", "links_of"]


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
