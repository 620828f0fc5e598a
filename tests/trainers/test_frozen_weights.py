"""A frozen backbone is an input only: it is not trained, not in the update, and planned once."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.export.programs import write_program
from subfleet.export.steps import SampleSpec, training_step
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.jobs import Job, Trainer
from subfleet.protocol.programs import Program, encode_program
from subfleet.protocol.task import Train
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings, TrainingSettings
from subfleet.tasks import Dataset, iter_batches, write_npz
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.onnx import OnnxTrainer

BATCH, CLASSES, INPUTS, WIDTH = 8, 5, 64, 512
SETTINGS = TrainingSettings(epochs=2, batch_size=BATCH, learning_rate=0.1, seed=3)

pytestmark = [pytest.mark.slow, pytest.mark.export]


def network(*, frozen: bool) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    backbone = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    module = nn.Sequential(backbone, nn.Linear(WIDTH, CLASSES))
    with torch.no_grad():
        for part in module.parameters():
            part.copy_(torch.randn(part.shape, generator=generator) / part.shape[-1] ** 0.5)
    backbone.requires_grad_(requires_grad=not frozen)
    return module


def write(target: str, *, frozen: bool) -> Program:
    step = training_step(
        network(frozen=frozen),
        SampleSpec(shape=(INPUTS,)),
        batch_size=BATCH,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(momentum=0.9),
    )
    return write_program(step, target=target, program_id="0" * 64)


def data() -> Dataset:
    random = np.random.default_rng(0)
    inputs = random.standard_normal((3 * BATCH, INPUTS), dtype=np.float32)
    return Dataset(inputs=inputs, labels=random.integers(0, CLASSES, 3 * BATCH))


def job(folder: Path, program: Program) -> Job[Train]:
    write_npz(folder / "data.npz", data())
    (folder / "program").write_bytes(encode_program(program))
    weights = {name: part.detach().numpy() for name, part in network(frozen=True).named_parameters()}
    (folder / "weights").write_bytes(encode_arrays(weights))
    return Job(
        work=Train(settings=SETTINGS),
        program_path=folder / "program",
        weights_path=folder / "weights",
        output_path=folder / "update",
        data=str(folder / "data.npz"),
        round=1,
        client_id="device-1",
        memory_limit_bytes=2**30,
    )


def train_in_pytorch() -> dict[str, Tensor]:
    """The change of a training of the head alone."""
    module, dataset = network(frozen=True), data()
    head = [part for part in module.parameters() if part.requires_grad]
    before = {name: part.detach().clone() for name, part in module.named_parameters()}
    optimiser = torch.optim.SGD(head, lr=SETTINGS.learning_rate, momentum=0.9)
    for epoch in range(SETTINGS.epochs):
        order = {"seed": SETTINGS.seed, "round_number": 1, "client_id": "device-1", "epoch": epoch}
        for indices, _ in iter_batches(len(dataset), BATCH, **order):  # type: ignore[arg-type]
            optimiser.zero_grad()
            logits = module(torch.from_numpy(dataset.inputs[indices]))
            loss = nn.functional.cross_entropy(logits, torch.from_numpy(dataset.labels[indices]))
            torch.autograd.backward(loss)
            optimiser.step()
    return {name: part.detach() - before[name] for name, part in module.named_parameters() if part.requires_grad}


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_the_head_alone_is_trained_and_sent(target: str, tmp_path: Path) -> None:
    program = write(target, frozen=True)
    task = job(tmp_path, program)
    trainer: Trainer = OnnxTrainer() if target == "onnx" else ExecutorchTrainer()
    trainer.train(task, lambda: False)
    update, expected = decode_arrays(task.output_path.read_bytes()), train_in_pytorch()
    assert update.keys() == expected.keys() == {"1.weight", "1.bias"}
    for name, change in expected.items():
        np.testing.assert_allclose(np.asarray(update[name], np.float32), change.numpy(), rtol=1e-4, atol=1e-6)
    assert task.output_path.stat().st_size < 4 * (WIDTH + 1) * CLASSES + 1000


def split(task: Job[Train], *, twice: bool = False) -> Job[Train]:
    """The same job with the backbone in a file of its own."""
    weights = decode_arrays(task.weights_path.read_bytes())
    folder = task.weights_path.parent
    frozen = {name: array for name, array in weights.items() if name.startswith("0.")}
    others = {name: array for name, array in weights.items() if twice or name not in frozen}
    (folder / "frozen").write_bytes(encode_arrays(frozen))
    (folder / "others").write_bytes(encode_arrays(others))
    return replace(task, weights_path=folder / "others", frozen_path=folder / "frozen")


def test_a_backbone_in_a_file_of_its_own_is_the_same(tmp_path: Path) -> None:
    task, updates = job(tmp_path, write("onnx", frozen=True)), []
    for own in (task, split(task)):
        OnnxTrainer().train(own, lambda: False)
        updates.append(task.output_path.read_bytes())
    assert updates[0] == updates[1]
    with pytest.raises(ProtocolError, match=r"tensor '0\.0\.bias' is in two containers of a task, but must be in one"):
        OnnxTrainer().train(split(task, twice=True), lambda: False)


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_it_is_planned_once(target: str) -> None:
    """Without freezing, weights are planned before and after each step, and the momentum too."""
    frozen, trained = (write(target, frozen=is_frozen) for is_frozen in (True, False))
    backbone_bytes = 4 * (INPUTS * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH)
    saved_bytes = trained.manifest.memory.peak_bytes - frozen.manifest.memory.peak_bytes
    assert saved_bytes >= 3 * backbone_bytes
    assert {value.role for value in frozen.manifest.inputs if value.tensor.startswith("0.")} == {"frozen"}
    assert not [value for value in frozen.manifest.outputs if value.tensor.startswith("0.")]
