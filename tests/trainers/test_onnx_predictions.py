"""Inference models on ONNX Runtime: predictions and their errors."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto, helper
from trainers.softmax_program import CLASSES, FEATURES, SHAPE, samples, weights

from subfleet.protocol.errors import DataError, FileError, SubfleetError, TrainingError
from subfleet.tasks import Dataset, write_npz
from subfleet.trainers.onnx import OnnxTrainer


def write_model(path: Path, batch: int | str) -> npt.NDArray[np.float32]:
    weight = np.asarray(weights()["head.weight"], np.float32)
    tensor = helper.make_tensor("weight", TensorProto.FLOAT, weight.shape, weight.tobytes(), raw=True)
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["samples"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
        ],
        "linear",
        [helper.make_tensor_value_info("samples", TensorProto.FLOAT, [batch, *SHAPE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, CLASSES])],
        [tensor],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return weight


@pytest.mark.parametrize("batch", ["batch", 1, 7])
@pytest.mark.parametrize("count", [1, 7, 65])
def test_predictions_equal_a_reference(tmp_path: Path, batch: int | str, count: int) -> None:
    dataset = samples(count)
    write_npz(tmp_path / "data.npz", dataset)
    weight = write_model(tmp_path / "model.onnx", batch)
    prediction = OnnxTrainer().predict(tmp_path / "model.onnx", str(tmp_path / "data.npz"))
    expected = (dataset.inputs.reshape(count, FEATURES) @ weight).argmax(1)
    assert prediction.labels == tuple(expected)
    assert prediction.accuracy == pytest.approx(np.mean(expected == dataset.labels))
    np.savez(tmp_path / "data.npz", x=dataset.inputs, y=dataset.labels)  # read as images of one channel
    assert OnnxTrainer().predict(tmp_path / "model.onnx", str(tmp_path / "data.npz")) == prediction


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda folder: (folder / "model.onnx").unlink(), FileError),
        (lambda folder: (folder / "model.onnx").write_bytes(b"no model"), TrainingError),
        (lambda folder: _with_samples_at(folder, 5), DataError),
        (lambda folder: write_model(folder / "model.onnx", 0), TrainingError),
    ],
)
def test_a_prediction_that_cannot_be_made_says_why(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[SubfleetError]
) -> None:
    write_npz(tmp_path / "data.npz", samples(4))
    write_model(tmp_path / "model.onnx", 4)
    spoil(tmp_path)
    with pytest.raises(error):
        OnnxTrainer().predict(tmp_path / "model.onnx", str(tmp_path / "data.npz"))


def _with_samples_at(folder: Path, *shape: int) -> None:
    write_npz(folder / "data.npz", Dataset(inputs=np.zeros((4, *shape), np.float32), labels=np.zeros(4, np.int64)))


@pytest.mark.slow
def test_memory_that_the_system_refuses_is_a_memory_error(tmp_path: Path) -> None:
    """In a process with little address space left; ONNX Runtime raises its own errors then."""
    values = 10**8
    graph = helper.make_graph(
        [
            helper.make_node("Expand", ["x", "shape"], ["wide"]),
            helper.make_node("Slice", ["wide", "start", "end", "axis"], ["y"]),
        ],
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [
            helper.make_tensor("shape", TensorProto.INT64, [2], [1, values]),
            *(
                helper.make_tensor(name, TensorProto.INT64, [1], [number])
                for name, number in zip(("start", "end", "axis"), (0, 2, 1), strict=True)
            ),
        ],
    )
    model = tmp_path / "wide.onnx"
    model.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    write_npz(tmp_path / "d.npz", Dataset(inputs=np.zeros((1, 1), np.float32), labels=np.zeros(1, np.int64)))
    code = (
        "import resource, sys; from pathlib import Path; from subfleet.trainers.onnx import OnnxTrainer\n"
        "trainer = OnnxTrainer(); trainer.describe(sys.argv[2])\n"
        "size = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize() + 2**26\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "try: trainer.predict(Path(sys.argv[1]), sys.argv[2])\n"
        "except MemoryError: print('no memory')\n"
    )
    command = [sys.executable, "-c", code, str(model), str(tmp_path / "d.npz")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.stdout == "no memory\n", process.stderr
