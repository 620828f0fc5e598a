"""How the programs of a chain fit together: what each takes and gives, and whose tensors those are."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.protocol.chains import Chain, Link, LinkOperator, Step, program_name
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import PieceProgram, ProgramManifest, Role, ValueInfo
from subfleet.trainers.evaluation_layout import EvaluationLayout, evaluation_layout
from subfleet.trainers.step_layout import StepLayout, step_layout

__all__ = ["ChainLayout", "Place", "chain_layout", "places_of"]

_WEIGHTS: tuple[Role, ...] = ("parameter", "buffer")
_HELD: tuple[Role, ...] = (*_WEIGHTS, "optimiser_state", "gradient")
_FED: tuple[Role, ...] = ("input", "label", "sample_mask", "batch_weight", "learning_rate", "gradient_scale")
_PASSED: tuple[Role, ...] = ("features", "features_gradient")
_READ: tuple[Role, ...] = ("loss", "correct", "count", "squares", "logits")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLayout:
    """The values of a chain by what they are for.

    Attributes:
        values: of all pieces together, as if they were one program.
        chain: its links.
        programs: those of its pieces, by name.
    """

    values: StepLayout | EvaluationLayout
    chain: Chain
    programs: Mapping[str, PieceProgram]

    @property
    def told(self) -> Mapping[Role, str]:
        """The outputs that are read, by their roles."""
        names: dict[Role, str] = {role: getattr(self.values, role, "") for role in _READ}
        return {role: name for role, name in names.items() if name}

    @property
    def for_training(self) -> StepLayout:
        """The layout of a training program; raises ProtocolError where it is another one."""
        if not isinstance(self.values, StepLayout):
            raise ProtocolError("the chain is no training program, but must be one; name another")
        return self.values

    @property
    def for_evaluation(self) -> EvaluationLayout:
        """The layout of an evaluation program; raises ProtocolError where it is another one."""
        if not isinstance(self.values, EvaluationLayout):
            raise ProtocolError("the chain is no evaluation program, but must be one; name another")
        return self.values

    def weights(self, links: Sequence[Link]) -> tuple[ValueInfo, ...]:
        """Parameters and buffers of a subspace, as inputs of the whole."""
        owned = {
            f"{place.operator.prefix}{value.tensor}"
            for place in places_of(links)
            for value in self.tensors(place)
            if value.role in _WEIGHTS
        }
        whole = self.values.stored if isinstance(self.values, StepLayout) else self.values.weights
        return tuple(value for value in whole if value.tensor in owned)

    def tensors(self, place: Place) -> Iterator[ValueInfo]:
        """Everything that is held of an operator, as its programs take it; weights come once for each of them."""
        for name in self.steps(place):
            yield from (value for value in self.programs[name].inputs if value.role in _HELD)

    def steps(self, place: Place) -> tuple[str, ...]:
        """The names of the programs that run where a batch goes through an operator, in that order."""
        if not place.operator.piece:
            return ()
        if isinstance(self.values, EvaluationLayout):
            return (place.program("evaluate" if place.last else "forward"),)
        there = () if place.last else (place.program("forward"),)
        update = place.program("update")
        return (*there, place.program("backward"), *((update,) if update in self.programs else ()))


def places_of(links: Sequence[Link]) -> Iterator[Place]:
    """All ways through some links, link by link, of which the last one ends in the loss."""
    for link in links:
        for operator in link.operators:
            yield Place(link=link.name, operator=operator, last=link is links[-1])


def chain_layout(manifest: ProgramManifest) -> ChainLayout:
    """Read the layout of a chain from its manifest.

    Raises:
        ProtocolError: it is no chain, or its programs do not fit together.
    """
    if manifest.chain is None:
        raise ProtocolError("the program is in one piece, but paths are drawn of chains alone; name another")
    names = [program.name for program in manifest.pieces]
    if len(set(names)) < len(names):
        raise ProtocolError("the chain has two programs of one name, but each must have a name of its own")
    layout = ChainLayout(
        values=step_layout(manifest) if manifest.purpose == "train" else evaluation_layout(manifest),
        chain=manifest.chain,
        programs=MappingProxyType({program.name: program for program in manifest.pieces}),
    )
    known = {(value.role, value.tensor): value for value in manifest.inputs if value.role in _WEIGHTS}
    shape: tuple[int, ...] | None = None
    for link in manifest.chain.links:
        places = [place for place in places_of(manifest.chain.links) if place.link == link.name]
        for place in places:
            _check(layout, place, known)
        shape = _passes(layout, places, shape)
    return layout


def _check(layout: ChainLayout, place: Place, known: Mapping[tuple[Role, str], ValueInfo]) -> None:
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


def _passes(layout: ChainLayout, places: Sequence[Place], read: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape of what all operators of a link give, where they read features of a shape."""
    given = {read if not place.operator.piece else _features(layout, place, read) for place in places}
    if len(given) > 1:
        raise ProtocolError(f"the operators of link {places[0].link!r:.80} give features of {len(given)} shapes, not 1")
    return given.pop()


def _features(layout: ChainLayout, place: Place, read: tuple[int, ...] | None) -> tuple[int, ...] | None:
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
