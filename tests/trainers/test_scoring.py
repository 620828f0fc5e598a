"""Candidates scored by training programs: every runtime compared with PyTorch on the same batches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shared_programs import program_of
from trainers.softmax_program import BATCH, samples, write_job
from trainers.test_trainer_parity import CONFIGS, RUNTIMES, never, part_of_digits, smallest, trainer_of

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.protocol.errors import DataError, MemoryLimitError, ProtocolError, TrainingError
from subfleet.protocol.jobs import Job
from subfleet.protocol.programs import encode_program
from subfleet.protocol.task import Score
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings, TrainingSettings
from subfleet.tasks import Dataset, iter_batches, write_npz
from subfleet.trainers.onnx import OnnxTrainer

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")
from elastic.zico_reference import zico_score  # noqa: E402

from subfleet.elastic.building import build_module, network_of  # noqa: E402
from subfleet.elastic.maps import extract  # noqa: E402
from subfleet.export.requests import TrainRequest  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.slow]

SETTINGS = TrainingSettings(
    batch_size=16, micro_batch_size=6, learning_rate=0.5, optimiser=OptimiserSettings(momentum=0.0), seed=1
)
"""With some seeds, one weight with nearly equal gradients in both batches dominates a layer's sum: rounding shows."""


SCORED = {**CONFIGS, "batch norm": replace(CONFIGS["resnet"], norm="batch")}
WHOLE = replace(SETTINGS, micro_batch_size=SETTINGS.batch_size, seed=10)
"""Another seed, for the same reason."""


def score_job(
    folder: Path,
    target: str,
    family: str = "mlp",
    data: Dataset | None = None,
    settings: TrainingSettings = SETTINGS,
) -> Job[Score]:
    config = SCORED[family]
    network = network_of(config)
    architecture = smallest(network)
    program = program_of(
        TrainRequest(
            model=config,
            architecture=architecture,
            target=target,
            batch_size=settings.micro_batch_size,
            objective=ObjectiveSettings(),
            optimiser=settings.optimiser,
            accumulate=True,
            one_part=settings.micro_batch_size == settings.batch_size,
        )
    )
    first = extract(network, architecture, build_module(network, network.full_architecture()).state_dict())
    write_npz(folder / "data.npz", data or part_of_digits())
    (folder / "program").write_bytes(encode_program(program))
    (folder / "weights").write_bytes(encode_arrays({name: tensor.numpy() for name, tensor in first.items()}))
    return Job(
        work=Score(settings=settings, batches=2),
        program_path=folder / "program",
        weights_path=folder / "weights",
        data=str(folder / "data.npz"),
        client_id="laptop",
        memory_limit_bytes=2**30,
        output_path=Path("unused"),
    )


def score_in_pytorch(job: Job[Score], family: str, batch_size: int = SETTINGS.batch_size) -> float:
    """Score the same first batches of the client's epoch 0 in round 0."""
    network = network_of(SCORED[family])
    dataset = part_of_digits()
    order = iter_batches(
        len(dataset), batch_size, seed=job.work.settings.seed, round_number=0, client_id=job.client_id, epoch=0
    )
    batches = [
        (torch.from_numpy(dataset.inputs[indices]), torch.from_numpy(dataset.labels[indices]))
        for indices, _ in list(order)[: job.work.batches]
    ]
    state = build_module(network, network.full_architecture()).state_dict()
    return zico_score(network, smallest(network), state, batches)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("family", ["mlp", "resnet"])
def test_a_score_is_that_of_pytorch_and_nothing_is_trained(tmp_path: Path, runtime: str, family: str) -> None:
    trainer = trainer_of(runtime, tmp_path)
    job = score_job(tmp_path, trainer.target, family)
    before = job.weights_path.read_bytes()
    score = trainer.score(job, never)
    assert score == pytest.approx(score_in_pytorch(job, family), rel=1e-4)
    assert trainer.score(job, never) == score, "a reused session starts again"
    assert job.weights_path.read_bytes() == before
    more = replace(job, work=replace(job.work, batches=3))
    assert trainer.score(more, never) == pytest.approx(score_in_pytorch(more, family), rel=1e-4)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_batch_norm_is_scored_by_the_statistics_of_each_batch(tmp_path: Path, runtime: str) -> None:
    trainer = trainer_of(runtime, tmp_path)
    job = score_job(tmp_path, trainer.target, "batch norm", settings=WHOLE)
    before = job.weights_path.read_bytes()
    for batches in (2, 3, 2):  # no score depends on an earlier one
        more = replace(job, work=replace(job.work, batches=batches))
        assert trainer.score(more, never) == pytest.approx(score_in_pytorch(more, "batch norm"), rel=1e-4)
    assert job.weights_path.read_bytes() == before


def test_batches_are_smaller_where_samples_are_few_and_never_share_one(tmp_path: Path) -> None:
    job = score_job(tmp_path, "onnx")
    larger = replace(job, work=replace(job.work, settings=replace(SETTINGS, batch_size=64)))
    assert OnnxTrainer().score(larger, never) == pytest.approx(score_in_pytorch(job, "mlp", 41), rel=1e-4)


def test_what_cannot_be_scored_says_why(tmp_path: Path) -> None:
    job, trainer = score_job(tmp_path, "onnx"), OnnxTrainer()
    with pytest.raises(DataError, match="has 83 samples, but a score needs at least 84"):
        trainer.score(replace(job, work=replace(job.work, batches=84)), never)
    with pytest.raises(MemoryLimitError):
        trainer.score(replace(job, memory_limit_bytes=1000), never)
    with pytest.raises(TrainingError, match="scoring was stopped"):
        trainer.score(job, lambda: True)
    weights = decode_arrays(job.weights_path.read_bytes())
    job.weights_path.write_bytes(encode_arrays({name: np.full_like(array, np.nan) for name, array in weights.items()}))
    with pytest.raises(DataError, match="not finite"):
        trainer.score(job, never)


def test_a_program_that_sums_no_gradients_cannot_score(tmp_path: Path) -> None:
    plain = write_job(tmp_path, samples(8), settings=TrainingSettings(batch_size=BATCH))
    job = Job(
        work=Score(settings=plain.work.settings, batches=2),
        program_path=plain.program_path,
        weights_path=plain.weights_path,
        data=plain.data,
        client_id="laptop",
        memory_limit_bytes=2**30,
        output_path=Path("unused"),
    )
    with pytest.raises(ProtocolError, match="the program does not sum gradients"):
        OnnxTrainer().score(job, never)
