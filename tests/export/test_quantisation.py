"""Models in 8-bit integers: smaller, close to their float32 originals, with a true report of their accuracy."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from matrices import mostly_long
from torch import Tensor, nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.elastic.network import Family
from subfleet.export.programs import export_inference_model
from subfleet.export.quantisation.models import QuantisationSamples, export_quantised_model, samples_of
from subfleet.export.requests import InferRequest
from subfleet.export.targets import TARGETS
from subfleet.protocol.errors import ExportError
from subfleet.protocol.jobs import Trainer
from subfleet.tasks import Dataset, load_digits, write_npz
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.onnx import OnnxTrainer

pytestmark = [pytest.mark.export, pytest.mark.slow]

MLP = Mlp(input_shape=(64,), class_count=10, widths=(64,), depths=(1,), group_size=8)
RESNET = PreactResNet(input_shape=(1, 8, 8), class_count=10, widths=(16,), depths=(1,), group_size=8)
NAMES = ("nine", "acht", "sept", "six", "cinque", "vier", "three", "dos", "caf\u00e9", "zero")
MODELS: dict[str, Family] = {"mlp": MLP, "resnet": RESNET}


def samples_for(model: Family) -> Dataset:
    data = load_digits()
    return Dataset(inputs=data.inputs.reshape(len(data), *model.input_shape), labels=data.labels)


@cache
def train_model(name: str) -> tuple[Family, dict[str, Tensor], QuantisationSamples]:
    """A network trained briefly on digits, so that its accuracy is meaningful."""
    model = MODELS[name]
    data = samples_for(model)
    network = network_of(model)
    module: nn.Module = build_module(network, network.full_architecture())
    optimiser = torch.optim.Adam(module.parameters(), 5e-3)
    inputs, labels = torch.from_numpy(data.inputs[256:].copy()), torch.from_numpy(data.labels[256:].copy())
    for first in 2 * list(range(0, len(inputs), 32)):
        optimiser.zero_grad()
        part = slice(first, first + 32)
        nn.functional.cross_entropy(module(inputs[part]), labels[part]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    state = {name: tensor.detach() for name, tensor in module.named_parameters()}
    return model, state, samples_of(data)


def request_for(model: Family, target: str, mode: str, samples: QuantisationSamples) -> InferRequest:
    return InferRequest(
        model=model,
        architecture=network_of(model).full_architecture(),
        target=target,
        weights_sha256="0" * 64,
        classes=NAMES,
        quantisation=mode,  # type: ignore[arg-type]
        samples_sha256=samples.sha256,
    )


QUANTISED = [
    ("mlp", "onnx", "dynamic"),
    ("mlp", "onnx", "static"),
    ("mlp", "executorch", "dynamic"),
    ("resnet", "onnx", "dynamic"),
    ("resnet", "onnx", "static"),
    ("resnet", "executorch", "static"),
]


@pytest.mark.parametrize(
    ("name", "target", "mode"),
    mostly_long(
        QUANTISED,
        ("mlp", "onnx", "dynamic"),
        ("resnet", "onnx", "static"),
    ),
)
def test_a_quantised_model_is_smaller_and_nearly_as_good_and_keeps_the_names_of_classes(
    name: str, target: str, mode: str, tmp_path: Path
) -> None:
    model, state, samples = train_model(name)
    request = request_for(model, target, mode, samples)
    body, report = export_quantised_model(request, state, samples)
    float_body, _ = export_inference_model(replace(request, quantisation="none", samples_sha256=""), state)

    assert report.sample_count == 128
    assert report.float_accuracy >= 0.4
    assert report.accuracy >= report.float_accuracy - 0.05
    assert report.agreement >= 0.9
    sample = torch.from_numpy(samples.inputs[:1].copy())
    expected, actual = (TARGETS[target].run(program, {"input": sample})[0] for program in (float_body, body))
    assert 0 < float((expected - actual).abs().max()) < 0.2 * float(expected.abs().max())
    if target == "onnx":
        kinds = {tensor.data_type for tensor in onnx.load_from_string(body).graph.initializer}
        assert kinds & {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    trainer: Trainer = {"onnx": OnnxTrainer, "executorch": ExecutorchTrainer}[target]()
    (tmp_path / f"model{trainer.suffix}").write_bytes(body)
    write_npz(tmp_path / "data.npz", samples_for(model))
    assert trainer.predict(tmp_path / f"model{trainer.suffix}", str(tmp_path / "data.npz")).classes == NAMES


def test_other_samples_than_the_requests_are_refused() -> None:
    model, state, samples = train_model("mlp")
    request = request_for(model, "onnx", "static", samples)
    with pytest.raises(ExportError, match="are not the request's"):
        export_quantised_model(request, state, replace(samples, sha256="1" * 64))
    with pytest.raises(ExportError, match="are of the shape"):
        export_quantised_model(request, state, replace(samples, inputs=samples.inputs[..., :3]))


def test_calibration_takes_two_samples_with_classes_or_more() -> None:
    data = load_digits()
    with pytest.raises(ExportError, match="hold 1 samples"):
        samples_of(Dataset(inputs=data.inputs[:1], labels=data.labels[:1]))
    targets = np.zeros((4, 3), np.float32)
    with pytest.raises(ExportError, match=r"labels of the shape \(4, 3\)"):
        samples_of(Dataset(inputs=data.inputs[:4], labels=targets))
    first, second = (
        samples_of(data),
        samples_of(Dataset(inputs=data.inputs[1:], labels=data.labels[1:])),
    )
    assert first.sha256 != second.sha256
    assert len(first.ranges) == len(first.inputs) == 128


def test_a_request_names_samples_just_where_it_needs_them() -> None:
    plain = InferRequest(
        model=MLP, architecture=network_of(MLP).full_architecture(), target="onnx", weights_sha256="0" * 64
    )
    with pytest.raises(ValueError, match="need quantisation samples"):
        replace(plain, quantisation="static")
    with pytest.raises(ValueError, match="need quantisation samples"):
        replace(plain, samples_sha256="1" * 64)
