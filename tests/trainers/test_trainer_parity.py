"""Every runtime compared with an ordinary PyTorch training loop, on real families and real data."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from shared_programs import program_of

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.jobs import Job, Trainer
from subfleet.protocol.programs import encode_program
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Train
from subfleet.protocol.training import AugmentationSettings, ObjectiveSettings, OptimiserSettings, TrainingSettings
from subfleet.tasks import Dataset, iter_batches, load_digits, write_npz
from subfleet.tasks.transforms.augmentation import augment, draw_augmentation
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.onnx import OnnxTrainer
from subfleet.trainers.torch import TorchTrainer

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")
from subfleet.elastic.building import build_module, init_state, network_of  # noqa: E402
from subfleet.elastic.families.records.residual import Mlp, PreactResNet  # noqa: E402
from subfleet.elastic.maps import extract  # noqa: E402
from subfleet.elastic.network import Family, Network  # noqa: E402
from subfleet.elastic.spaces import uniform_space  # noqa: E402
from subfleet.export.programs import export_inference_model  # noqa: E402
from subfleet.export.requests import InferRequest, TrainRequest  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.slow]

BATCH = 16
SAMPLES = BATCH * 5 + 3
SETTINGS = TrainingSettings(
    epochs=1,
    batch_size=BATCH,
    learning_rate=0.05,
    optimiser=OptimiserSettings(momentum=0.9, weight_decay=1e-3),
    seed=2,
)
CONFIGS: dict[str, Family] = {
    "resnet": PreactResNet(input_shape=(1, 8, 8), class_count=10, widths=(8, 16), depths=(1, 1)),
    "mlp": Mlp(input_shape=(1, 8, 8), class_count=10, widths=(32,), depths=(2,)),
}
TRAINERS: dict[str, Callable[[], Trainer]] = {
    "onnx": OnnxTrainer,
    "executorch": ExecutorchTrainer,
    "torch": TorchTrainer,
    "onnx on cuda": lambda: OnnxTrainer("cuda"),
    "torch on cuda": lambda: TorchTrainer("cuda"),
}
RUNTIMES = [pytest.param(name, marks=pytest.mark.gpu) if "cuda" in name else name for name in TRAINERS]
RICH = TrainingSettings(
    epochs=2,
    batch_size=BATCH,
    micro_batch_size=5,
    learning_rate=0.01,
    objective=ObjectiveSettings(label_smoothing=0.1, class_mask=True, proximal=True),
    optimiser=OptimiserSettings(name="adamw", weight_decay=0.01, max_gradient_norm=0.5),
    proximal_mu=0.3,
    seed=2,
)
"""Many terms at once: gradients summed and clipped, a proximal term, and logits of absent classes masked."""
Changes = dict[str, npt.NDArray[np.float32]]


def never() -> bool:
    return False


def part_of_digits() -> Dataset:
    whole = load_digits()
    return Dataset(inputs=whole.inputs[:SAMPLES], labels=whole.labels[:SAMPLES])


def smallest(network: Network) -> Architecture:
    return uniform_space(network, (0.5, 1.0))[0]


def trainer_of(runtime: str, folder: Path) -> Trainer:
    trainer = TRAINERS[runtime]()
    if "cuda" in runtime:
        write_npz(folder / "data.npz", part_of_digits())
        try:
            trainer.describe(str(folder / "data.npz"))
        except ConfigError as error:
            pytest.skip(str(error))
    return trainer


def write_real_job(
    folder: Path, config: Family, target: str, settings: TrainingSettings = SETTINGS, data: Dataset | None = None
) -> Job[Train]:
    network = network_of(config)
    architecture = smallest(network)
    program = program_of(
        TrainRequest(
            model=config,
            architecture=architecture,
            target=target,
            batch_size=settings.micro_batch_size or settings.batch_size,
            objective=settings.objective,
            optimiser=settings.optimiser,
            accumulate=settings.micro_batch_size > 0,
        )
    )
    state = extract(network, architecture, init_state(network, 0))
    write_npz(folder / "data.npz", data or part_of_digits())
    (folder / "program").write_bytes(encode_program(program))
    (folder / "weights").write_bytes(encode_arrays({name: tensor.numpy() for name, tensor in state.items()}))
    return Job(
        work=Train(settings=settings),
        program_path=folder / "program",
        weights_path=folder / "weights",
        output_path=folder / "update",
        data=str(folder / "data.npz"),
        round=4,
        client_id="laptop",
        memory_limit_bytes=2**30,
    )


def train_eagerly(config: Family, job: Job[Train]) -> tuple[Changes, float, float]:
    """An epoch of PyTorch with a smaller last batch: changes, mean loss, and the mean of the squared losses."""
    network = network_of(config)
    architecture = smallest(network)
    start = extract(network, architecture, init_state(network, 0))
    module = build_module(network, architecture)
    module.load_state_dict(start)
    optimiser = torch.optim.SGD(
        module.parameters(),
        job.work.settings.learning_rate,
        momentum=job.work.settings.optimiser.momentum,
        weight_decay=job.work.settings.optimiser.weight_decay,
    )
    dataset = part_of_digits()
    losses: list[float] = []
    for indices, mask in iter_batches(
        len(dataset), BATCH, seed=job.work.settings.seed, round_number=job.round, client_id=job.client_id, epoch=0
    ):
        real = indices[mask == 1]
        optimiser.zero_grad()
        logits = module(torch.from_numpy(dataset.inputs[real]))
        sample_losses = torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(dataset.labels[real]), reduction="none"
        )
        sample_losses.mean().backward()
        optimiser.step()
        losses += sample_losses.tolist()
    trained = module.state_dict()
    changes = {name: (trained[name] - start[name]).numpy() for name in start}
    return changes, float(np.mean(losses)), float(np.mean(np.square(losses)))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_epoch_equals_pytorch(tmp_path: Path, runtime: str) -> None:
    trainer = trainer_of(runtime, tmp_path)
    job = write_real_job(tmp_path, CONFIGS["resnet"], trainer.target)
    result = trainer.train(job, never)
    expected, loss, _ = train_eagerly(CONFIGS["resnet"], job)
    assert_close(job, expected)
    assert result.loss == pytest.approx(loss, abs=1e-5)
    assert result.step_count == 6

    trainer.train(replace(job, output_path=tmp_path / "again"), never)
    assert (tmp_path / "again").read_bytes() == job.output_path.read_bytes()

    still = replace(
        job, work=replace(job.work, settings=replace(SETTINGS, learning_rate=0.0)), output_path=tmp_path / "still"
    )
    trainer.train(still, never)
    assert not any(array.any() for array in decode_arrays(still.output_path.read_bytes()).values())


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("parts_of", [0, 5])
def test_tasks_may_request_squares_of_losses_and_a_subset_of_tensors(
    tmp_path: Path, runtime: str, parts_of: int
) -> None:
    trainer = trainer_of(runtime, tmp_path)
    settings = replace(SETTINGS, objective=ObjectiveSettings(squares=True), micro_batch_size=parts_of)
    job = write_real_job(tmp_path, CONFIGS["mlp"], trainer.target, settings)
    job = replace(job, work=replace(job.work, sends=("head.bias", "stem.weight")))
    result = trainer.train(job, never)
    expected, loss, square_loss = train_eagerly(CONFIGS["mlp"], job)
    assert_close(job, {name: expected[name] for name in job.work.sends})
    assert result.loss == pytest.approx(loss, abs=1e-5)
    assert result.square_loss == pytest.approx(square_loss, rel=1e-5)
    assert square_loss > 1.01 * loss**2  # not the squared mean

    lacking = replace(job, work=replace(job.work, sends=("head.bias", "tail.bias")), output_path=tmp_path / "lacking")
    with pytest.raises(ProtocolError, match=r"asks for the change of 'tail\.bias', but its program has no such tensor"):
        trainer.train(lacking, never)


def test_augmented_training_is_training_on_the_augmented_images(tmp_path: Path) -> None:
    augmentation = AugmentationSettings(name="crop_and_flip", padding=2)
    trainer = TorchTrainer()
    job = write_real_job(tmp_path, CONFIGS["resnet"], trainer.target, replace(SETTINGS, augmentation=augmentation))
    result = trainer.train(job, never)
    dataset = part_of_digits()
    draws = draw_augmentation(
        len(dataset), seed=SETTINGS.seed, round_number=job.round, client_id=job.client_id, epoch=0
    )
    images = augment(np.asarray(dataset.inputs, np.float32), draws, augmentation)
    write_npz(tmp_path / "changed.npz", replace(dataset, inputs=images))
    plain = replace(
        job,
        work=replace(job.work, settings=SETTINGS),
        data=str(tmp_path / "changed.npz"),
        output_path=tmp_path / "on changed images",
    )
    again = trainer.train(plain, never)
    assert plain.output_path.read_bytes() == job.output_path.read_bytes()
    assert (again.loss, again.accuracy) == (result.loss, result.accuracy)


def assert_close(job: Job[Train], expected: Changes) -> None:
    actual = decode_arrays(job.output_path.read_bytes())
    assert set(actual) == set(expected)
    assert max(np.abs(array).max() for array in expected.values()) > 1e-2
    for name, array in expected.items():
        assert np.abs(np.asarray(actual[name], np.float64) - array).max() < 1e-5, name


def train_richly(job: Job[Train], dataset: Dataset) -> tuple[Changes, float]:
    """Epochs of PyTorch on whole batches, with the settings `RICH`."""
    settings = job.work.settings
    network = network_of(CONFIGS["mlp"])
    start = extract(network, smallest(network), init_state(network, 0))
    module = build_module(network, smallest(network))
    module.load_state_dict(start)
    optimiser = torch.optim.AdamW(module.parameters(), settings.learning_rate, weight_decay=0.01)
    class_mask = torch.isin(torch.arange(10), torch.from_numpy(dataset.labels)).to(torch.float32)
    losses: list[float] = []
    for epoch in range(settings.epochs):
        losses = []
        for indices, mask in iter_batches(
            len(dataset), BATCH, seed=settings.seed, round_number=job.round, client_id=job.client_id, epoch=epoch
        ):
            real = indices[mask == 1]
            optimiser.zero_grad()
            logits = module(torch.from_numpy(dataset.inputs[real])) * class_mask
            labels = torch.from_numpy(dataset.labels[real])
            loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
            pull = sum(((tensor - start[name]) ** 2).sum() for name, tensor in module.named_parameters())
            (loss + settings.proximal_mu / 2 * pull).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimiser.step()
            losses += [loss.item()] * len(real)
    trained = module.state_dict()
    return {name: (trained[name] - start[name]).numpy() for name in start}, sum(losses) / len(losses)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_parts_of_batches_and_every_term_equal_pytorch(tmp_path: Path, runtime: str) -> None:
    whole = load_digits()
    selected = np.flatnonzero(whole.classes() < 7)[:SAMPLES]
    dataset = Dataset(inputs=whole.inputs[selected], labels=whole.labels[selected])
    trainer = trainer_of(runtime, tmp_path)
    job = write_real_job(tmp_path, CONFIGS["mlp"], trainer.target, RICH, dataset)
    result = trainer.train(job, never)
    expected, loss = train_richly(job, dataset)
    assert_close(job, expected)
    assert result.loss == pytest.approx(loss, abs=1e-5)
    assert result.step_count == 12


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_models_predictions_equal_pytorch(tmp_path: Path, runtime: str) -> None:
    trainer = trainer_of(runtime, tmp_path)
    config = CONFIGS["resnet"]
    network = network_of(config)
    architecture = smallest(network)
    state = extract(network, architecture, init_state(network, 0))
    request = InferRequest(model=config, architecture=architecture, target=trainer.target, weights_sha256="0" * 64)
    body, _ = export_inference_model(request, state)
    model_path = tmp_path / f"model{trainer.suffix}"
    model_path.write_bytes(body)
    dataset = part_of_digits()
    write_npz(tmp_path / "data.npz", dataset)
    prediction = trainer.predict(model_path, str(tmp_path / "data.npz"))
    module = build_module(network, architecture)
    module.load_state_dict(state)
    with torch.no_grad():
        expected = module(torch.from_numpy(dataset.inputs)).argmax(1)
    assert prediction.labels == tuple(expected.tolist())
    assert prediction.accuracy == pytest.approx(float((expected.numpy() == dataset.labels).mean()))
