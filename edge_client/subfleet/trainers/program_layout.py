"""How the programs of a package fit together: what each takes and gives, and whose tensors those are.

A plain program is a chain of one link with one operator: its piece's one program is its last link's, which for a
training takes the optimiser's step as well.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from subfleet.arrays import numpy_dtype
from subfleet.protocol.chains import Chain, Link, LinkOperator, Step, program_name
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import PieceProgram, ProgramManifest, Role, ValueInfo
from subfleet.trainers.evaluation_layout import EvaluationLayout, evaluation_layout
from subfleet.trainers.step_layout import StepLayout, carried_values, step_layout

__all__ = ["AnyLayout", "Key", "Path", "Place", "ProgramLayout", "ProgramValues", "places_of", "read_layout"]

AnyLayout = StepLayout | EvaluationLayout

_WHOLE = "whole"
"""The piece of a plain program."""
_WEIGHTS: tuple[Role, ...] = ("parameter", "buffer")
_HELD: tuple[Role, ...] = (*_WEIGHTS, "optimiser_state", "gradient")
_FED: tuple[Role, ...] = ("input", "label", "sample_mask", "batch_weight", "learning_rate")
_PASSED: tuple[Role, ...] = ("features", "features_gradient", "gradient_scale")
_READ: tuple[Role, ...] = ("loss", "correct", "count", "squares", "logits")

Key = tuple[Role, str]
"""What is held of an operator: the role, and the piece's name of the tensor, or of an optimiser state's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One way to go through one link: a part of a path.

    Attributes:
        link: its name.
        operator: that is gone through.
        last: whether it is the one that ends in the loss.
    """

    link: str
    operator: LinkOperator
    last: bool = False

    def program(self, step: Step) -> str:
        """The name of one of its programs."""
        return program_name(self.operator.piece, step)


Path = Sequence[Place]
"""One way through each link, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramValues:
    """The values of one program by where they come from and go to; each pair begins with the program's own name.

    Attributes:
        held: inputs that are held of the operator.
        fed: inputs that are fed, with the name of the whole package's input.
        passed: inputs that another program gives.
        carried: outputs that take the place of what is held.
        summed: outputs that are added to what is held.
        given: all other outputs, with their roles.
    """

    held: tuple[tuple[str, Key], ...]
    fed: tuple[tuple[str, str], ...]
    passed: tuple[tuple[str, Role], ...]
    carried: tuple[tuple[str, Key], ...]
    summed: tuple[tuple[str, Key], ...]
    given: tuple[tuple[str, Role], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLayout:
    """The values of a package by what they are for.

    Attributes:
        values: of all pieces together, as if they were one program.
        chain: its links.
        plain: whether it is one program, so that there is one path.
        programs: those of its pieces, by name.
        sources: where the values of each program come from and go to.
    """

    values: AnyLayout
    chain: Chain
    plain: bool
    programs: Mapping[str, PieceProgram]
    sources: Mapping[str, ProgramValues]

    @property
    def told(self) -> Mapping[Role, str]:
        """The outputs that are read, by their roles."""
        names: dict[Role, str] = {role: getattr(self.values, role, "") for role in _READ}
        return {role: name for role, name in names.items() if name}

    @property
    def for_training(self) -> StepLayout:
        """The layout of a training program; raises ProtocolError where it is another one."""
        if not isinstance(self.values, StepLayout):
            raise ProtocolError("the program is no training program, but must be one; name another")
        return self.values

    @property
    def for_evaluation(self) -> EvaluationLayout:
        """The layout of an evaluation program; raises ProtocolError where it is another one."""
        if not isinstance(self.values, EvaluationLayout):
            raise ProtocolError("the program is no evaluation program, but must be one; name another")
        return self.values

    def check_paths(self, *, named: bool) -> None:
        """Make sure that a job names paths where the program is a chain, and only there.

        Raises:
            ProtocolError: it does not.
        """
        if named and self.plain:
            raise ProtocolError("the program is in one piece, but paths are drawn of chains alone; name another")
        if not named and not self.plain:
            raise ProtocolError("the program is a chain, but the task names no paths through it; name another")

    def links(self, choices: Mapping[str, Collection[str]]) -> tuple[Link, ...]:
        """The links of a subspace; see `Chain.kept`. A plain program has no choices: they were made before."""
        return self.chain.links if self.plain else self.chain.kept(choices)

    def weights(self, links: Sequence[Link]) -> tuple[ValueInfo, ...]:
        """Parameters and buffers of a subspace, as inputs of the whole package; frozen ones, too."""
        if self.plain:
            return self.values.weights
        owned = {
            f"{place.operator.prefix}{tensor}"
            for place in places_of(links)
            for name in self.steps(place)
            for _, (role, tensor) in self.sources[name].held
            if role in _WEIGHTS
        }
        return tuple(value for value in self.values.weights if value.tensor in owned)

    def steps(self, place: Place) -> tuple[str, ...]:
        """The names of the programs that run where a batch goes through an operator, in that order."""
        if not place.operator.piece:
            return ()
        if isinstance(self.values, EvaluationLayout):
            return (place.program("evaluate" if place.last else "forward"),)
        forward = () if place.last else (place.program("forward"),)
        return (*forward, place.program("backward"), *((place.program("update"),) if self.updates(place) else ()))

    def updates(self, place: Place) -> bool:
        """Whether an operator has a program that takes the optimiser's step."""
        return place.program("update") in self.programs


def places_of(links: Sequence[Link]) -> Iterator[Place]:
    """All ways through some links, link by link; the last link ends in the loss."""
    for link in links:
        for operator in link.operators:
            yield Place(link=link.name, operator=operator, last=link is links[-1])


def read_layout(manifest: ProgramManifest, *, evaluates: bool = False) -> ProgramLayout:
    """Read the layout of a package from its manifest.

    Args:
        manifest: of the package.
        evaluates: whether it must be for an evaluation instead of a training.

    Raises:
        ProtocolError: the program is for something else, or its values or programs do not fit together.
    """
    values = evaluation_layout(manifest) if evaluates else step_layout(manifest)
    chain, pieces = manifest.chain, manifest.pieces
    if chain is None:
        name = program_name(_WHOLE, "evaluate" if evaluates else "backward")
        chain = _one_link(manifest)
        pieces = (PieceProgram(name=name, inputs=manifest.inputs, outputs=manifest.outputs),)
    if len({program.name for program in pieces}) < len(pieces):
        raise ProtocolError("the chain has two programs of one name, but each must have a name of its own")
    plain = manifest.chain is None
    layout = ProgramLayout(
        values=values,
        chain=chain,
        plain=plain,
        programs=MappingProxyType({program.name: program for program in pieces}),
        sources=MappingProxyType({program.name: _sources(program, manifest, plain=plain) for program in pieces}),
    )
    if not plain:
        _check_chain(layout, manifest)
    return layout


def _one_link(manifest: ProgramManifest) -> Chain:
    """The chain of a plain program; it takes its inputs' memory at least."""
    least_bytes = sum(prod(value.shape) * numpy_dtype(value.dtype).itemsize for value in manifest.inputs)
    operator = LinkOperator(name="", piece=_WHOLE, prefix="", peak_bytes=least_bytes)
    return Chain(links=(Link(name=_WHOLE, operators=(operator,)),), fixed_bytes=0, runtime_bytes=((_WHOLE, 0),))


def _sources(program: PieceProgram, manifest: ProgramManifest, *, plain: bool) -> ProgramValues:
    whole = {value.role: value.name for value in manifest.inputs if value.role in _FED}
    takes_gradients = any(value.role == "gradient" for value in program.inputs)
    states = {new: old for old, new in carried_values(program.inputs, program.outputs, ["optimiser_state"]).items()}
    carried: list[tuple[str, Key]] = []
    summed: list[tuple[str, Key]] = []
    for value in program.outputs:
        if value.role in _HELD:
            to = carried if value.role != "gradient" or takes_gradients else summed
            to.append((value.name, (value.role, states.get(value.name, value.tensor))))
    return ProgramValues(
        held=tuple((value.name, _key(value)) for value in program.inputs if value.role in _HELD),
        fed=tuple(
            (value.name, value.name if plain else whole.get(value.role, ""))
            for value in program.inputs
            if value.role not in (*_HELD, *_PASSED)
        ),
        passed=tuple((value.name, value.role) for value in program.inputs if value.role in _PASSED),
        carried=tuple(carried),
        summed=tuple(summed),
        given=tuple((value.name, value.role) for value in program.outputs if value.role not in _HELD),
    )


def _key(value: ValueInfo) -> Key:
    """What an input is held by; an optimiser may hold several states of one tensor."""
    return value.role, value.name if value.role == "optimiser_state" else value.tensor


def _check_chain(layout: ProgramLayout, manifest: ProgramManifest) -> None:
    known = {(value.role, value.tensor): value for value in manifest.inputs if value.role in _WEIGHTS}
    shape: tuple[int, ...] | None = None
    for link in layout.chain.links:
        places = [place for place in places_of(layout.chain.links) if place.link == link.name]
        for place in places:
            _check(layout, place, known)
        shape = _passes(layout, places, shape)


def _check(layout: ProgramLayout, place: Place, known: Mapping[tuple[Role, str], ValueInfo]) -> None:
    """Make sure that an operator has its programs, and that they take nothing that nobody has."""
    gradients: list[tuple[str, tuple[int, ...]]] = []
    for name in layout.steps(place):
        program = layout.programs.get(name)
        if program is None:
            raise ProtocolError(f"the chain has no program {name!r:.120}, which link {place.link!r:.80} runs")
        _check_roles(program, program.inputs, (*_HELD, *_FED, *_PASSED))
        _check_roles(program, program.outputs, (*_HELD, *_PASSED, *_READ))
        for value in program.inputs:
            whole = known.get((value.role, f"{place.operator.prefix}{value.tensor}"))
            fits = whole is not None and (whole.dtype, whole.shape) == (value.dtype, value.shape)
            if value.role in _WEIGHTS and not fits:
                raise ProtocolError(
                    f"the chain's program {name!r:.120} takes {value.tensor!r:.120} of {value.dtype} and shape "
                    f"{value.shape} as a tensor of link {place.link!r:.80}, but the chain has no such tensor"
                )
        taken = [(value.tensor, value.shape) for value in program.inputs if value.role == "gradient"]
        if taken and sorted(taken) != sorted(gradients):
            raise ProtocolError(f"the chain's program {name!r:.120} takes gradients that are not those of its piece")
        if odd := next((own for own, source in layout.sources[name].fed if not source), None):
            raise ProtocolError(f"the chain's program {name!r:.120} takes {odd!r:.80}, which the chain is not fed")
        gradients = [(value.tensor, value.shape) for value in program.outputs if value.role == "gradient"]
    if gradients:
        raise ProtocolError(f"the chain has no program {place.program('update')!r:.120} for the gradients of its piece")


def _check_roles(program: PieceProgram, values: Sequence[ValueInfo], roles: Collection[Role]) -> None:
    odd = next((value for value in values if value.role not in roles), None)
    if odd is not None:
        raise ProtocolError(
            f"the chain's program {program.name!r:.120} has {odd.name!r:.80} of role {odd.role!r}, which no piece has "
            "there; export it again"
        )


def _passes(layout: ProgramLayout, places: Sequence[Place], read: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape of what all operators of a link give, where they read features of a shape."""
    given = {read if not place.operator.piece else _features(layout, place, read) for place in places}
    if len(given) > 1:
        raise ProtocolError(f"the operators of link {places[0].link!r:.80} give features of {len(given)} shapes, not 1")
    return given.pop()


def _features(layout: ProgramLayout, place: Place, read: tuple[int, ...] | None) -> tuple[int, ...] | None:
    program = layout.programs[layout.steps(place)[0]]
    taken = [value.shape for value in program.inputs if value.role == "features"]
    if taken != ([] if read is None else [read]):
        raise ProtocolError(
            f"link {place.link!r:.80} of the chain takes features of {taken}, but is given {read}; export it again"
        )
    given = [value.shape for value in program.outputs if value.role == "features"]
    if len(given) != (not place.last):
        raise ProtocolError(f"link {place.link!r:.80} of the chain gives features {len(given)} times; export it again")
    return given[0] if given else None
