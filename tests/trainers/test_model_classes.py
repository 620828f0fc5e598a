"""Models contain the names of their classes, which predictions return and which map data, on every runtime."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from subfleet.edge_client.commands import run
from subfleet.protocol.errors import DataError, TrainingError
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.task_kinds import Objective
from subfleet.tasks import load_digits, write_npz
from subfleet.trainers import executorch
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.onnx import OnnxTrainer
from subfleet.trainers.torch import TorchTrainer

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")
from subfleet.elastic.building import build_module, init_state, network_of  # noqa: E402
from subfleet.elastic.families.records.residual import Mlp  # noqa: E402
from subfleet.export.programs import export_inference_model  # noqa: E402
from subfleet.export.requests import InferRequest  # noqa: E402
from subfleet.protocol.submodel import Architecture  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.slow]

MODEL = Mlp(input_shape=(1, 8, 8), class_count=10, widths=(16,), depths=(1,))
NAMES = ("nine", "acht", "sept", "six", "cinque", "vier", "three", "dos", "caf\u00e9", "zero")
"""In the order of the run: digit d has the index 9 - d."""
TRAINERS: dict[str, tuple[str, Callable[[], Trainer]]] = {
    "onnx": ("onnx", OnnxTrainer),
    "native binding": ("executorch", ExecutorchTrainer),
    "bindings with PyTorch": ("executorch", ExecutorchTrainer),
    "torch": ("torch", TorchTrainer),
}
HELD = (7, 8, 9)
REQUEST = InferRequest(model=MODEL, architecture=Architecture(), target="onnx", weights_sha256="0" * 64)


def state() -> dict[str, Any]:
    return dict(init_state(network_of(MODEL), 0))


@pytest.fixture
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    if request.param == "native binding":
        pytest.importorskip("subfleet_executorch")
    if request.param == "bindings with PyTorch":
        monkeypatch.setattr(executorch, "find_spec", lambda _: None)
    return TRAINERS[request.param][1]()


on_every_runtime = pytest.mark.parametrize("trainer", TRAINERS, indirect=True)


def write_model(folder: Path, trainer: Trainer, classes: tuple[str, ...]) -> Path:
    body, _ = export_inference_model(replace(REQUEST, target=trainer.target, classes=classes), state())
    path = folder / f"model{trainer.suffix}"
    path.write_bytes(body)
    return path


@on_every_runtime
def test_a_model_states_its_objective(tmp_path: Path, trainer: Trainer) -> None:
    data = load_digits()
    labels = np.eye(10, dtype=np.float32)[data.labels]
    write_npz(tmp_path / "data.npz", replace(data, labels=labels))
    objectives: dict[Objective, str] = {"mean_squared_error": "rmse", "binary_cross_entropy": "macro_f1"}
    for objective, headline in objectives.items():
        request = replace(REQUEST, target=trainer.target, objective=objective)
        body, _ = export_inference_model(request, state())
        (tmp_path / f"model{trainer.suffix}").write_bytes(body)
        prediction = trainer.predict(tmp_path / f"model{trainer.suffix}", str(tmp_path / "data.npz"))
        assert prediction.headline == headline, "labels of 0 and 1 do not determine the objective"
        assert (len(prediction.numbers), len(prediction.labels)) == ((17970, 0) if headline == "rmse" else (0, 17970))


def write_folders(folder: Path, name_of: Callable[[int], str]) -> Path:
    """Write images of three digits to folders with these names."""
    whole = load_digits()
    for digit in HELD:
        (folder / name_of(digit)).mkdir(parents=True)
        for index in np.flatnonzero(whole.labels == digit)[:5]:
            pixels = (whole.inputs[index, 0] * 255).round().astype(np.uint8)
            Image.fromarray(pixels).save(folder / name_of(digit) / f"{index}.png")
    return folder


def expected_predictions(folder: Path, name_of: Callable[[int], str]) -> list[int]:
    """The network's labels of the folder's images, in the order of their names."""
    module = network_module()
    labels = []
    for name in sorted(name_of(digit) for digit in HELD):
        for path in sorted((folder / name).iterdir()):
            pixels = np.asarray(Image.open(path), np.float32) / np.float32(255)
            with torch.no_grad():
                labels.append(int(module(torch.from_numpy(pixels[None, None])).argmax()))
    return labels


def network_module() -> Any:
    module = build_module(network_of(MODEL), Architecture())
    module.load_state_dict(state())
    return module.eval()


@on_every_runtime
def test_predictions_answer_names_and_data_are_mapped_by_them(tmp_path: Path, trainer: Trainer) -> None:
    def name_of(digit: int) -> str:
        return NAMES[9 - digit]

    data = write_folders(tmp_path / "data", name_of)
    prediction = trainer.predict(write_model(tmp_path, trainer, NAMES), str(data))
    expected = expected_predictions(data, name_of)
    assert prediction.classes == NAMES
    assert list(prediction.labels) == expected
    assert list(prediction.names) == [NAMES[label] for label in expected]
    labels = [NAMES.index(name) for name in sorted(map(name_of, HELD)) for _ in range(5)]
    assert prediction.accuracy == pytest.approx(np.mean(np.array(expected) == labels))


@on_every_runtime
def test_a_model_without_names_answers_numbers(tmp_path: Path, trainer: Trainer) -> None:
    data = write_folders(tmp_path / "data", str)
    prediction = trainer.predict(write_model(tmp_path, trainer, ()), str(data))
    assert prediction.classes == ()
    assert prediction.names == tuple(map(str, prediction.labels))
    expected = expected_predictions(data, str)
    assert prediction.accuracy == pytest.approx(np.mean(np.array(expected) == np.repeat(HELD, 5)))
    (data / "7").rename(data / "seven")
    with pytest.raises(DataError, match="the run has no class 'seven': its classes are numbers"):
        trainer.predict(tmp_path / f"model{trainer.suffix}", str(data))


def test_the_names_take_part_in_the_content_id_and_in_nothing_else() -> None:
    named = replace(REQUEST, classes=NAMES)
    assert named.program_id != REQUEST.program_id
    assert replace(named, classes=()).program_id == REQUEST.program_id
    with pytest.raises(ValueError, match="there are 1 class names, but the network has 10"):
        replace(REQUEST, classes=("a",))


@pytest.mark.parametrize("names", ["no list", '["a","a"]', '["a","b"]', '["a\\n"]', "[" * 99_999])
def test_names_that_cannot_be_are_refused(tmp_path: Path, names: str) -> None:
    import onnx

    path = write_model(tmp_path, OnnxTrainer(), NAMES)
    model = onnx.load(path)
    onnx.helper.set_model_props(model, {"class_names": names})
    onnx.save(model, path)
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 8, 8)), y=np.array([0, 1]))
    with pytest.raises(TrainingError, match="deploy it again"):
        OnnxTrainer().predict(path, str(tmp_path / "data.npz"))


def test_the_command_gives_indices_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_folders(tmp_path / "data", lambda digit: NAMES[9 - digit])
    path = write_model(tmp_path, OnnxTrainer(), NAMES)
    assert run(["predict", str(path), "--data", str(data), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["names"] == [NAMES[label] for label in output["labels"]]
    assert len(output["names"]) == 15
