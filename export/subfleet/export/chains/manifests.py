"""What the manifest of a chain says: its links, its programs, and the values of all of them together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from subfleet.export.chains.cutting import LinkModule, OperatorModule
from subfleet.export.chains.planning import (
    LinkBytes,
    add_gaps,
    base_bytes,
    memory_of,
    peak_bytes,
    reading_bytes,
    runtime_bytes,
)
from subfleet.export.chains.supernets import Cut
from subfleet.export.chains.values import chain_evaluation, chain_training, of_role
from subfleet.export.chains.writing import WrittenStep
from subfleet.export.memory.values import value_bytes
from subfleet.export.requests import ProgramRequest, TrainRequest
from subfleet.export.versions import tool_versions
from subfleet.protocol.chains import Chain, Link, LinkOperator, program_name
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import PieceProgram, ProgramManifest, ValueInfo
from subfleet.protocol.schema import canonical_json

__all__ = ["manifest_of"]

_Steps = Mapping[str, WrittenStep]
"""A piece's programs, by the name of the step."""


def manifest_of(cut: Cut, written: Mapping[str, _Steps], request: ProgramRequest) -> ProgramManifest:
    """The manifest of a chain.

    Args:
        cut: the supernet.
        written: the programs of each piece that the target can run.
        request: what is asked for.

    Raises:
        ExportError: the target can run no operator of a choice.
    """
    chain = _ChainBuilder(cut=cut, written=written, request=request).chain()
    # A manifest is read as a whole, and tells thousands of values.
    read_bytes = reading_bytes(len(canonical_json(_manifest(cut, written, request, chain))))
    return _manifest(cut, written, request, replace(chain, fixed_bytes=chain.fixed_bytes + read_bytes))


def _manifest(cut: Cut, written: Mapping[str, _Steps], request: ProgramRequest, chain: Chain) -> ProgramManifest:
    programs = {program_name(piece, kind): step for piece, steps in written.items() for kind, step in steps.items()}
    inputs, outputs = _values(cut, request)
    fixed = [link.operators[0].needs for link in chain.links if not link.open]
    packings = [packing for step in programs.values() for packing in step.program.memory.packings]
    return ProgramManifest(
        program_id=request.program_id,
        target=request.target,
        purpose="train" if isinstance(request, TrainRequest) else "evaluate",
        batch_size=request.batch_size,
        inputs=inputs,
        outputs=outputs,
        memory=memory_of(chain, _batch(inputs), packings),
        max_abs_diff=max(step.max_abs_diff for step in programs.values()),
        versions=tool_versions(request.target),
        operators=tuple(sorted({name for needs in fixed for name in needs})),
        chain=chain,
        pieces=tuple(
            PieceProgram(name=name, inputs=step.step.inputs, outputs=step.step.outputs)
            for name, step in programs.items()
        ),
    )


def _values(cut: Cut, request: ProgramRequest) -> tuple[tuple[ValueInfo, ...], tuple[ValueInfo, ...]]:
    """Inputs and outputs of all programs together."""
    if not isinstance(request, TrainRequest):
        return chain_evaluation(cut.module, cut.sample, cut.pieces.gives, request.objective)
    parts = [
        ".".join(filter(None, (link.name, operator.name)))
        for link in cut.links
        for operator in link.operators
        if next(operator.module.parameters(), None) is not None
    ]
    return chain_training(cut.module, cut.sample, cut.pieces.gives, parts, request.objective, request.optimiser)


def _batch(inputs: Iterable[ValueInfo]) -> tuple[ValueInfo, ...]:
    return tuple(value for value in inputs if value.role in ("input", "label", "sample_mask"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChainBuilder:
    """Tells what the links of a supernet are to a device."""

    cut: Cut
    written: Mapping[str, _Steps]
    request: ProgramRequest

    def chain(self) -> Chain:
        least = [
            self._read_bytes(index) if self._always_reads(link) else 0 for index, link in enumerate(self.cut.links)
        ]
        later = [*accumulate(reversed(least), initial=0)][-2::-1]
        links = []
        for index, link in enumerate(self.cut.links):
            around = LinkBytes(
                trains=self._trains,
                later_links=later[index],
                all_links=sum(least),
                summed=isinstance(self.request, TrainRequest) and self.request.accumulate,
            )
            links.append(self._link(link, self._read_bytes(index), around))
        target, (inputs, _) = self.request.target, _values(self.cut, self.request)
        return Chain(
            links=tuple(links),
            fixed_bytes=base_bytes(target) + value_bytes(_batch(inputs)),
            runtime_bytes=tuple(
                (name, runtime_bytes(target, [*steps.values()])) for name, steps in self.written.items()
            ),
        )

    @property
    def _trains(self) -> bool:
        return isinstance(self.request, TrainRequest)

    def _read_bytes(self, index: int) -> int:
        """Of what a link keeps for the way back."""
        return value_bytes([self.cut.pieces.reads[index]]) if self._trains else 0

    def _always_reads(self, link: LinkModule) -> bool:
        return all(self.cut.pieces.names[link.name, operator.name] for operator in link.operators)

    def _link(self, link: LinkModule, read_bytes: int, around: LinkBytes) -> Link:
        names = {operator.name: self.cut.pieces.names[link.name, operator.name] for operator in link.operators}
        operators = tuple(
            self._operator(operator, names[operator.name], read_bytes, around)
            for operator in link.operators
            if not names[operator.name] or names[operator.name] in self.written
        )
        if not operators:
            raise ExportError(
                f"the target {self.request.target!r} can run no operator of the choice {link.name!r}; give it others"
            )
        return Link(name=link.name, operators=operators)

    def _operator(self, operator: OperatorModule, piece: str, read_bytes: int, around: LinkBytes) -> LinkOperator:
        parameters, steps = list(operator.module.parameters()), self.written.get(piece, {})
        gradient_bytes = sum(part.nbytes for part in parameters) if self._trains else 0
        states = of_role(steps["update"].step.inputs, "optimiser_state") if "update" in steps else ()
        return LinkOperator(
            name=operator.name,
            piece=piece,
            prefix=operator.prefix,
            weight_bytes=sum(part.nbytes for part in (*parameters, *operator.module.buffers())),
            state_bytes=value_bytes(states),
            kept_bytes=add_gaps((read_bytes if piece else 0) + gradient_bytes),
            peak_bytes=add_gaps(peak_bytes(steps, around)),
            forward_macs=self._macs(operator),
            needs=tuple(sorted({name for step in steps.values() for name in step.program.operators})),
        )

    def _macs(self, operator: OperatorModule) -> int:
        macs = 0
        for name, part in operator.module.named_parameters():
            decl = self.cut.network.tensors[f"{operator.prefix}{name}"]
            macs += part.numel() * decl.positions if decl.role in ("weight", "residual") else 0
        return macs
