"""The pieces of a data set on disk are those of the partition."""

from pathlib import Path

import numpy as np
import pytest

from subfleet import tasks
from subfleet.emulation.experiments import experiment_named
from subfleet.emulation.slices import cut

pytestmark = pytest.mark.slow


def test_pieces_are_disjoint_and_complete(tmp_path: Path) -> None:
    experiment = experiment_named("quickstart")
    slices = cut(experiment, tmp_path)
    assert set(slices.clients) == {device.client_id for device in experiment.devices}
    pieces = [tasks.read_dataset(str(path)) for path in (slices.test, *slices.clients.values())]
    rows = np.concatenate([piece.inputs.reshape(len(piece.labels), -1) for piece in pieces])
    everything = tasks.digits().inputs.reshape(-1, 64)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, everything))


def test_the_same_experiment_gives_the_same_files(tmp_path: Path) -> None:
    experiment = experiment_named("quickstart")
    first, again = cut(experiment, tmp_path / "a"), cut(experiment, tmp_path / "b")
    for client, path in first.clients.items():
        one, other = tasks.read_dataset(str(path)), tasks.read_dataset(str(again.clients[client]))
        assert np.array_equal(one.inputs, other.inputs)
        assert np.array_equal(one.labels, other.labels)
