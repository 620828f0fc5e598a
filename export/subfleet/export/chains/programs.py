"""Exports the chain of programs for a supernet."""

import logging
from collections.abc import Iterator, Mapping

from subfleet.export.chains.manifests import manifest_of
from subfleet.export.chains.pieces import Piece
from subfleet.export.chains.supernets import Cut, cut_of, steps_of
from subfleet.export.chains.writing import WrittenStep, write_step
from subfleet.export.preflight import explain_failure
from subfleet.export.requests import ProgramRequest
from subfleet.export.steps import SampleSpec
from subfleet.export.targets.torch import TARGET as TORCH
from subfleet.export.targets.torch import remove_names
from subfleet.protocol.chains import name_program
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import Program
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.tensors import Tensor, encode_container

logger = logging.getLogger(__name__)
_Written = Mapping[str, Mapping[str, WrittenStep]]
"""Programs by the names of their piece and their step."""


def write_chain(request: ProgramRequest) -> Program:
    """Export the training or evaluation program of a supernet, and verify each of its pieces.

    An operator that the target cannot run is left out of its link.

    Raises:
        ConfigError: the network or the submodel is not valid.
        ExportError: the target cannot compute a link by any operator, or a chain does not support the request.
    """
    program_id = request.program_id
    cut = cut_of(request)
    written = dict(_write_pieces(cut, request, program_id))
    return Program(manifest=manifest_of(cut, written, request), body=_body(request, written))


def _body(request: ProgramRequest, written: _Written) -> bytes:
    """Return the programs in a container; for PyTorch, which has none, the request."""
    if request.target == TORCH:
        return canonical_json(remove_names(request))
    bodies = {
        name_program(piece, kind): step.program.body for piece, steps in written.items() for kind, step in steps.items()
    }
    return encode_container(
        Tensor(name=name, dtype="U8", shape=(len(body),), data=body) for name, body in bodies.items()
    )


def _write_pieces(
    cut: Cut, request: ProgramRequest, program_id: str
) -> Iterator[tuple[str, Mapping[str, WrittenStep]]]:
    """Write the programs of each piece that the target can run; fixed links must be among them."""
    fixed = {cut.pieces.names[link.name, ""] for link in cut.links if not link.is_choice}
    for piece in cut.pieces.pieces:
        try:
            yield piece.name, _programs(piece, request, program_id)
        except ExportError as error:
            explained = _explain(error, piece, request)
            if piece.name in fixed:
                raise explained from error
            logger.warning("%s is left out of the supernet: %s", piece.name, explained)


def _programs(piece: Piece, request: ProgramRequest, program_id: str) -> Mapping[str, WrittenStep]:
    return {
        kind: write_step(step, kind, target=request.target, seed=f"{program_id}/{name_program(piece.name, kind)}")
        for kind, step in steps_of(piece, request).items()
    }


def _explain(error: ExportError, piece: Piece, request: ProgramRequest) -> ExportError:
    if request.target == TORCH:
        return error
    read = piece.values.reads
    sample = SampleSpec.of(read)
    return explain_failure(error, piece.module, sample, target=request.target, batch_size=request.batch_size)
