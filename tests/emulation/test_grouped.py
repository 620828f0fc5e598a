"""Clients that train together: what each learns is what it learns alone, up to rounding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from emulation.batch_cases import experiment
from torch import Tensor, nn
from torch.nn import functional

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.families.records.recurrent import Lstm
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.network import Family
from subfleet.elastic.recording.loading import record_network
from subfleet.emulation.batch import grouped, grouped_steps
from subfleet.emulation.batch.grouped import GroupJob, Groups
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.batch.trainers import SharedHost
from subfleet.export.pool import ExportPool
from subfleet.export.requests import TrainRequest
from subfleet.export.targets.torch import write_torch_program
from subfleet.programs.supply import build_train_request
from subfleet.protocol.errors import ConfigError, DivergedError
from subfleet.protocol.jobs import Job
from subfleet.protocol.programs import encode_program
from subfleet.protocol.task import Train
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings, TrainingSettings
from subfleet.settings.fleet import HostSettings
from subfleet.tasks import Dataset
from subfleet.trainers.torch import TorchTrainer

pytestmark = [pytest.mark.slow, pytest.mark.export]
CLASSES, PLANNED_BYTES = 4, 10**6
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


class Mixed(nn.Module):
    """Convolutions, batch norm, pooling and dropout, as others write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.drop = nn.Conv2d(6, 8, 3, groups=2), nn.Dropout(0.3)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) to (batch, classes)."""
        features = functional.max_pool2d(functional.relu(self.norm(self.first(images))), 2)
        features = self.drop(functional.gelu(self.second(features)))
        logits: Tensor = self.head(features.flatten(1))
        return logits


SETTINGS = TrainingSettings(epochs=2, batch_size=4, learning_rate=0.05, seed=5)
CASES: dict[str, tuple[Callable[[], Family], TrainingSettings]] = {
    "momentum": (
        lambda: Mlp(input_shape=(1, 8, 8), class_count=CLASSES, widths=(8,), depths=(2,), group_size=2),
        replace(SETTINGS, optimiser=OptimiserSettings(momentum=0.9, weight_decay=0.01, max_gradient_norm=1.0)),
    ),
    "batch norm and dropout": (lambda: record_network(Mixed(), (1, 8, 8)), SETTINGS),
    "micro-batches of a proximal objective": (
        lambda: Mlp(input_shape=(1, 8, 8), class_count=CLASSES, widths=(8,), depths=(1,), group_size=2),
        replace(SETTINGS, micro_batch_size=2, proximal_mu=0.1, objective=ObjectiveSettings(proximal=True)),
    ),
    "recurrent with adam": (
        lambda: Lstm(input_shape=(6,), class_count=CLASSES, vocabulary=CLASSES, widths=(8,), depths=(1,)),
        replace(
            SETTINGS,
            optimiser=OptimiserSettings(name="adam"),
            learning_rate=0.01,
            objective=ObjectiveSettings(name="next_token"),
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Jobs of clients with unequal numbers of samples, and the groups that train them."""

    jobs: Sequence[Job[Train]]
    groups: Groups
    host: SharedHost
    request: TrainRequest

    def known(self, index: int, **changes: Any) -> GroupJob:
        job = replace(self.jobs[index], **changes)
        return GroupJob(job=job, program_id=self.request.program_id, planned_bytes=PLANNED_BYTES)


def draw(model: Family, count: int, seed: int) -> Dataset:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, (count, *model.input_shape) if isinstance(model, Lstm) else count)
    if isinstance(model, Lstm):
        return Dataset(inputs=labels, labels=np.roll(labels, -1, axis=1))
    return Dataset(inputs=generator.standard_normal((count, *model.input_shape)).astype(np.float32), labels=labels)


def decode(content: bytes) -> dict[str, npt.NDArray[np.float64]]:
    return {name: np.asarray(array, np.float64) for name, array in decode_arrays(content).items()}


def make_bench(folder: Path, name: str, counts: Sequence[int], device: str = "cpu") -> Bench:
    make_model, settings = CASES[name]
    model = make_model()
    network = network_of(model)
    request = build_train_request(network, network.full_architecture(), "torch", settings)
    (folder / "program").write_bytes(encode_program(write_torch_program(request)))
    state = {name: tensor.numpy() for name, tensor in init_state(network, 0).items()}
    (folder / "weights").write_bytes(encode_arrays(state))
    host = SharedHost(data={f"data{index}": draw(model, count, index) for index, count in enumerate(counts)})
    jobs = [
        Job(
            work=Train(settings=settings),
            program_path=folder / "program",
            weights_path=folder / "weights",
            output_path=folder / f"update{index}",
            data=f"data{index}",
            round=1,
            client_id=f"c{index}",
            memory_limit_bytes=2**30,
        )
        for index in range(len(counts))
    ]
    groups = Groups({request.program_id: request}, host, torch.device(device), lambda: False)
    return Bench(jobs=jobs, groups=groups, host=host, request=request)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_together_each_learns_what_it_learns_alone(name: str, device: str, tmp_path: Path) -> None:
    bench = make_bench(tmp_path, name, (5, 12, 9), device)
    alone = TorchTrainer(host=bench.host)
    for index in range(3):
        bench.groups.expect(bench.known(index))
    found = [bench.groups.train(bench.known(index)) for index in (1, 0, 2)]
    for index, result in zip((1, 0, 2), found, strict=True):
        together = decode(bench.jobs[index].output_path.read_bytes())
        expected = alone.train(bench.jobs[index], lambda: False)
        assert (result.sample_count, result.step_count) == (expected.sample_count, expected.step_count)
        assert (result.loss, result.accuracy) == pytest.approx((expected.loss, expected.accuracy), abs=1e-5)
        changed = decode(bench.jobs[index].output_path.read_bytes())
        assert together.keys() == changed.keys()
        for tensor, array in changed.items():
            np.testing.assert_allclose(together[tensor], array, atol=1e-5, err_msg=tensor)
        assert max(np.abs(array).max() for array in changed.values()) > 1e-2, "it learns"


def test_one_that_diverges_leaves_the_others(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "momentum", (6, 6, 6))
    spoiled = replace(SETTINGS, learning_rate=1e30, optimiser=CASES["momentum"][1].optimiser)
    bench.groups.expect(bench.known(1, work=Train(settings=spoiled)))
    bench.groups.expect(bench.known(2))
    bench.groups.train(bench.known(0))
    with pytest.raises(DivergedError):
        bench.groups.train(bench.known(1, work=Train(settings=spoiled)))
    bench.groups.train(bench.known(2))
    assert [job.output_path.exists() for job in bench.jobs] == [True, False, True]


def test_memory_bounds_a_group_and_a_new_task_replaces_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, sizes = make_bench(tmp_path, "momentum", (6, 6, 6)), list[int]()
    make = grouped_steps.make_group_step

    def counting(request: TrainRequest, device: torch.device) -> grouped_steps.GroupStep:
        step = make(request, device)

        def run(values: Any) -> Any:
            sizes.append(len(next(iter(values.values()))))
            return step.run(values)

        return replace(step, run=run)

    monkeypatch.setattr(grouped, "make_group_step", counting)
    monkeypatch.setattr(grouped, "GROUP_BYTES", 2 * PLANNED_BYTES)
    for index in range(3):
        bench.groups.expect(bench.known(index))
    bench.groups.train(bench.known(0))
    assert set(sizes) == {1, 2}
    assert bench.jobs[1].output_path.exists()
    bench.groups.expect(bench.known(1, output_path=tmp_path / "newer"))
    assert not bench.jobs[1].output_path.exists(), "nobody will ask for it"


def play(exports: ExportPool, **host: Any) -> BatchResult:
    return run_batch(experiment(host=HostSettings(type="batch", **host)), exports)


def test_a_run_decides_as_with_exact_numerics_and_repeats_its_bits(exports: ExportPool) -> None:
    exact, first, again = play(exports), play(exports, numerics="grouped"), play(exports, numerics="grouped")
    assert first.model == again.model
    assert first.model != exact.model, "PyTorch rounds in another order"
    for name, array in decode(exact.model).items():
        np.testing.assert_allclose(decode(first.model)[name], array, atol=1e-5, err_msg=name)
    for one, other in zip(exact.rounds, first.rounds, strict=True):
        for row, same in zip(one.clients, other.clients, strict=True):
            assert (row.client_id, row.architecture, row.status) == (same.client_id, same.architecture, same.status)
            assert (row.bytes_up, row.planned_peak_bytes) == (same.bytes_up, same.planned_peak_bytes)
        assert one.loss == pytest.approx(other.loss, abs=1e-4)


def test_workers_train_exactly_only() -> None:
    with pytest.raises(ConfigError, match="workers is 2, but grouped numerics"):
        HostSettings(type="batch", numerics="grouped", workers=2)
