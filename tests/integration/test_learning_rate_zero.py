"""A round with learning rate 0, with real programs, changes no element of the model."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.elastic.model_state import unpack_state
from subfleet.emulation.batch.host import run_in_batch
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.records import RoundRecord
from subfleet.settings.fleet import FleetSettings
from subfleet.settings.reading import read_run

pytestmark = [pytest.mark.slow, pytest.mark.export]

MODELS = {
    "mlp": read_run("quickstart").model,
    "preact_resnet": PreactResNet(input_shape=(1, 8, 8), class_count=10, widths=(8, 16), depths=(2, 1), group_size=4),
}


class Rounds:
    """Records the rounds of a run."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def say(self, text: str) -> None:
        """Ignored."""

    def round_finished(self, record: RoundRecord) -> None:
        self.records.append(record)


@pytest.fixture(scope="module")
def exports(cache: CacheFolder) -> Iterator[ExportPool]:
    with ExportPool(cache) as pool:
        yield pool


@pytest.mark.long
@pytest.mark.parametrize("family", MODELS)
def test_a_round_with_learning_rate_0_changes_nothing(family: str, exports: ExportPool, tmp_path: Path) -> None:
    full = read_run("quickstart")
    experiment = dataclasses.replace(
        full,
        min_clients=2,
        fleet=FleetSettings(
            devices=tuple(device for device in full.fleet.devices if device.id in ("pi-zero-2w", "phone"))
        ),
        model=MODELS[family],
        training=dataclasses.replace(full.training, learning_rate=0.0, epochs=1),
        rounds=1,
        deploy_targets=(),
    )
    observer = Rounds()
    run_in_batch(experiment, tmp_path / "run", observer, threading.Event(), exports=exports)
    rows = observer.records[0].clients
    assert {(row.runtime, row.status) for row in rows} == {("onnx", "aggregated"), ("executorch", "aggregated")}
    before = init_state(network_of(experiment.model), experiment.seed)
    after = unpack_state(load_file(tmp_path / "run" / "model.safetensors")).shared
    assert set(after) == set(before)
    assert all(torch.equal(after[name].view(torch.int32), before[name].view(torch.int32)) for name in before)
