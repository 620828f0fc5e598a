"""How the values of a training program fit together: what is fed, what is carried from step to step, what is read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import ProgramManifest, ValueInfo

__all__ = ["StepLayout", "step_layout"]

_FED_ONCE = ("input", "label", "sample_mask", "learning_rate")
_READ_ONCE = ("loss", "correct")
_CARRIED = ("parameter", "optimiser_state")
_DTYPES: Mapping[str, str] = MappingProxyType(
    {"input": "F32", "label": "I64", "sample_mask": "F32", "learning_rate": "F32"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """The values of a training step by what they are for.

    Attributes:
        batch_size: samples of one step.
        input: the samples.
        label: their classes.
        sample_mask: which of them are real.
        learning_rate: a scalar.
        parameters: the weights, as inputs; each has a tensor name of its own.
        states: optimiser states, as inputs.
        carried: name of each parameter's and state's input to the name of the output that holds it after the step.
        loss: name of the output.
        correct: name of the output.
    """

    batch_size: int
    input: ValueInfo
    label: ValueInfo
    sample_mask: ValueInfo
    learning_rate: ValueInfo
    parameters: tuple[ValueInfo, ...]
    states: tuple[ValueInfo, ...]
    carried: Mapping[str, str]
    loss: str
    correct: str


def step_layout(manifest: ProgramManifest) -> StepLayout:
    """Read the layout of a training program from its manifest.

    Raises:
        ProtocolError: it is not for training, or its values do not make a step that can be repeated.
    """
    if manifest.purpose != "train" or manifest.batch_size < 1:
        raise ProtocolError(
            f"program {manifest.program_id!r:.80} is to {manifest.purpose!r:.20} with batches of "
            f"{manifest.batch_size}, but must be to 'train' with batches of 1 or more"
        )
    fed = {role: _only(manifest.inputs, role) for role in _FED_ONCE}
    read = {role: _only(manifest.outputs, role) for role in _READ_ONCE}
    _check_fed(fed, manifest.batch_size)
    parameters = tuple(value for value in manifest.inputs if value.role == "parameter")
    names = [value.tensor for value in parameters]
    if not names or len(set(names)) != len(names):
        raise ProtocolError("a training program must have one parameter or more, each of a tensor of its own")
    return StepLayout(
        batch_size=manifest.batch_size,
        input=fed["input"],
        label=fed["label"],
        sample_mask=fed["sample_mask"],
        learning_rate=fed["learning_rate"],
        parameters=parameters,
        states=tuple(value for value in manifest.inputs if value.role == "optimiser_state"),
        carried=_carried(manifest),
        loss=read["loss"].name,
        correct=read["correct"].name,
    )


def _only(values: Iterable[ValueInfo], role: str) -> ValueInfo:
    found = [value for value in values if value.role == role]
    if len(found) != 1:
        raise ProtocolError(f"a training program has {len(found)} values of role {role!r}, but must have 1")
    return found[0]


def _check_fed(fed: Mapping[str, ValueInfo], batch_size: int) -> None:
    for role, dtype in _DTYPES.items():
        value = fed[role]
        batched = role == "learning_rate" or value.shape[:1] == (batch_size,)
        scalar_or_vector = role == "input" or len(value.shape) == (0 if role == "learning_rate" else 1)
        if value.dtype != dtype or not batched or not scalar_or_vector:
            raise ProtocolError(
                f"the program's {role} is {value.dtype} of shape {value.shape}, but must be {dtype} and fit a batch of "
                f"{batch_size}"
            )


def _carried(manifest: ProgramManifest) -> Mapping[str, str]:
    before = _sorted_carried(manifest.inputs)
    after = _sorted_carried(manifest.outputs)
    if [_kind(value) for value in before] != [_kind(value) for value in after]:
        raise ProtocolError(
            "a training program must give back every parameter and optimiser state that it takes, as it took it"
        )
    return MappingProxyType({old.name: new.name for old, new in zip(before, after, strict=True)})


def _sorted_carried(values: Iterable[ValueInfo]) -> list[ValueInfo]:
    # The sort is stable: where an optimiser keeps two states of a tensor, the first goes to the first.
    return sorted((value for value in values if value.role in _CARRIED), key=lambda value: (value.role, value.tensor))


def _kind(value: ValueInfo) -> tuple[str, str, str, tuple[int, ...]]:
    return value.role, value.tensor, value.dtype, value.shape
