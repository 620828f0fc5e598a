"""Each convolutional family, trained by the devices' own runtimes, compared with an ordinary PyTorch loop.

Running statistics are buffers: they arrive with the weights, and their change returns with the update.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL, LAYERED
from matrices import crossed
from shared_programs import program_bytes

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.elastic.axes import Axis
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family, Network
from subfleet.export.requests import TrainRequest
from subfleet.protocol.jobs import Job, Trainer
from subfleet.protocol.submodel import Architecture, Centre, IndexSet, Prefix
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings
from subfleet.tasks import Dataset, iter_batches, write_npz
from subfleet.testing.submodels import tie_axes
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.onnx import OnnxTrainer

EVERY = {**CONVOLUTIONAL, **LAYERED}
TRAINERS: dict[str, Callable[[], Trainer]] = {"onnx": OnnxTrainer, "executorch": ExecutorchTrainer}
pytestmark = [pytest.mark.export, pytest.mark.slow]

SETTINGS = TrainingSettings(epochs=1, batch_size=6, learning_rate=0.05, seed=3)
SAMPLES = 10
"""The second batch contains padding, which running statistics must ignore."""


def half(network: Network) -> Architecture:
    """Half of every axis, the middle of every kernel, and an optional block only where it has a learnable step."""
    axes = {name: half_of(axis) for name, axis in sorted(network.axes.items()) if axis.kind != "class"}
    blocks = network.blocks[-1:] if network.config.learnable_steps else ()
    architecture = Architecture(axes=tuple(axes.items()), blocks=tuple(block.name for block in blocks))
    return network.size_of(tie_axes(network, architecture))


def half_of(axis: Axis) -> IndexSet:
    if axis.kind == "kernel":
        return Centre(size=max(3, axis.size - 2))
    return Prefix(size=-(-axis.size // (2 * axis.granularity)) * axis.granularity)


def dataset_for(config: Family) -> Dataset:
    generator = np.random.default_rng(0)
    return Dataset(
        inputs=generator.standard_normal((SAMPLES, *config.input_shape)).astype(np.float32),
        labels=generator.integers(config.class_count, size=SAMPLES),
    )


def write_job(folder: Path, config: Family, target: str, start: dict[str, torch.Tensor]) -> Job[Train]:
    request = TrainRequest(
        model=config,
        architecture=half(network_of(config)),
        target=target,
        batch_size=SETTINGS.batch_size,
        objective=SETTINGS.objective,
        optimiser=SETTINGS.optimiser,
    )
    write_npz(folder / "data.npz", dataset_for(config))
    (folder / "program").write_bytes(program_bytes(request))
    (folder / "weights").write_bytes(encode_arrays({name: tensor.numpy() for name, tensor in start.items()}))
    return Job(
        work=Train(settings=SETTINGS),
        program_path=folder / "program",
        weights_path=folder / "weights",
        output_path=folder / "update",
        data=str(folder / "data.npz"),
        round=1,
        client_id="laptop",
        memory_limit_bytes=2**30,
    )


def eager_change(config: Family, start: dict[str, torch.Tensor]) -> dict[str, npt.NDArray[np.float32]]:
    network = network_of(config)
    module = build_module(network, half(network))
    module.load_state_dict(start)
    optimiser = torch.optim.SGD(module.parameters(), SETTINGS.learning_rate, momentum=SETTINGS.optimiser.momentum)
    dataset = dataset_for(config)
    for indices, mask in iter_batches(
        SAMPLES, SETTINGS.batch_size, seed=SETTINGS.seed, round_number=1, client_id="laptop", epoch=0
    ):
        real = indices[mask == 1]
        optimiser.zero_grad()
        logits = module(torch.from_numpy(dataset.inputs[real]))
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(dataset.labels[real])).backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
        optimiser.step()
    trained = module.state_dict()
    return {name: (trained[name] - start[name]).numpy() for name in start}


@pytest.mark.parametrize(
    ("name", "target"),
    crossed(
        [name for name in EVERY if name != "plain vgg"], TRAINERS, "bottleneck", "mobilenet_v3", "nas_bench_201", "vgg"
    ),
)
def test_a_submodel_trains_as_in_pytorch(tmp_path: Path, name: str, target: str) -> None:
    trainer = TRAINERS[target]()
    config = EVERY[name]
    network = network_of(config)
    start = extract(network, half(network), init_state(network, 0))
    job = write_job(tmp_path, config, trainer.target, start)
    trainer.train(job, lambda: False)
    actual, expected = decode_arrays(job.output_path.read_bytes()), eager_change(config, start)
    assert actual.keys() == expected.keys()
    for tensor, change in expected.items():
        assert np.abs(np.asarray(actual[tensor], np.float64) - change).max() < 2e-5, tensor
    measured = [tensor for tensor, decl in network.tensors.items() if decl.role in ("mean", "variance")]
    assert bool(measured) == (config.norm == "batch")
    assert all(expected[tensor].any() for tensor in measured if tensor in expected)
