"""Exported chains on every runtime, compared with the unchanged supernet in PyTorch along the same paths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from matrices import mostly_long
from shared_programs import program_bytes
from torch import nn
from trainers.test_trainer_parity import TRAINERS, never

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families import AnyFamily
from subfleet.elastic.families.choice_block import draw
from subfleet.elastic.families.records.choices import ChoiceCnn, ChoiceRnn
from subfleet.elastic.maps import extract
from subfleet.export.requests import EvaluateRequest, TrainRequest
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.jobs import Job
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Evaluate, Train
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings, TrainingSettings
from subfleet.tasks import Dataset, iter_batches, split_batch, write_npz
from subfleet.trainers.program_layout import Stage
from subfleet.trainers.program_session import ProgramSession

pytestmark = [pytest.mark.export, pytest.mark.slow]
RUNTIMES = ("onnx", "executorch", "torch")
BATCH, SAMPLES = 4, 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """A supernet, its subspace, and its training settings."""

    config: AnyFamily
    choices: tuple[tuple[str, tuple[str, ...]], ...]
    settings: TrainingSettings

    @property
    def architecture(self) -> Architecture:
        return Architecture(choices=self.choices)

    def data(self, seed: int = 0) -> Dataset:
        generator = np.random.default_rng(seed)
        if isinstance(self.config, ChoiceRnn):
            symbols = generator.integers(0, 5, (SAMPLES, 6))
            labels = generator.integers(0, 5, (SAMPLES, 6))
            labels[:, ::3] = -1
            return Dataset(inputs=symbols, labels=labels)
        inputs = generator.standard_normal((SAMPLES, 1, 6, 6)).astype(np.float32)
        return Dataset(inputs=inputs, labels=generator.integers(0, 3, SAMPLES))


SETTINGS = TrainingSettings(
    epochs=2, batch_size=BATCH, learning_rate=0.05, seed=1, optimiser=OptimiserSettings(momentum=0.9, weight_decay=1e-3)
)
CASES = {
    "images": Case(
        config=ChoiceCnn(
            input_shape=(1, 6, 6),
            class_count=3,
            widths=(4, 6),
            depths=(2, 1),
            last_widths=(5,),
            operators=(("conv3", "dsconv3_half", "identity"),),
            norm="batch",
        ),
        choices=(("section0.block1", ("conv3", "identity")),),
        settings=SETTINGS,
    ),
    "symbols in parts, clipped": Case(
        config=ChoiceRnn(
            input_shape=(6,),
            class_count=5,
            vocabulary=5,
            widths=(4,),
            depths=(2,),
            embedding_width=3,
            operators=(("gru", "linear"), ("quasi_rnn", "conv5", "identity")),
        ),
        choices=(),
        settings=replace(
            SETTINGS,
            batch_size=2 * BATCH,
            micro_batch_size=BATCH,
            objective=ObjectiveSettings(name="next_token"),
            optimiser=OptimiserSettings(name="adam", max_gradient_norm=0.2),
        ),
    ),
}


def arrays_of(case: Case) -> dict[str, npt.NDArray[np.generic]]:
    network = network_of(case.config)
    state = extract(network, case.architecture, init_state(network, 0))
    return {name: tensor.numpy() for name, tensor in state.items()}


def write_job(folder: Path, case: Case, target: str) -> Job[Train]:
    settings = case.settings
    request = TrainRequest(
        model=case.config,
        architecture=network_of(case.config).full_architecture(),
        target=target,
        batch_size=settings.program_batch_size,
        objective=settings.objective,
        optimiser=settings.optimiser,
        accumulate=settings.micro_batch_size > 0,
    )
    write_npz(folder / "data.npz", case.data())
    (folder / "program").write_bytes(program_bytes(request))
    (folder / "weights").write_bytes(encode_arrays(arrays_of(case)))
    return Job(
        work=Train(settings=settings, paths=PathSettings()),
        program_path=folder / "program",
        weights_path=folder / "weights",
        output_path=folder / "update",
        data=str(folder / "data.npz"),
        round=2,
        client_id="phone",
        memory_limit_bytes=2**30,
        choices=case.choices,
    )


def train_plain(case: Case, job: Job[Train], paths: Sequence[dict[str, str]]) -> dict[str, npt.NDArray[np.float32]]:
    """Weights of the unchanged supernet after an ordinary PyTorch loop, with smaller last batches, not padding."""
    network, data, settings = network_of(case.config), case.data(), case.settings
    module = build_module(network, case.architecture).train()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays_of(case).items()}, strict=False)
    rate, rule = settings.learning_rate, settings.optimiser
    optimiser: torch.optim.Optimizer = (
        torch.optim.Adam(module.parameters(), lr=rate)
        if rule.name == "adam"
        else torch.optim.SGD(module.parameters(), lr=rate, momentum=rule.momentum, weight_decay=rule.weight_decay)
    )
    remaining = iter(paths)
    for epoch in range(settings.epochs):
        rest = {"seed": settings.seed, "round_number": job.round, "client_id": job.client_id, "epoch": epoch}
        for indices, mask in iter_batches(len(data), settings.batch_size, **rest):  # type: ignore[arg-type]
            optimiser.zero_grad(set_to_none=True)
            count = int((data.labels[indices[mask > 0]] >= 0).sum())
            for part, part_mask in split_batch(indices, mask, settings.program_batch_size):
                draw(module, next(remaining))
                real = part[part_mask > 0]
                logits = module(torch.from_numpy(data.inputs[real])).flatten(0, -2)
                labels = torch.from_numpy(data.labels[real]).flatten()
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-1) / count
                loss.backward()  # type: ignore[no-untyped-call] # PyTorch's own
            if rule.max_gradient_norm:
                torch.nn.utils.clip_grad_norm_(module.parameters(), rule.max_gradient_norm)
            optimiser.step()
    return {name: tensor.numpy() for name, tensor in module.state_dict().items() if tensor.is_floating_point()}


@pytest.fixture
def drawn_paths(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The operators of every path, call by call."""
    paths: list[dict[str, str]] = []
    original = ProgramSession.step

    def step(self: ProgramSession, path: Sequence[Stage], *rest: object, **named: object) -> object:
        paths.append({stage.link: stage.operator.name for stage in path if stage.operator.name})
        return original(self, path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ProgramSession, "step", step)
    return paths


def trained_weights(job: Job[Train]) -> dict[str, npt.NDArray[np.float32]]:
    before, changed = (decode_arrays(path.read_bytes()) for path in (job.weights_path, job.output_path))
    return {name: np.asarray(before[name], np.float32) + np.asarray(changed[name], np.float32) for name in changed}


@pytest.mark.parametrize(
    ("name", "runtime"),
    mostly_long(
        product(CASES, RUNTIMES), *zip(("images", "symbols in parts, clipped", "images"), RUNTIMES, strict=True)
    ),
)
def test_a_chain_trains_what_pytorch_trains(
    tmp_path: Path, drawn_paths: list[dict[str, str]], name: str, runtime: str
) -> None:
    case, trainer = CASES[name], TRAINERS[runtime]()
    job = write_job(tmp_path, case, trainer.target)
    result = trainer.train(job, never)
    expected, actual = train_plain(case, job, drawn_paths), trained_weights(job)
    assert actual.keys() == expected.keys()
    for tensor, array in expected.items():
        np.testing.assert_allclose(actual[tensor], array, rtol=2e-3, atol=2e-4, err_msg=tensor)
    assert len({tuple(path.values()) for path in drawn_paths}) > 1
    assert [sum(dict(counts).values()) for _, counts in result.operator_examples] == [2 * SAMPLES] * len(drawn_paths[0])
    first = job.output_path.read_bytes()
    assert replace(trainer.train(job, never), train_seconds=0, measured_peak_bytes=0) == replace(
        result, train_seconds=0, measured_peak_bytes=0
    )
    assert job.output_path.read_bytes() == first, "a reused chain starts again"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_population_is_evaluated_as_pytorch_does(tmp_path: Path, runtime: str) -> None:
    case, trainer = CASES["images"], TRAINERS[runtime]()
    network, data = network_of(case.config), case.data(seed=1)
    request = EvaluateRequest(
        model=case.config,
        architecture=network.full_architecture(),
        target=trainer.target,
        batch_size=BATCH,
        objective=ObjectiveSettings(),
    )
    write_npz(tmp_path / "held_out.npz", data)
    (tmp_path / "program").write_bytes(program_bytes(request))
    (tmp_path / "weights").write_bytes(encode_arrays(arrays_of(case)))
    population = (("conv3", "identity", "identity"), ("dsconv3_half", "conv3", "dsconv3_half"))
    job = Job(
        work=Evaluate(settings=EvaluationSettings(batch_size=BATCH, population=population)),
        program_path=tmp_path / "program",
        weights_path=tmp_path / "weights",
        data=str(tmp_path / "held_out.npz"),
        memory_limit_bytes=2**30,
        choices=case.choices,
        output_path=Path("unused"),
        client_id="laptop",
    )
    result = trainer.evaluate(job, never)
    module = build_module(network, case.architecture).eval()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays_of(case).items()}, strict=False)
    for path, score in zip(population, result.scores, strict=True):
        draw(module, dict(zip(network.choices, path, strict=True)))
        with torch.no_grad():
            logits = module(torch.from_numpy(data.inputs))
        labels = torch.from_numpy(data.labels)
        assert score.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)
        assert score.accuracy == float((logits.argmax(1) == labels).double().mean())
