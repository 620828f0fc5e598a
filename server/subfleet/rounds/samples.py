"""Whether a client's samples suit the run's model and go together with all others, by what it tells of them. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from subfleet.protocol.input_statistics import InputStatistics, scale_problem
from subfleet.protocol.messages import Profile
from subfleet.rounds.terms import Terms
from subfleet.settings.run import Run
from subfleet.tasks import shape_problem

__all__ = ["peers_told", "samples_problem", "scale_warning"]

_REMEDY = "scale them alike, or set check in [data] of the run's file"
_SHOWN = 5


def samples_problem(config: Run, profile: Profile) -> str:
    """Why a client's samples cannot be fed to the run's model; empty where they can, as far as it tells."""
    transform = config.data.transform
    if profile.sizes_differ and (transform is None or not transform.fixes_size):
        return "its pictures have several sizes, but the run brings them to none; set resize in [data.transform]"
    shapes = (profile.input_shape, *profile.other_input_shapes)
    problems = [_shape_problem(config, shape) for shape in shapes]
    if all(problems):
        return f"its samples {problems[0]}"
    return "" if profile.inputs is None else _kind_problem(config, profile.inputs)


def _shape_problem(config: Run, shape: tuple[int, ...]) -> str:
    transform = config.data.transform
    if transform is None:
        return shape_problem(shape, config.model.input_shape)
    try:
        return shape_problem(transform.shape_of(shape), config.model.input_shape)
    except ValueError as error:
        return f"cannot be brought to the run's data.transform: {error}"


def _kind_problem(config: Run, inputs: InputStatistics) -> str:
    """Indices for a model of numbers, numbers for one of indices, or indices beyond its vocabulary."""
    vocabulary: int = getattr(config.model, "vocabulary", 0)
    wanted = "indices" if vocabulary else "numbers"
    if inputs.kind != wanted:
        return f"its samples are {inputs.kind}, but the model takes {wanted}"
    if vocabulary and inputs.maximum >= vocabulary:
        return f"its samples go up to {inputs.maximum:.0f}, but the model takes indices below {vocabulary}"
    return ""


def scale_warning(terms: Terms, profile: Profile) -> str:
    """Why a client's inputs and those of the evaluation data are not on one scale; empty where nothing says so."""
    evaluation = terms.evaluation_inputs
    if terms.config.data.check == "off" or evaluation is None or profile.inputs is None:
        return ""
    problem = scale_problem(profile.inputs, evaluation)
    if not problem:
        return ""
    return (
        f"its inputs go from {profile.inputs}, but those of the evaluation data from {evaluation}: {problem}; {_REMEDY}"
    )


def peers_told(terms: Terms, profiles: Mapping[str, Profile]) -> Iterator[str]:
    """What clients say against each other: who is not on the scale of most, or that the evaluation data are not.

    Args:
        terms: of the run.
        profiles: of those who take part in a round, by client id.
    """
    told = {name: one.inputs for name, one in sorted(profiles.items()) if one.inputs is not None}
    usual = _usual(told.values())
    if terms.config.data.check == "off" or usual is None:
        return
    evaluation = terms.evaluation_inputs
    if evaluation is not None and scale_problem(usual, evaluation):
        yield (
            f"the evaluation data go from {evaluation}, but the inputs of most of the {len(told)} clients do not, as "
            f"those from {usual}; {_REMEDY}"
        )
    odd = [
        name
        for name, one in told.items()
        if scale_problem(one, usual) and (evaluation is None or not scale_problem(one, evaluation))
    ]
    if odd:
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        yield (
            f"the inputs of {', '.join(odd[:_SHOWN])}{more} are not on the scale of most of the {len(told)} clients, "
            f"from {usual}; {_REMEDY}"
        )


def _usual(told: Iterable[InputStatistics]) -> InputStatistics | None:
    """The client in the middle: with more than half of the others it is on one scale, if anybody is."""
    ordered = sorted((one for one in told if one.deviation), key=lambda one: (one.deviation, one.maximum, one.minimum))
    return ordered[len(ordered) // 2] if len(ordered) > 2 else None
