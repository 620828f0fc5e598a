"""The manifest of a chain: its links, its programs, its values, and the memory that it takes on a device.

The memory is planned link by link (see `subfleet.protocol.chains`):

   always           the runtime, the manifest, and one batch
   for each piece   the runtime's objects for its programs, and these programs
   each operator    its weights and states, once: an update replaces the old ones
   on a path        what each link reads, until its gradient is known, and the gradients of all parameters
   at any moment    one program: all share the runtime's memory for a program's own tensors

While a program of the backward pass runs, later links no longer keep what they read; so the inputs and outputs of a
program only count as far as they exceed that.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

from subfleet.export.chains.link_values import chain_evaluation, chain_training, of_role
from subfleet.export.chains.pieces import LinkModule, OperatorModule
from subfleet.export.chains.supernets import Cut
from subfleet.export.chains.writing import WrittenStep
from subfleet.export.memory import executorch_plan, onnx_plan
from subfleet.export.memory.step_bytes import value_bytes
from subfleet.export.requests import ProgramRequest, TrainRequest
from subfleet.export.steps import Step
from subfleet.export.targets import torch as torch_target
from subfleet.export.versions import tool_versions
from subfleet.protocol.chains import Chain, Link, LinkOperator, name_program
from subfleet.protocol.errors import ExportError
from subfleet.protocol.memory_plan import MemoryPlan, Packing
from subfleet.protocol.programs import PieceProgram, ProgramManifest, ValueInfo
from subfleet.protocol.schema import canonical_json

_BASE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "onnx": onnx_plan.FIRST_SESSION_BYTES + onnx_plan.TRAINING_BYTES,
        "executorch": executorch_plan.BASE_BYTES,
        "torch": torch_target.BASE_BYTES,
    }
)


_READ_BYTES = 4.5
"""For each byte of a manifest: its text, its objects, and what reading it leaves behind. Measured: 4.0 to 5.0."""
_CHAINED_BYTES = 2_500_000
"""Additional memory of a chain: the file as read, draws, and the values of each program. Measured: 2 to 4 MB."""


_GAPS = 1.12
"""Features and gradients of links are blocks of the C library's heap, which leaves gaps between them. Measured: 1.00
(CNN-S) to 1.11 (CNN-L), and more with ExecuTorch, which keeps its own tensors there too."""


def _add_gaps(size_bytes: int) -> int:
    """Return the size of blocks with these bytes in total, including the gaps between them."""
    return round(_GAPS * size_bytes)


def _memory_of(chain: Chain, batch: Sequence[ValueInfo], packings: Sequence[Packing]) -> MemoryPlan:
    """Return the plan of the largest path with all operators held; its peak is `ChainMemory.largest_peak_bytes`."""
    operators = [operator for link in chain.links for operator in link.operators]
    weights, states = (
        sum(operator.weight_bytes for operator in operators),
        sum(operator.state_bytes for operator in operators),
    )
    room = chain.plan_memory(chain.links)
    fed_bytes, peak = value_bytes(batch), max(operator.peak_bytes for operator in operators)
    kept_bytes = room.largest_peak_bytes - room.held_bytes - peak
    return MemoryPlan(
        weights_bytes=weights,
        optimiser_bytes=states,
        fed_bytes=fed_bytes,
        activation_bytes=kept_bytes,
        workspace_bytes=peak,
        runtime_bytes=room.held_bytes - weights - states - fed_bytes,
        packings=_merge_packings(packings),
    )


def _merge_packings(packings: Sequence[Packing]) -> tuple[Packing, ...]:
    more: dict[int, Packing] = {}
    for packing in packings:
        before = more[packing.width].more_bytes if packing.width in more else 0
        more[packing.width] = Packing(width=packing.width, more_bytes=before + packing.more_bytes)
    return tuple(more.values())


_Steps = Mapping[str, WrittenStep]
"""A piece's programs, by the name of the step."""


def manifest_of(cut: Cut, written: Mapping[str, _Steps], request: ProgramRequest) -> ProgramManifest:
    """Return the manifest of a chain.

    Args:
        cut: the supernet.
        written: the programs of each piece that the target can run.
        request: the request.

    Raises:
        ExportError: the target can run no operator of a choice.
    """
    chain = _ChainBuilder(cut=cut, written=written, request=request).chain()
    # A manifest is read as a whole, and has thousands of values.
    manifest_bytes = len(canonical_json(_manifest(cut, written, request, chain)))
    read_bytes = _CHAINED_BYTES + round(_READ_BYTES * manifest_bytes)
    return _manifest(cut, written, request, replace(chain, fixed_bytes=chain.fixed_bytes + read_bytes))


def _manifest(cut: Cut, written: Mapping[str, _Steps], request: ProgramRequest, chain: Chain) -> ProgramManifest:
    programs = {name_program(piece, kind): step for piece, steps in written.items() for kind, step in steps.items()}
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
        memory=_memory_of(chain, _batch(inputs), packings),
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
    """Return inputs and outputs of all programs together."""
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
    """Describes the links of a supernet for a device."""

    cut: Cut
    written: Mapping[str, _Steps]
    request: ProgramRequest

    def chain(self) -> Chain:
        least = [
            self._read_bytes(index) if self._always_reads(link) else 0 for index, link in enumerate(self.cut.links)
        ]
        later = [*accumulate(reversed(least), initial=0)][-2::-1]
        links = (
            self._link(link, self._read_bytes(index), later[index], sum(least))
            for index, link in enumerate(self.cut.links)
        )
        base_bytes, (inputs, _) = _BASE_BYTES[self.request.target], _values(self.cut, self.request)
        return Chain(
            links=tuple(links),
            fixed_bytes=base_bytes + value_bytes(_batch(inputs)),
            runtime_bytes=tuple(
                (name, sum(step.program.memory.runtime_bytes - self._own_base_bytes(step) for step in steps.values()))
                for name, steps in self.written.items()
            ),
        )

    def _own_base_bytes(self, written: WrittenStep) -> int:
        """Return what the plan of a piece includes for any program."""
        target = self.request.target
        return executorch_plan.find_base_bytes(written.step) if target == "executorch" else _BASE_BYTES[target]

    @property
    def _trains(self) -> bool:
        return isinstance(self.request, TrainRequest)

    def _read_bytes(self, index: int) -> int:
        """Return the bytes that a link keeps for the backward pass."""
        return value_bytes([self.cut.pieces.reads[index]]) if self._trains else 0

    def _always_reads(self, link: LinkModule) -> bool:
        return all(self.cut.pieces.names[link.name, operator.name] for operator in link.operators)

    def _link(self, link: LinkModule, read_bytes: int, later_bytes: int, all_bytes: int) -> Link:
        """Describe a link, given the bytes that it, later links and all links keep at least for the backward pass."""
        names = {operator.name: self.cut.pieces.names[link.name, operator.name] for operator in link.operators}
        operators = tuple(
            self._operator(operator, names[operator.name], read_bytes, later_bytes, all_bytes)
            for operator in link.operators
            if not names[operator.name] or names[operator.name] in self.written
        )
        if not operators:
            raise ExportError(
                f"the target {self.request.target!r} can run no operator of the choice {link.name!r}; give it others"
            )
        return Link(name=link.name, operators=operators)

    def _operator(
        self, operator: OperatorModule, piece: str, read_bytes: int, later_bytes: int, all_bytes: int
    ) -> LinkOperator:
        parameters, steps = list(operator.module.parameters()), self.written.get(piece, {})
        gradient_bytes = sum(part.nbytes for part in parameters) if self._trains else 0
        states = of_role(steps["update"].step.inputs, "optimiser_state") if "update" in steps else ()
        peaks = (
            self._program_bytes(step, all_bytes if kind == "update" else later_bytes) for kind, step in steps.items()
        )
        return LinkOperator(
            name=operator.name,
            piece=piece,
            prefix=operator.prefix,
            weight_bytes=sum(part.nbytes for part in (*parameters, *operator.module.buffers())),
            state_bytes=value_bytes(states),
            kept_bytes=_add_gaps((read_bytes if piece else 0) + gradient_bytes),
            peak_bytes=_add_gaps(max(peaks, default=0)),
            forward_macs=self._macs(operator),
            needs=tuple(sorted({name for step in steps.values() for name in step.program.operators})),
        )

    def _program_bytes(self, step: WrittenStep, kept_bytes: int) -> int:
        """Return what a program takes besides what its path keeps; links that keep nothing more make room for it."""
        memory, passing = step.program.memory, self._transient_values(step.step)
        return memory.activation_bytes + memory.workspace_bytes + max(value_bytes(passing) - kept_bytes, 0)

    def _transient_values(self, step: Step) -> list[ValueInfo]:
        """Return the values that only exist while a program runs."""
        if not isinstance(self.request, TrainRequest):
            return [*(value for value in step.inputs if value.role == "features"), *step.outputs]
        # A link keeps its input, the next one its output; gradients are kept too, unless they are added to others.
        kept_roles = {"features"} if self.request.accumulate else {"features", "gradient"}
        back = (value for value in step.inputs if value.role == "features_gradient")
        return [*back, *(value for value in step.outputs if value.role not in kept_roles)]

    def _macs(self, operator: OperatorModule) -> int:
        macs = 0
        for name, part in operator.module.named_parameters():
            decl = self.cut.network.tensors[f"{operator.prefix}{name}"]
            macs += part.numel() * decl.positions if decl.role in ("weight", "residual") else 0
        return macs
