"""Training programs of recorded networks."""

import pytest
from elastic.recorded_cases import record_case

from subfleet.elastic.building import network_of
from subfleet.elastic.recording.record import unpack_record
from subfleet.export.programs import export_program
from subfleet.export.requests import TrainRequest
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = [pytest.mark.slow, pytest.mark.export]


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_normalised_filters_are_not_taken_for_samples(target: str) -> None:
    """A norm of a batch would be one over samples, which must be told from padding; the exporter verifies each step."""
    family = record_case("standardised")
    calls = {call[0] for call in unpack_record(family.recording).training.calls}
    assert "torch.nn.functional.instance_norm" in calls
    assert "torch.nn.functional.batch_norm" not in calls
    request = TrainRequest(
        model=family,
        architecture=network_of(family).full_architecture(),
        target=target,
        batch_size=4,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(),
    )
    # Mostly 2e-7; weights are drawn, and an activation next to 0 is one more or one less in a gradient.
    assert export_program(request).manifest.max_abs_diff < 1e-2
