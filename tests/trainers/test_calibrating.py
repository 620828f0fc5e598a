"""Inputs of norms on a device's own data: every runtime compared with PyTorch on the same batches."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_programs import program_bytes
from trainers.test_trainer_parity import CONFIGS, RUNTIMES, never, part_of_digits, smallest, trainer_of

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.protocol.calibration import Calibration, NormLayer, name_sums
from subfleet.protocol.errors import MemoryLimitError, ProtocolError, TrainingError
from subfleet.protocol.jobs import Job, Trainer
from subfleet.protocol.task import Calibrate
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.tasks import Dataset, iter_batches, write_npz
from subfleet.trainers.onnx import OnnxTrainer

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")
from subfleet.elastic.building import network_of  # noqa: E402
from subfleet.elastic.maps import extract  # noqa: E402
from subfleet.elastic.network import Family, Network  # noqa: E402
from subfleet.elastic.norm_layers import norm_layers  # noqa: E402
from subfleet.elastic.running_statistics import measure_moments  # noqa: E402
from subfleet.export.requests import TrainRequest  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.slow]

CONFIG = replace(CONFIGS["resnet"], norm="batch")
SETTINGS = TrainingSettings(
    batch_size=16, learning_rate=0.0, optimiser=OptimiserSettings(momentum=0.9, weight_decay=0.1), seed=2
)


def random_state(network: Network) -> dict[str, Any]:
    """Weights, with statistics far from the data's, which must not matter."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.rand(decl.shape, generator=generator) * 0.4 + (5.0 if decl.role in ("mean", "variance") else -0.2)
        for name, decl in network.tensors.items()
    }


@cache
def program_of(target: str, config: Family) -> bytes:
    """Write a program once for all tests."""
    request = TrainRequest(
        model=config,
        architecture=smallest(network_of(config)),
        target=target,
        batch_size=SETTINGS.batch_size,
        objective=SETTINGS.objective,
        optimiser=SETTINGS.optimiser,
    )
    return program_bytes(request)


def calibration_job(
    folder: Path, target: str = "onnx", config: Family = CONFIG, data: Dataset | None = None
) -> Job[Calibrate]:
    network = network_of(config)
    architecture = smallest(network)
    weights = {name: tensor.numpy() for name, tensor in extract(network, architecture, random_state(network)).items()}
    folder.mkdir(exist_ok=True)
    write_npz(folder / "data.npz", data or part_of_digits())
    (folder / "program").write_bytes(program_of(target, config))
    (folder / "weights").write_bytes(encode_arrays(weights))
    return Job(
        work=Calibrate(settings=SETTINGS, calibration=Calibration(norms=norm_layers(network, architecture))),
        program_path=folder / "program",
        weights_path=folder / "weights",
        output_path=folder / "sums",
        data=str(folder / "data.npz"),
        round=4,
        client_id="laptop",
        memory_limit_bytes=2**30,
    )


def calibrate(trainer: Trainer, job: Job[Calibrate]) -> dict[str, Any]:
    trainer.calibrate(job, never)
    return dict(decode_arrays(job.output_path.read_bytes()))


def measure_in_pytorch(job: Job[Calibrate], config: Family, data: Dataset) -> dict[str, Any]:
    """Measure with PyTorch's own layers, with the last batch smaller instead of padded."""
    network = network_of(config)
    order = iter_batches(
        len(data), 16, seed=job.work.settings.seed, round_number=job.round, client_id=job.client_id, epoch=0
    )
    batches = [torch.from_numpy(data.inputs[indices[mask > 0]]) for indices, mask in order]
    return measure_moments(network, smallest(network), random_state(network), batches)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(actual) == {name for layer in expected for name in name_sums(layer)}
    for layer, moments in expected.items():
        count, total, squares = (actual[name] for name in name_sums(layer))
        assert (count.dtype, total.dtype, squares.dtype) == (np.int64, np.float64, np.float64)
        assert int(count) == moments.count
        scale = float(moments.squares.max())
        np.testing.assert_allclose(total, moments.total.numpy(), rtol=1e-4, atol=1e-4 * (scale * moments.count) ** 0.5)
        np.testing.assert_allclose(squares, moments.squares.numpy(), rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_sums_are_those_of_pytorch_and_nothing_is_changed(tmp_path: Path, runtime: str) -> None:
    trainer = trainer_of(runtime, tmp_path)
    job = calibration_job(tmp_path, trainer.target)
    before = job.weights_path.read_bytes()
    result = trainer.calibrate(job, never)
    sums = job.output_path.read_bytes()
    assert_same(dict(decode_arrays(sums)), measure_in_pytorch(job, CONFIG, part_of_digits()))
    assert (result.sample_count, result.step_count) == (83, 6)
    assert job.weights_path.read_bytes() == before
    trainer.calibrate(job, never)
    assert job.output_path.read_bytes() == sums, "a reused session starts again"


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_padding_takes_no_part_and_one_sample_alone_is_summed_too(tmp_path: Path, count: int) -> None:
    whole = part_of_digits()
    data = Dataset(inputs=whole.inputs[:count], labels=whole.labels[:count])
    job = calibration_job(tmp_path, data=data)
    assert_same(calibrate(OnnxTrainer(), job), measure_in_pytorch(job, CONFIG, data))


def test_a_norm_of_one_value_counts_it(tmp_path: Path) -> None:
    """After a linear layer, a last batch of one sample has one value per channel, and no variance."""
    config = replace(CONFIGS["mlp"], norm="batch", widths=(8,))
    whole = part_of_digits()
    data = Dataset(inputs=whole.inputs[:17], labels=whole.labels[:17])
    job = calibration_job(tmp_path, config=config, data=data)
    sums = calibrate(OnnxTrainer(), job)
    for layer in {name.rpartition(".")[0] for name in sums}:
        count, total, squares = (sums[name] for name in name_sums(layer))
        assert int(count) == 17
        assert bool((squares * 17 >= total**2 * (1 - 1e-6)).all()), "no sum of squares is smaller than the mean's"
        assert bool((squares > 0).any())


def test_a_scaler_is_undone(tmp_path: Path) -> None:
    """In training it divides the input of the norm; in use it does not."""
    plain = calibration_job(tmp_path / "plain")
    scaled = calibration_job(tmp_path / "scaled", config=replace(CONFIG, scaler=True))
    first, second = calibrate(OnnxTrainer(), plain), calibrate(OnnxTrainer(), scaled)
    assert {norm.scale for norm in scaled.work.calibration.norms} == {0.5}
    layers = plain.work.calibration.norms[0].name, scaled.work.calibration.norms[0].name
    for plain_name, scaled_name in zip(*map(name_sums, layers), strict=True):
        np.testing.assert_allclose(second[scaled_name], first[plain_name], rtol=1e-5)


def other_norm(job: Job[Calibrate]) -> Job[Calibrate]:
    return replace(
        job,
        work=Calibrate(
            settings=job.work.settings,
            calibration=Calibration(norms=(NormLayer(name="head", positions=1, momentum=0.1),)),
        ),
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (other_norm, ProtocolError, r"names the norm tensor 'head\.running_mean', but its program has no such"),
        (
            lambda job: replace(job, work=replace(job.work, settings=replace(SETTINGS, learning_rate=0.1))),
            ProtocolError,
            "learning rate 0.1, 1",
        ),
        (
            lambda job: replace(job, work=replace(job.work, settings=replace(SETTINGS, epochs=2))),
            ProtocolError,
            "in one pass over whole batches",
        ),
        (lambda job: replace(job, memory_limit_bytes=1000), MemoryLimitError, "1000 bytes"),
    ],
)
def test_what_cannot_be_measured_says_why(
    tmp_path: Path, change: Callable[[Job[Calibrate]], Job[Calibrate]], error: type[Exception], words: str
) -> None:
    job = calibration_job(tmp_path)
    with pytest.raises(error, match=words):
        OnnxTrainer().calibrate(change(job), never)
    with pytest.raises(TrainingError, match="calibration was stopped after 0 steps"):
        OnnxTrainer().calibrate(job, lambda: True)
    assert not job.output_path.exists()
