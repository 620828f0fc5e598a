"""The memory estimate of a submodel before its export is not larger than the plan of its program."""

import pytest
from shared_programs import program_of

from subfleet.programs.supply import build_train_request
from subfleet.serving.run_context import create_context
from subfleet.settings.reading import read_run

pytestmark = [pytest.mark.slow, pytest.mark.export]


@pytest.mark.parametrize("target", ["onnx", "executorch"])
@pytest.mark.parametrize("index", [0, 2, -1])
def test_an_estimate_is_at_most_the_programs_own_plan(target: str, index: int) -> None:
    context = create_context(read_run("quickstart"), "run")
    candidate = context.first.candidates[index]
    request = build_train_request(context.network, candidate.architecture, target, context.training(1))
    planned_bytes = program_of(request).manifest.planned_peak_bytes
    assert 0.5 * planned_bytes < candidate.training_memory_bytes[target] <= planned_bytes
