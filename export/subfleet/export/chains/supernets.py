"""From a request to the links and pieces of its supernet, and to their steps."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.network import Network
from subfleet.export.chains.pieces import LinkModule, Piece, Pieces, links_of, pieces_of
from subfleet.export.chains.steps import evaluation_steps, training_steps
from subfleet.export.request_steps import sample_of
from subfleet.export.requests import ProgramRequest, TrainRequest
from subfleet.export.steps import Step
from subfleet.export.targets.torch import read_torch_request
from subfleet.protocol.chains import name_program
from subfleet.protocol.errors import ExportError, ProtocolError
from subfleet.protocol.programs import PieceProgram, Program, ValueInfo


def is_chained(request: ProgramRequest) -> bool:
    """Return whether a request is for a supernet: its submodel keeps several operators of a choice."""
    return not network_of(request.model).is_path(request.architecture)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A supernet cut into links and pieces."""

    network: Network
    module: nn.Module
    links: tuple[LinkModule, ...]
    pieces: Pieces
    sample: ValueInfo


def cut_of(request: ProgramRequest) -> Cut:
    """Cut the supernet of a request.

    Raises:
        ConfigError: the network or the submodel is not valid.
        ExportError: it cannot be cut, or a chain does not support the request.
    """
    _check_request(request)
    network = network_of(request.model)
    module = build_module(network, request.architecture)
    links = links_of(module, network.choices)
    sample = sample_of(network).value(request.batch_size)
    training = isinstance(request, TrainRequest)
    in_parts = isinstance(request, TrainRequest) and request.accumulate and not request.one_part
    pieces = pieces_of(links, sample, training=training, in_parts=in_parts)
    return Cut(network=network, module=module, links=links, pieces=pieces, sample=sample)


def _check_request(request: ProgramRequest) -> None:
    objective = request.objective
    unknown = [
        name
        for name, requested in (
            ("distillation", objective.distillation != "none"),
            ("a proximal term", objective.proximal),
            ("a class mask", objective.class_mask),
        )
        if requested
    ]
    if unknown:
        raise ExportError(
            f"the objective has {unknown[0]}, which chains of supernets do not support; leave it out, or train paths"
        )


def steps_of(piece: Piece, request: ProgramRequest) -> Mapping[str, Step]:
    """Return the steps of a piece for a request, by name."""
    if isinstance(request, TrainRequest):
        return training_steps(
            piece.module,
            piece.values,
            objective=request.objective,
            optimiser=request.optimiser,
            last=piece.last,
            in_parts=request.accumulate and not request.one_part,
        )
    return evaluation_steps(piece.module, piece.values, objective=request.objective, last=piece.last)


def read_torch_pieces(program: Program) -> Mapping[str, Step]:
    """Return the steps of a chain's pieces for PyTorch, by name in the manifest; errors as in `read_torch_step`."""
    request = read_torch_request(program)
    steps = {
        name_program(piece.name, kind): step
        for piece in cut_of(request).pieces.pieces
        for kind, step in steps_of(piece, request).items()
    }
    own = [PieceProgram(name=name, inputs=step.inputs, outputs=step.outputs) for name, step in steps.items()]
    odd = sorted(piece_program.name for piece_program in {*own} ^ {*program.manifest.pieces})
    if odd:
        raise ProtocolError(f"the programs of a chain differ from its manifest, first in {odd[0]!r:.80}")
    return steps
