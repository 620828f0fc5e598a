"""Every layer in a training step, on every target, against PyTorch in double precision."""

import pytest
from export.layer_cases import GROUPS, group_of

from subfleet.export.programs import write_training_program
from subfleet.export.steps import training_step
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = [pytest.mark.export, pytest.mark.slow]


@pytest.mark.parametrize("target", ["onnx", "executorch"])
@pytest.mark.parametrize("group", GROUPS)
def test_layers_train(group: str, target: str) -> None:
    """Writing a program compares one step with PyTorch in double precision; a defect's message names its branch."""
    module, sample = group_of(group)
    step = training_step(
        module, sample, batch_size=3, objective=ObjectiveSettings(), optimiser=OptimiserSettings(momentum=0.0)
    )
    program = write_training_program(step, target=target, program_id=group)
    assert program.manifest.max_abs_diff <= 1e-5
    assert {value.tensor for value in step.inputs if value.role == "parameter"} == {
        name for name, _ in module.named_parameters()
    }
