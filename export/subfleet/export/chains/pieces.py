"""The pieces of a chain: what computes its links, each once however many places of equal shape it has."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from subfleet.export.chains.cutting import LinkModule, OperatorModule
from subfleet.export.chains.structure import structure_of
from subfleet.export.chains.values import LinkValues
from subfleet.export.steps.first_run import run_on_shapes
from subfleet.export.steps.layout import weights_of
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import ValueInfo

__all__ = ["Piece", "Pieces", "pieces_of"]


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
