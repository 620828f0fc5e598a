"""A device with only some of the classes, in a fleet of real agents with folders of pictures."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from subfleet.elastic.families.records.residual import Mlp
from subfleet.export.pool import ExportPool
from subfleet.journal.records import RoundRecord
from subfleet.link.broker import EmbeddedBroker
from subfleet.link.device_link import connect_devices
from subfleet.protocol.training import TrainingSettings
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import Deadlines, LogClock
from subfleet.tasks import Dataset, read_dataset
from subfleet.trainers.onnx import OnnxTrainer
from subfleet.transport.address import parse_url
from subfleet.transport.mqtt import MqttTransport

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.export]

ROUNDS = 3
FEW = ("7", "8", "9")


class Notes:
    """An observer that records the rounds."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def say(self, text: str) -> None:
        """Ignored."""

    def round_finished(self, record: RoundRecord) -> None:
        self.records.append(record)


def write_folders(folder: Path, dataset: Dataset, indices: Iterable[int], *, name: str = "{}") -> str:
    for index in indices:
        pixels = (dataset.inputs[index, 0] * 255).round().astype(np.uint8)
        class_folder = folder / name.format(dataset.class_names[dataset.labels[index]])
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(class_folder / f"{index}.png")
    return str(folder)


@contextmanager
def run_device(url: str, folder: Path, name: str, data: str) -> Iterator[None]:
    options = ("--id", name, "--data", data, "--runtime", "onnx", "--state", str(folder / "states" / name))
    command = [sys.executable, "-m", "subfleet.edge_client.cli", "join", url, *options, "--leave-when-finished"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.fixture
def url() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.url


def test_a_device_with_three_of_ten_classes_trains_with_the_right_labels(
    tmp_path: Path, url: str, exports: ExportPool
) -> None:
    """Its folders have the ranks 0, 1, 2; with these as labels, the model would unlearn the digits 7, 8, 9."""
    train, test = read_dataset("digits:train"), read_dataset("digits:test")
    few = np.flatnonzero(np.isin(train.labels, [int(name) for name in FEW]))[::3]
    data = {
        "few": write_folders(tmp_path / "data" / "few", train, few),
        "all": write_folders(tmp_path / "data" / "all", train, np.setdiff1d(np.arange(len(train)), few)),
        "odd": write_folders(tmp_path / "data" / "odd", train, range(20), name="digit {}"),
    }
    settings = Run(
        name="classes",
        model=Mlp(input_shape=(1, 8, 8), class_count=10, widths=(64,), depths=(1,)),
        data=DataSettings(test=write_folders(tmp_path / "test", test, range(len(test)))),
        rounds=ROUNDS,
        min_clients=3,
        training=TrainingSettings(epochs=4, batch_size=16, learning_rate=0.1),
        rates=(1.0,),
        clock=LogClock(),
        deadlines=Deadlines(linger_s=0.0),
        deploy_targets=("onnx",),
    )
    notes = Notes()
    with ExitStack() as stack:
        for name, folder in data.items():
            stack.enter_context(run_device(url, tmp_path, name, folder))
        server = Server(
            settings,
            connect_devices("main", MqttTransport(parse_url(url), "server")),
            notes,
            state_folder=tmp_path / "state",
            exports=exports,
        )
        result = server.run(threading.Event())
    assert len(notes.records) == ROUNDS
    for record in notes.records:
        status = {row.client_id: row.status for row in record.clients}
        assert status.pop("odd").startswith("skipped: the run has no class 'digit 0'")
        assert status == {"few": "aggregated", "all": "aggregated"}
    assert (result.rounds[-1].accuracy or 0) >= 0.9
    (model_path,) = (model.path for model in result.deployed if model.client_id == "few")
    prediction = OnnxTrainer().predict(model_path, data["few"])
    assert prediction.metrics["accuracy"] >= 0.85
    assert prediction.classes == tuple("0123456789")
    assert np.mean(np.isin(prediction.names, FEW)) >= 0.85
