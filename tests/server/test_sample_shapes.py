"""Samples of another shape than the model's: used if they have as many values, and refused with a reason if not."""

from pathlib import Path

import numpy as np
import pytest
from server.server_rig import World, config, evaluation, fleet

from subfleet.protocol.errors import DataError
from subfleet.settings.samples import DataSettings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3), (6, 1)])
def test_samples_of_another_shape_with_the_models_values_take_part(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Series in a file (samples, time, features), on a device as for the evaluation."""
    inputs, labels = evaluation()
    np.savez(tmp_path / "series.npz", x=inputs.reshape(-1, *shape), y=labels)
    settings = config(rounds=1, data=DataSettings(test=str(tmp_path / "series.npz")))
    world = World(tmp_path / "series", settings, fleet(input_shape=shape))
    plain = World(tmp_path / "plain", config(rounds=1), fleet())
    for each in (world, plain):
        each.run()
    assert {row.status for row in world.server.result().rounds[0].clients} == {"aggregated"}
    assert world.server.result().accuracy == plain.server.result().accuracy
    assert world.model_bytes() == plain.model_bytes()


def test_evaluation_data_of_another_size_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 7), np.float32), y=np.zeros(4, np.int64))
    with pytest.raises(
        DataError, match=r"data.test: .* have shape \(7,\), but the model takes \(6,\): the number of values differs"
    ):
        World(tmp_path, config(data=DataSettings(test=str(tmp_path / "wide.npz"))), fleet())
