"""ONNX programs must be self-contained: neither the newest nor the oldest runtime loads one with external data."""

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from export.oldest import OLDEST, needs_oldest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper
from trainers.softmax_program import CLASSES, FEATURES, SHAPE, samples, weights

from subfleet.protocol.errors import TrainingError
from subfleet.tasks import write_npz
from subfleet.trainers.onnx_references import check_self_contained

WEIGHT = np.asarray(weights()["head.weight"], np.float32)
PREDICT = """
import sys
from pathlib import Path
import onnxruntime
from subfleet.protocol.errors import TrainingError
from subfleet.trainers.onnx import OnnxTrainer
print(onnxruntime.__version__)
try:
    print(OnnxTrainer().predict(Path(sys.argv[1]), sys.argv[2]).accuracy)
except TrainingError as error:
    print(error)
"""


def move_to_file(tensor: TensorProto, location: str) -> TensorProto:
    """Move the tensor's data to a file."""
    size = len(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(size))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def weight_at(location: str, name: str = "weight") -> TensorProto:
    tensor = helper.make_tensor(name, TensorProto.FLOAT, WEIGHT.shape, WEIGHT.tobytes(), raw=True)
    return move_to_file(tensor, location) if location else tensor


def linear(location: str = "") -> ModelProto:
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["samples"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
        ],
        "linear",
        [helper.make_tensor_value_info("samples", TensorProto.FLOAT, [4, *SHAPE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [4, CLASSES])],
        [weight_at(location)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def with_constant(graph: GraphProto, location: str) -> None:
    graph.ClearField("initializer")
    graph.node.insert(0, helper.make_node("Constant", [], ["weight"], value=weight_at(location, "")))


def in_a_constant(location: str) -> ModelProto:
    model = linear()
    with_constant(model.graph, location)
    return model


def in_a_branch(location: str) -> ModelProto:
    model = linear()
    branch = helper.make_graph(
        [helper.make_node("Identity", ["weight"], ["chosen"])],
        "branch",
        [],
        [helper.make_tensor_value_info("chosen", TensorProto.FLOAT, WEIGHT.shape)],
    )
    with_constant(branch, location)
    model.graph.initializer[0].CopyFrom(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    choice = helper.make_node("If", ["yes"], ["weight"], then_branch=branch, else_branch=branch)
    model.graph.node.insert(0, choice)
    return model


def in_a_function(location: str) -> ModelProto:
    model = linear()
    constant = helper.make_node("Constant", [], ["held"], value=weight_at(location, ""))
    model.functions.append(
        helper.make_function("local", "held", [], ["held"], [constant], [helper.make_opsetid("", 20)])
    )
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.graph.ClearField("initializer")
    model.graph.node.insert(0, helper.make_node("held", [], ["weight"], domain="local"))
    return model


def in_a_function_default(location: str) -> ModelProto:
    model = linear()
    default = AttributeProto(name="value", type=AttributeProto.TENSOR, t=weight_at(location, ""))
    model.functions.append(helper.make_function("local", "f", [], [], [], [helper.make_opsetid("", 20)]))
    model.functions[0].attribute_proto.append(default)
    return model


def in_a_sparse_tensor(location: str) -> ModelProto:
    model = linear()
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [0])
    sparse = helper.make_sparse_tensor(move_to_file(TensorProto(name="s"), location), indices, [4])
    model.graph.sparse_initializer.append(sparse)
    return model


def in_training_information(location: str) -> ModelProto:
    model = linear()
    model.training_info.add().algorithm.initializer.append(weight_at(location))
    return model


def in_a_list_of_tensors(location: str) -> ModelProto:
    model = linear()
    model.graph.node[0].attribute.append(AttributeProto(name="all", tensors=[weight_at(location)]))
    return model


def in_a_second_graph(location: str) -> ModelProto:
    """Parsers merge two graph fields: the tensors of the second belong to the first."""
    model = ModelProto()
    model.ParseFromString(linear().SerializeToString())
    more = ModelProto()
    more.graph.initializer.append(weight_at(location))
    model.MergeFromString(more.SerializeToString())
    return model


MODELS: MappingProxyType[str, Callable[[str], ModelProto]] = MappingProxyType(
    {
        build.__name__: build
        for build in (
            *(linear, in_a_constant, in_a_branch, in_a_function, in_a_function_default),
            *(in_a_sparse_tensor, in_training_information, in_a_list_of_tensors, in_a_second_graph),
        )
    }
)
LOADABLE_MODELS = ("linear", "in_a_constant", "in_a_function")
"""Models for which the runtime would read the external weight."""


@pytest.mark.parametrize("location", ["/etc/hostname", "weights.bin", "../secret", "*/_ORT_MEM_ADDR_/*"])
@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_in_another_file_is_refused(name: str, location: str) -> None:
    with pytest.raises(TrainingError, match="external data"):
        check_self_contained(MODELS[name](location).SerializeToString())


def test_a_file_that_a_provider_compiled_is_refused() -> None:
    model = linear()
    attributes = {"embed_mode": 0, "ep_cache_context": "/etc/hostname"}
    model.graph.node.append(helper.make_node("EPContext", [], ["x"], domain="com.microsoft", **attributes))
    with pytest.raises(TrainingError, match="EPContext"):
        check_self_contained(model.SerializeToString())


def within(operator: str, *, in_function: bool = False) -> ModelProto:
    """A program with a node that has a body, in the graph or in one of its functions."""
    model = linear()
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    body = helper.make_graph([helper.make_node("Identity", ["logits"], ["x"])], "body", [], [value])
    names = ("then_branch", "else_branch") if operator == "If" else ("body",)
    node = helper.make_node(operator, ["count", "yes"], ["x"], **dict.fromkeys(names, body))
    if in_function:
        opset = helper.make_opsetid("", 20)
        model.functions.append(helper.make_function("local", "f", ["count", "yes"], ["x"], [node], [opset]))
    else:
        model.graph.node.append(node)
    return model


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("operator", ["Loop", "Scan", "If"])
def test_control_flow_without_a_bound_is_refused(operator: str, in_function: bool) -> None:
    with pytest.raises(TrainingError, match=f"a node of the program is '{operator}'.* run forever"):
        check_self_contained(within(operator, in_function=in_function).SerializeToString())


def test_a_loop_within_the_body_of_another_node_is_refused_too() -> None:
    model = linear()
    body = within("Loop").graph
    model.graph.node.append(helper.make_node("SequenceMap", ["x"], ["y"], body=body))
    with pytest.raises(TrainingError, match="'Loop'"):
        check_self_contained(model.SerializeToString())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x30\x00\x00\x00ORTM", "own format"),
        (b"\x3a", "a number is truncated"),
        (b"\x3a\x05\x00", "a field has 5 bytes, but only 1 are left"),
        (b"\x3b\x3c", "wire type 3"),
        (b"\x00\x01", "the tag 0"),
        # A tag that other parsers truncate to 32 bits and read as the graph.
        (b"\xba\x80\x80\x80\x80\x01\x00", "has the tag"),
        (b"\xff" * 11, "too long"),
    ],
)
def test_invalid_models_are_refused_in_one_sentence(content: bytes, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        check_self_contained(content)


def test_depth_is_bounded() -> None:
    content = b""
    for _ in range(60):  # a graph in an attribute of a node of the next graph
        content = _field(1, _field(5, _field(6, content)))
    with pytest.raises(TrainingError, match="deep"):
        check_self_contained(_field(7, content))


@pytest.mark.slow
def test_a_program_of_empty_messages_takes_no_memory() -> None:
    content = _field(7, _field(1, b"") * 60_000)
    tracemalloc.start()
    try:
        check_self_contained(content)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000 < len(content)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


@given(st.binary(max_size=200))
@example(linear().SerializeToString())
@example(linear().SerializeToString()[:-3])
def test_any_bytes_are_taken_or_refused(content: bytes) -> None:
    with suppress(TrainingError):
        check_self_contained(content)


@given(name=st.sampled_from(sorted(MODELS)), position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_nothing_that_names_a_file_is_taken_after_damage(name: str, position: int, byte: int) -> None:
    """Compared with the parser of `onnx`: a program in which it finds external data is always refused."""
    content = bytearray(MODELS[name]("/etc/hostname").SerializeToString())
    content[position % len(content)] = byte
    model = ModelProto()
    try:
        check_self_contained(bytes(content))
        model.ParseFromString(bytes(content))
    except (TrainingError, DecodeError):
        return
    assert "/etc/hostname" not in {entry.value for entry in _external(model)}


def _external(message: Any) -> list[Any]:
    """Every external reference, by the message descriptors of `onnx`."""
    entries = list(getattr(message, "external_data", ()))
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if hasattr(value, "__len__") else (value,):
                entries += _external(part)
    return entries


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["newest", pytest.param("oldest", marks=needs_oldest)])
@pytest.mark.parametrize("name", LOADABLE_MODELS)
def test_no_runtime_reads_a_file_of_the_device(runtime: str, name: str, tmp_path: Path) -> None:
    dataset = samples(4)
    write_npz(tmp_path / "data.npz", dataset)
    secret, model = tmp_path / "secret", tmp_path / "model.onnx"
    secret.write_bytes(WEIGHT.tobytes())
    model.write_bytes(MODELS[name](str(secret)).SerializeToString())
    message = predict(runtime, model, tmp_path / "data.npz")
    assert "lies in another file (external data)" in message
    model.write_bytes(MODELS[name]("").SerializeToString())
    is_correct = (dataset.inputs.reshape(4, FEATURES) @ WEIGHT).argmax(1) == dataset.labels
    assert float(predict(runtime, model, tmp_path / "data.npz")) == pytest.approx(np.mean(is_correct))


def predict(runtime: str, model: Path, data: Path) -> str:
    environment = {"PYTHONPATH": os.pathsep.join([str(OLDEST), *sys.path])} if runtime == "oldest" else {}
    process = subprocess.run(
        [sys.executable, "-c", PREDICT, str(model), str(data)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    version, output = process.stdout.splitlines()
    assert (version == "1.23.2") == (runtime == "oldest")
    return output
