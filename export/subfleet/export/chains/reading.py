"""The chain of a program for PyTorch: its body is the request, from which the steps of its pieces are made."""

from collections.abc import Mapping

from subfleet.export.chains.supernets import cut_of, steps_of
from subfleet.export.steps import Step
from subfleet.export.targets.torch import read_torch_request
from subfleet.protocol.chains import program_name
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import PieceProgram, Program

__all__ = ["read_torch_pieces"]


def read_torch_pieces(program: Program) -> Mapping[str, Step]:
    """The steps of a chain's pieces, by their names in the manifest; raises as `read_torch_step`."""
    request = read_torch_request(program)
    steps = {
        program_name(piece.name, kind): step
        for piece in cut_of(request).pieces.pieces
        for kind, step in steps_of(piece, request).items()
    }
    own = [PieceProgram(name=name, inputs=step.inputs, outputs=step.outputs) for name, step in steps.items()]
    odd = sorted(piece_program.name for piece_program in {*own} ^ {*program.manifest.pieces})
    if odd:
        raise ProtocolError(f"the programs of a chain are not those of its manifest, first {odd[0]!r:.80}")
    return steps
