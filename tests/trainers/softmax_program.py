"""A training program written by hand: softmax regression, cross entropy with a sample mask, SGD with momentum."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from subfleet.arrays import encode_arrays
from subfleet.protocol.jobs import Job
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import Program, ProgramManifest, ValueInfo, encode_program
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings
from subfleet.tasks import Dataset, write_npz

MOMENTUM = 0.9
SHAPE = (2, 3)
FEATURES = 6
CLASSES = 4
BATCH = 8

# Every value of the graph is named once here: output, operator, inputs.
_NODES = (
    ("flat", "Reshape", ("samples", "flat_shape")),
    ("products", "MatMul", ("flat", "weight")),
    ("logits", "Add", ("products", "bias")),
    ("probabilities", "Softmax", ("logits",)),
    ("real_count", "ReduceSum", ("mask",)),
    ("one_hot", "OneHot", ("labels", "classes", "off_on")),
    ("mask_column", "Unsqueeze", ("mask", "last_axis")),
    ("errors", "Sub", ("probabilities", "one_hot")),
    ("real_errors", "Mul", ("errors", "mask_column")),
    ("logit_gradient", "Div", ("real_errors", "real_count")),
    ("flat_t", "Transpose", ("flat",)),
    ("weight_gradient", "MatMul", ("flat_t", "logit_gradient")),
    ("bias_gradient", "ReduceSum", ("logit_gradient", "first_axis")),
    ("logs", "Log", ("probabilities",)),
    ("picked", "Mul", ("logs", "one_hot")),
    ("real_picked", "Mul", ("picked", "mask_column")),
    ("picked_sum", "ReduceSum", ("real_picked",)),
    ("picked_mean", "Div", ("picked_sum", "real_count")),
    ("loss", "Neg", ("picked_mean",)),
    ("guesses", "ArgMax", ("logits",)),
    ("right", "Equal", ("guesses", "labels")),
    ("right_numbers", "Cast", ("right",)),
    ("real_right", "Mul", ("right_numbers", "mask")),
    ("correct", "ReduceSum", ("real_right",)),
    *(
        node
        for name in ("weight", "bias")
        for node in (
            (f"{name}_kept", "Mul", (f"{name}_momentum", "momentum")),
            (f"{name}_momentum_new", "Add", (f"{name}_kept", f"{name}_gradient")),
            (f"{name}_move", "Mul", (f"{name}_momentum_new", "rate")),
            (f"{name}_new", "Sub", (name, f"{name}_move")),
        )
    ),
)
_ATTRIBUTES = {
    "Softmax": {"axis": 1},
    "OneHot": {"axis": 1},
    "ReduceSum": {"keepdims": 0},
    "ArgMax": {"axis": 1, "keepdims": 0},
    "Cast": {"to": TensorProto.FLOAT},
    "Transpose": {"perm": [1, 0]},
}
_TYPES = {"F32": TensorProto.FLOAT, "I64": TensorProto.INT64}


def manifest(target: str = "onnx") -> ProgramManifest:
    def value(name: str, shape: tuple[int, ...], role: str, tensor: str = "", dtype: str = "F32") -> ValueInfo:
        return ValueInfo(name=name, dtype=dtype, shape=shape, role=role, tensor=tensor)  # type: ignore[arg-type] # a literal

    shapes = {"weight": (FEATURES, CLASSES), "bias": (CLASSES,)}
    return ProgramManifest(
        program_id="softmax",
        target=target,
        purpose="train",
        batch_size=BATCH,
        inputs=(
            value("samples", (BATCH, *SHAPE), "input"),
            value("labels", (BATCH,), "label", dtype="I64"),
            value("mask", (BATCH,), "sample_mask"),
            value("rate", (), "learning_rate"),
            *(value(name, shape, "parameter", f"head.{name}") for name, shape in shapes.items()),
            *(value(f"{name}_momentum", shape, "optimiser_state", f"head.{name}") for name, shape in shapes.items()),
        ),
        outputs=(
            value("loss", (), "loss"),
            value("correct", (), "correct"),
            # In another order than the inputs: only roles and tensors may match inputs and outputs.
            value("bias_momentum_new", (CLASSES,), "optimiser_state", "head.bias"),
            value("bias_new", (CLASSES,), "parameter", "head.bias"),
            value("weight_new", (FEATURES, CLASSES), "parameter", "head.weight"),
            value("weight_momentum_new", (FEATURES, CLASSES), "optimiser_state", "head.weight"),
        ),
        memory=MemoryPlan(runtime_bytes=10_000),
        max_abs_diff=0.0,
    )


def program() -> Program:
    plain = manifest()
    constants = {
        "flat_shape": np.array([BATCH, FEATURES], np.int64),
        "classes": np.array(CLASSES, np.int64),
        "off_on": np.array([0, 1], np.float32),
        "last_axis": np.array([1], np.int64),
        "first_axis": np.array([0], np.int64),
        "momentum": np.array(MOMENTUM, np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node(operator, inputs, [output], **_ATTRIBUTES.get(operator, {}))
            for output, operator, inputs in _NODES
        ],
        "softmax_regression",
        [helper.make_tensor_value_info(value.name, _TYPES[value.dtype], value.shape) for value in plain.inputs],
        [helper.make_tensor_value_info(value.name, _TYPES[value.dtype], value.shape) for value in plain.outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return Program(manifest=plain, body=model.SerializeToString())


def samples(count: int, seed: int = 0) -> Dataset:
    generator = np.random.default_rng(seed)
    inputs = generator.standard_normal((count, *SHAPE)).astype(np.float32)
    teacher = generator.standard_normal((FEATURES, CLASSES))
    return Dataset(inputs=inputs, labels=(inputs.reshape(count, FEATURES) @ teacher).argmax(1).astype(np.int64))


def weights(seed: int = 1) -> dict[str, npt.NDArray[np.generic]]:
    generator = np.random.default_rng(seed)
    return {
        "head.weight": generator.standard_normal((FEATURES, CLASSES)).astype(np.float32),
        "head.bias": generator.standard_normal(CLASSES).astype(np.float32),
    }


def write_job(
    folder: Path, dataset: Dataset, *, settings: TrainingSettings, memory_limit_bytes: int = 2**30
) -> Job[Train]:
    write_npz(folder / "data.npz", dataset)
    (folder / "program").write_bytes(encode_program(program()))
    (folder / "weights").write_bytes(encode_arrays(weights()))
    return Job(
        work=Train(settings=settings),
        program_path=folder / "program",
        weights_path=folder / "weights",
        output_path=folder / "update",
        data=str(folder / "data.npz"),
        round=3,
        client_id="device-1",
        memory_limit_bytes=memory_limit_bytes,
    )
