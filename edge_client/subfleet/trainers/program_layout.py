"""The layout of a package: the inputs and outputs of its programs, and the tensors that they belong to.

A plain program is a chain of one link with one operator: its piece has only the program of a last link, which in a
training also takes the optimiser's step.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from subfleet.arrays import numpy_dtype
from subfleet.protocol.chains import Chain, Link, LinkOperator, Step, name_program
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import PieceProgram, ProgramManifest, Role, ValueInfo
from subfleet.trainers.layouts import (
    EvaluationLayout,
    StepLayout,
    match_carried,
    read_evaluation_layout,
    read_step_layout,
)

AnyLayout = StepLayout | EvaluationLayout

_WHOLE = "whole"
"""The piece of a plain program."""
_WEIGHTS: tuple[Role, ...] = ("parameter", "buffer")
_HELD: tuple[Role, ...] = (*_WEIGHTS, "optimiser_state", "gradient")
_FED: tuple[Role, ...] = ("input", "label", "sample_mask", "batch_weight", "learning_rate")
_PASSED: tuple[Role, ...] = ("features", "features_gradient", "gradient_scale")
_READ: tuple[Role, ...] = ("loss", "correct", "count", "squares", "logits")

Key = tuple[Role, str]
"""A held value of an operator: its role, and the piece's name of the tensor, or of an optimiser state's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One operator of a link, as a stage of a path.

    Attributes:
        link: the link's name.
        operator: the operator.
        last: whether it ends in the loss.
    """

    link: str
    operator: LinkOperator
    last: bool = False

    def program(self, step: Step) -> str:
        """Name one of its programs."""
        return name_program(self.operator.piece, step)


Path = Sequence[Stage]
"""One way through each link, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramValues:
    """The values of one program by source and destination; each pair begins with the program's own name.

    Attributes:
        held: inputs that are held for the operator.
        fed: inputs that are fed, with the name of the whole package's input.
        passed: inputs that are outputs of another program.
        carried: outputs that replace held values.
        summed: outputs that are added to held values.
        returned: all other outputs, with their roles.
    """

    held: tuple[tuple[str, Key], ...]
    fed: tuple[tuple[str, str], ...]
    passed: tuple[tuple[str, Role], ...]
    carried: tuple[tuple[str, Key], ...]
    summed: tuple[tuple[str, Key], ...]
    returned: tuple[tuple[str, Role], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLayout:
    """The values of a package by purpose.

    Attributes:
        values: the values of all pieces together, as if they were one program.
        chain: its links.
        plain: whether it is one program, so that there is one path.
        programs: the programs of its pieces, by name.
        sources: where the values of each program come from and go to.
    """

    values: AnyLayout
    chain: Chain
    plain: bool
    programs: Mapping[str, PieceProgram]
    sources: Mapping[str, ProgramValues]

    @property
    def read_outputs(self) -> Mapping[Role, str]:
        """The outputs to read, by their roles."""
        names: dict[Role, str] = {role: getattr(self.values, role, "") for role in _READ}
        return {role: name for role, name in names.items() if name}

    @property
    def for_training(self) -> StepLayout:
        """The layout of a training program; raises ProtocolError if it is not one."""
        if not isinstance(self.values, StepLayout):
            raise ProtocolError("the program is not for training; name a training program")
        return self.values

    @property
    def for_evaluation(self) -> EvaluationLayout:
        """The layout of an evaluation program; raises ProtocolError if it is not one."""
        if not isinstance(self.values, EvaluationLayout):
            raise ProtocolError("the program is not for evaluation; name an evaluation program")
        return self.values

    def check_paths(self, *, named: bool) -> None:
        """Check that a job names paths if and only if the program is a chain.

        Raises:
            ProtocolError: otherwise.
        """
        if named and self.plain:
            raise ProtocolError("the program is not a chain, but paths are only drawn from chains; name another")
        if not named and not self.plain:
            raise ProtocolError("the program is a chain, but the task names no paths; name paths, or another program")

    def links(self, choices: Mapping[str, Collection[str]]) -> tuple[Link, ...]:
        """List the links of a subspace; see `Chain.restrict`. A plain program has no choices."""
        return self.chain.links if self.plain else self.chain.restrict(choices)

    def weights(self, links: Sequence[Link]) -> tuple[ValueInfo, ...]:
        """List parameters, buffers and frozen weights of a subspace, as inputs of the whole package."""
        if self.plain:
            return self.values.weights
        owned = {
            f"{stage.operator.prefix}{tensor}"
            for stage in list_stages(links)
            for name in self.steps(stage)
            for _, (role, tensor) in self.sources[name].held
            if role in _WEIGHTS
        }
        return tuple(value for value in self.values.weights if value.tensor in owned)

    def steps(self, stage: Stage) -> tuple[str, ...]:
        """Name the programs that run when a batch passes an operator, in order."""
        if not stage.operator.piece:
            return ()
        if isinstance(self.values, EvaluationLayout):
            return (stage.program("evaluate" if stage.last else "forward"),)
        forward = () if stage.last else (stage.program("forward"),)
        return (*forward, stage.program("backward"), *((stage.program("update"),) if self.updates(stage) else ()))

    def updates(self, stage: Stage) -> bool:
        """Whether an operator has a program that takes the optimiser's step."""
        return stage.program("update") in self.programs


def list_stages(links: Sequence[Link]) -> Iterator[Stage]:
    """Yield all stages of some links, link by link; the last link ends in the loss."""
    for link in links:
        for operator in link.operators:
            yield Stage(link=link.name, operator=operator, last=link is links[-1])


def read_layout(manifest: ProgramManifest, *, evaluates: bool = False) -> ProgramLayout:
    """Read the layout of a package from its manifest.

    Args:
        manifest: the package's manifest.
        evaluates: whether it must be for an evaluation instead of a training.

    Raises:
        ProtocolError: the program is for something else, or its values or programs do not fit together.
    """
    values = read_evaluation_layout(manifest) if evaluates else read_step_layout(manifest)
    chain, pieces = manifest.chain, manifest.pieces
    if chain is None:
        name = name_program(_WHOLE, "evaluate" if evaluates else "backward")
        chain = _make_link(manifest)
        pieces = (PieceProgram(name=name, inputs=manifest.inputs, outputs=manifest.outputs),)
    if len({program.name for program in pieces}) < len(pieces):
        raise ProtocolError("the chain has two programs with the same name, but names must be unique")
    plain = manifest.chain is None
    layout = ProgramLayout(
        values=values,
        chain=chain,
        plain=plain,
        programs=MappingProxyType({program.name: program for program in pieces}),
        sources=MappingProxyType({program.name: _read_sources(program, manifest, plain=plain) for program in pieces}),
    )
    if not plain:
        _check_chain(layout, manifest)
    return layout


def _make_link(manifest: ProgramManifest) -> Chain:
    """Make the chain of a plain program; it takes at least its inputs' memory."""
    least_bytes = sum(prod(value.shape) * numpy_dtype(value.dtype).itemsize for value in manifest.inputs)
    operator = LinkOperator(name="", piece=_WHOLE, prefix="", peak_bytes=least_bytes)
    return Chain(links=(Link(name=_WHOLE, operators=(operator,)),), fixed_bytes=0, runtime_bytes=((_WHOLE, 0),))


def _read_sources(program: PieceProgram, manifest: ProgramManifest, *, plain: bool) -> ProgramValues:
    whole = {value.role: value.name for value in manifest.inputs if value.role in _FED}
    takes_gradients = any(value.role == "gradient" for value in program.inputs)
    states = {new: old for old, new in match_carried(program.inputs, program.outputs, ["optimiser_state"]).items()}
    carried: list[tuple[str, Key]] = []
    summed: list[tuple[str, Key]] = []
    for value in program.outputs:
        if value.role in _HELD:
            to = carried if value.role != "gradient" or takes_gradients else summed
            to.append((value.name, (value.role, states.get(value.name, value.tensor))))
    return ProgramValues(
        held=tuple((value.name, _make_key(value)) for value in program.inputs if value.role in _HELD),
        fed=tuple(
            (value.name, value.name if plain else whole.get(value.role, ""))
            for value in program.inputs
            if value.role not in (*_HELD, *_PASSED)
        ),
        passed=tuple((value.name, value.role) for value in program.inputs if value.role in _PASSED),
        carried=tuple(carried),
        summed=tuple(summed),
        returned=tuple((value.name, value.role) for value in program.outputs if value.role not in _HELD),
    )


def _make_key(value: ValueInfo) -> Key:
    """Make the key of an input; an optimiser may hold several states of one tensor."""
    return value.role, value.name if value.role == "optimiser_state" else value.tensor


def _check_chain(layout: ProgramLayout, manifest: ProgramManifest) -> None:
    known = {(value.role, value.tensor): value for value in manifest.inputs if value.role in _WEIGHTS}
    shape: tuple[int, ...] | None = None
    for link in layout.chain.links:
        stages = [stage for stage in list_stages(layout.chain.links) if stage.link == link.name]
        for stage in stages:
            _check(layout, stage, known)
        shape = _check_shapes(layout, stages, shape)


def _check(layout: ProgramLayout, stage: Stage, known: Mapping[tuple[Role, str], ValueInfo]) -> None:
    """Check that an operator has its programs, and that all their inputs are available."""
    gradients: list[tuple[str, tuple[int, ...]]] = []
    for name in layout.steps(stage):
        program = layout.programs.get(name)
        if program is None:
            raise ProtocolError(f"the chain has no program {name!r:.120}, which link {stage.link!r:.80} runs")
        _check_roles(program, program.inputs, (*_HELD, *_FED, *_PASSED))
        _check_roles(program, program.outputs, (*_HELD, *_PASSED, *_READ))
        for value in program.inputs:
            whole = known.get((value.role, f"{stage.operator.prefix}{value.tensor}"))
            fits = whole is not None and (whole.dtype, whole.shape) == (value.dtype, value.shape)
            if value.role in _WEIGHTS and not fits:
                raise ProtocolError(
                    f"the chain's program {name!r:.120} takes {value.tensor!r:.120} of {value.dtype} and shape "
                    f"{value.shape} as a tensor of link {stage.link!r:.80}, but the chain has no such tensor"
                )
        needed = [(value.tensor, value.shape) for value in program.inputs if value.role == "gradient"]
        if needed and sorted(needed) != sorted(gradients):
            raise ProtocolError(f"the chain's program {name!r:.120} takes other gradients than its piece has")
        if odd := next((own for own, source in layout.sources[name].fed if not source), None):
            raise ProtocolError(
                f"the chain's program {name!r:.120} takes {odd!r:.80}, which nothing in the chain provides"
            )
        gradients = [(value.tensor, value.shape) for value in program.outputs if value.role == "gradient"]
    if gradients:
        raise ProtocolError(f"the chain has no program {stage.program('update')!r:.120} for the gradients of its piece")


def _check_roles(program: PieceProgram, values: Sequence[ValueInfo], roles: Collection[Role]) -> None:
    odd = next((value for value in values if value.role not in roles), None)
    if odd is not None:
        raise ProtocolError(
            f"the chain's program {program.name!r:.120} has {odd.name!r:.80} of role {odd.role!r}, which no piece may "
            "have there; export it again"
        )


def _check_shapes(
    layout: ProgramLayout, stages: Sequence[Stage], read: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Check that all operators of a link return features of one shape; returns it."""
    shapes = {read if not stage.operator.piece else _read_features(layout, stage, read) for stage in stages}
    if len(shapes) > 1:
        raise ProtocolError(
            f"the operators of link {stages[0].link!r:.80} return features of {len(shapes)} shapes, but must return one"
        )
    return shapes.pop()


def _read_features(layout: ProgramLayout, stage: Stage, read: tuple[int, ...] | None) -> tuple[int, ...] | None:
    program = layout.programs[layout.steps(stage)[0]]
    inputs = [value.shape for value in program.inputs if value.role == "features"]
    if inputs != ([] if read is None else [read]):
        raise ProtocolError(
            f"link {stage.link!r:.80} of the chain takes features of {inputs}, but gets {read}; export it again"
        )
    outputs = [value.shape for value in program.outputs if value.role == "features"]
    if len(outputs) != (not stage.last):
        raise ProtocolError(
            f"link {stage.link!r:.80} of the chain returns features {len(outputs)} times; export it again"
        )
    return outputs[0] if outputs else None
