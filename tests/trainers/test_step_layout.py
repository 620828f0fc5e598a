from dataclasses import replace

import pytest
from trainers.softmax_program import BATCH, CLASSES, FEATURES, SHAPE, manifest

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import ProgramManifest, Role, ValueInfo
from subfleet.trainers.layouts import read_step_layout


def test_values_are_found_by_role_and_tensor_not_by_place() -> None:
    plain = manifest()
    shuffled = replace(plain, inputs=plain.inputs[::-1], outputs=plain.outputs[::-1])
    for layout in (read_step_layout(plain), read_step_layout(shuffled)):
        assert layout.input.shape == (BATCH, *SHAPE)
        assert dict(layout.carried) == {
            "weight": "weight_new",
            "bias": "bias_new",
            "weight_momentum": "weight_momentum_new",
            "bias_momentum": "bias_momentum_new",
        }
        assert (layout.loss, layout.correct) == ("loss", "correct")
        assert {value.tensor for value in layout.stored} == {"head.weight", "head.bias"}


def test_two_states_of_one_tensor_keep_their_order() -> None:
    plain = manifest()

    def state(name: str) -> ValueInfo:
        return ValueInfo(name=name, dtype="F32", shape=(CLASSES,), role="optimiser_state", tensor="head.bias")

    doubled = replace(plain, inputs=(*plain.inputs, state("second")), outputs=(*plain.outputs, state("second_new")))
    layout = read_step_layout(doubled)
    assert layout.carried["bias_momentum"] == "bias_momentum_new"
    assert layout.carried["second"] == "second_new"


@pytest.mark.parametrize("role", ["input", "label", "sample_mask", "learning_rate", "parameter", "loss", "correct"])
def test_a_missing_role_is_refused(role: Role) -> None:
    plain = manifest()
    lacking = replace(
        plain,
        inputs=tuple(value for value in plain.inputs if value.role != role),
        outputs=tuple(value for value in plain.outputs if value.role != role),
    )
    with pytest.raises(ProtocolError):
        read_step_layout(lacking)


def with_input(name: str, shape: tuple[int, ...], dtype: str = "F32") -> ProgramManifest:
    plain = manifest()
    inputs = tuple(replace(value, shape=shape, dtype=dtype) if value.name == name else value for value in plain.inputs)
    return replace(plain, inputs=inputs)


@pytest.mark.parametrize(
    "invalid",
    [
        replace(manifest(), purpose="infer"),
        replace(manifest(), batch_size=BATCH + 1),
        replace(manifest(), batch_size=0),
        replace(manifest(), inputs=(*manifest().inputs, manifest().inputs[4])),
        with_input("labels", (BATCH,), "I32"),
        with_input("mask", (BATCH, 1)),
        with_input("rate", (1,)),
        with_input("samples", (), "F32"),
        with_input("weight", (CLASSES, FEATURES)),
        with_input("bias_momentum", (CLASSES,), "F64"),
    ],
)
def test_a_program_that_cannot_be_stepped_is_refused(invalid: ProgramManifest) -> None:
    with pytest.raises(ProtocolError):
        read_step_layout(invalid)
