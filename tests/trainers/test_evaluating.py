"""Models evaluated on held-out data: every runtime compared with plain PyTorch, and refusals."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from agent.agent_cases import evaluate_task
from elastic.token_cases import DECODER
from shared_programs import program_bytes
from torch.nn import functional
from trainers.test_trainer_parity import CONFIGS, RUNTIMES, SAMPLES, never, part_of_digits, smallest, trainer_of

from subfleet.agent.outcomes import EvaluationEnded
from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families.records.plain import Fcn
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family
from subfleet.export.requests import EvaluateRequest, TrainRequest
from subfleet.protocol.answers import sum_totals
from subfleet.protocol.errors import DataError, LoadError, MemoryLimitError, ProtocolError, TrainingError
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.jobs import Job
from subfleet.protocol.programs import ProgramManifest, ProgramRef, decode_program, encode_program
from subfleet.protocol.task import Evaluate, Train
from subfleet.protocol.task_kinds import compute_metrics, find_contradiction
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings, TrainingSettings
from subfleet.tasks import Dataset, write_npz
from subfleet.tasks.metrics import MetricTally
from subfleet.trainers.layouts import read_evaluation_layout
from subfleet.trainers.onnx import OnnxTrainer

pytestmark = [pytest.mark.export, pytest.mark.slow]

BATCH = 16
PER_CLASS = EvaluationSettings(batch_size=BATCH, per_class=True)


FCN = Fcn(input_shape=(1, 8, 8), class_count=10, widths=(8,), depths=(1,))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, its objective, and held-out data; the last batch is never full."""

    config: Family
    objective: ObjectiveSettings
    data: Callable[[], Dataset]


def tokens() -> Dataset:
    """Symbols and their next symbols; every third is padding, and so is the whole last sample of the first batch."""
    generator = np.random.default_rng(5)
    inputs = generator.integers(0, 6, (SAMPLES, 5))
    labels = generator.integers(0, 6, (SAMPLES, 5))
    labels[:, ::3] = -1
    labels[BATCH - 1] = -1
    return Dataset(inputs=inputs, labels=labels)


def pixels() -> Dataset:
    """The class of the digit at each pixel; every third row has no class."""
    digits = part_of_digits()
    labels = np.broadcast_to(digits.labels[:, None, None], (SAMPLES, 8, 8)).copy()
    labels[:, ::3] = -1
    return Dataset(inputs=digits.inputs, labels=labels)


def outputs() -> Dataset:
    digits = part_of_digits()
    return Dataset(inputs=digits.inputs, labels=np.eye(10, dtype=np.float32)[digits.labels])


CASES = {
    "mlp": Case(config=CONFIGS["mlp"], objective=ObjectiveSettings(), data=part_of_digits),
    "resnet": Case(config=CONFIGS["resnet"], objective=ObjectiveSettings(), data=part_of_digits),
    "batch norm": Case(
        config=replace(CONFIGS["resnet"], norm="batch"), objective=ObjectiveSettings(), data=part_of_digits
    ),
    "tokens": Case(config=DECODER, objective=ObjectiveSettings(name="next_token"), data=tokens),
    "pixels": Case(config=FCN, objective=ObjectiveSettings(name="dense_cross_entropy"), data=pixels),
    "outputs": Case(config=CONFIGS["mlp"], objective=ObjectiveSettings(name="binary_cross_entropy"), data=outputs),
    "numbers": Case(config=CONFIGS["mlp"], objective=ObjectiveSettings(name="mean_squared_error"), data=outputs),
}


def state_of(case: Case) -> dict[str, torch.Tensor]:
    """Weights of the smallest submodel, with running statistics as after a training."""
    network = network_of(case.config)
    state = extract(network, smallest(network), init_state(network, 0))
    generator = torch.Generator().manual_seed(2)
    for name, tensor in state.items():
        if "running" in name:
            state[name] = torch.rand(tensor.shape, generator=generator) + 0.5
    return state


def write_job(folder: Path, case: Case, target: str, settings: EvaluationSettings = PER_CLASS) -> Job[Evaluate]:
    settings = replace(settings, objective=case.objective.name)
    request = EvaluateRequest(
        model=case.config,
        architecture=smallest(network_of(case.config)),
        target=target,
        batch_size=settings.batch_size,
        objective=case.objective,
    )
    write_npz(folder / "held_out.npz", case.data())
    (folder / "program").write_bytes(program_bytes(request))
    arrays = {name: tensor.numpy() for name, tensor in state_of(case).items()}
    (folder / "weights").write_bytes(encode_arrays(arrays))
    return Job(
        work=Evaluate(settings=settings),
        program_path=folder / "program",
        weights_path=folder / "weights",
        data=str(folder / "held_out.npz"),
        memory_limit_bytes=2**30,
        output_path=Path("unused"),
        client_id="laptop",
    )


def logits_of(case: Case) -> torch.Tensor:
    """Logits of plain PyTorch on all samples at once."""
    network = network_of(case.config)
    module = build_module(network, smallest(network))
    module.load_state_dict(state_of(case), strict=False)
    with torch.no_grad():
        logits: torch.Tensor = module.eval()(torch.from_numpy(case.data().inputs))
    return logits


def confusion(case: Case) -> npt.NDArray[np.int64]:
    """The confusion matrix of the labels that count: rows of true classes, columns of predicted ones."""
    from sklearn.metrics import confusion_matrix

    labels = case.data().labels.ravel()
    predicted = logits_of(case).argmax(-1).numpy().ravel()
    known = range(case.config.class_count)
    matrix: npt.NDArray[np.int64] = confusion_matrix(labels[labels >= 0], predicted[labels >= 0], labels=known)
    return matrix


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", ["mlp", "resnet", "batch norm", "tokens", "pixels"])
def test_an_evaluation_is_that_of_pytorch_and_changes_nothing(tmp_path: Path, runtime: str, name: str) -> None:
    case, trainer = CASES[name], trainer_of(runtime, tmp_path)
    job = write_job(tmp_path, case, trainer.target)
    before = job.weights_path.read_bytes()
    result = trainer.evaluate(job, never)

    labels, logits = torch.from_numpy(case.data().labels), logits_of(case)
    expected = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-1)
    table = confusion(case)
    assert result.sums.class_predicted == (tuple(table.sum(0)) if name != "tokens" else ())
    assert result.loss == pytest.approx(float(expected), rel=1e-5)
    assert result.class_counts == tuple(table.sum(1))
    assert result.class_correct == tuple(table.diagonal())
    assert result.accuracy == table.trace() / table.sum()
    assert (result.sample_count, result.label_count) == (SAMPLES, table.sum())
    assert job.weights_path.read_bytes() == before
    assert trainer.evaluate(job, never).loss == result.loss, "a reused session starts again"


@pytest.mark.parametrize("runtime", ["onnx", "executorch", "torch"])
@pytest.mark.parametrize("name", ["outputs", "numbers"])
def test_labels_that_are_no_classes_have_the_metrics_of_their_kind(tmp_path: Path, runtime: str, name: str) -> None:
    case, trainer = CASES[name], trainer_of(runtime, tmp_path)
    result = trainer.evaluate(write_job(tmp_path, case, trainer.target), never)
    logits, targets = logits_of(case), torch.from_numpy(case.data().labels)
    if name == "outputs":
        expected = functional.binary_cross_entropy_with_logits(logits, targets)
        accuracy = float(((logits > 0) == (targets > 0.5)).float().mean())
    else:
        expected, accuracy = functional.mse_loss(logits, targets), 0.0
    assert result.loss == pytest.approx(float(expected), rel=1e-5)
    assert result.accuracy == pytest.approx(accuracy)
    assert (result.label_count, result.sample_count) == (SAMPLES * 10, SAMPLES)
    whole = MetricTally(case.objective.kind, 10, by_class=True)
    whole.add(logits.numpy(), targets.numpy())
    sums = whole.totals(result.loss * result.label_count)
    assert (result.class_counts, result.class_correct) == (sums.class_counts, sums.class_correct)
    assert compute_metrics(case.objective.kind, sum_totals(result)) == pytest.approx(
        compute_metrics(case.objective.kind, sums), rel=1e-4
    )
    assert not find_contradiction(case.objective.kind, sum_totals(result), 10), "a server accepts the result"


def test_classes_are_counted_on_request_even_for_one_sample(tmp_path: Path) -> None:
    case = CASES["mlp"]
    plain = write_job(tmp_path, case, "onnx", EvaluationSettings(batch_size=BATCH))
    result = OnnxTrainer().evaluate(plain, never)
    assert (result.class_counts, result.class_correct, result.label_count) == ((), (), SAMPLES)
    digits = part_of_digits()
    write_npz(Path(plain.data), Dataset(inputs=digits.inputs[:1], labels=digits.labels[:1]))
    alone = OnnxTrainer().evaluate(replace(plain, work=replace(plain.work, settings=PER_CLASS)), never)
    assert (alone.sample_count, alone.label_count, sum(alone.class_counts)) == (1, 1, 1)


def test_a_worker_evaluates_what_a_task_names(tmp_path: Path) -> None:
    job, trainer = write_job(tmp_path, CASES["tokens"], "onnx"), OnnxTrainer()
    store = AgentStore(tmp_path / "device")
    program = ProgramRef(program_id="p", target="onnx", blob=store.blobs.add(job.program_path.read_bytes()))
    weights = store.blobs.add(job.weights_path.read_bytes())
    task = evaluate_task(program=program, weights=weights, settings=job.work.settings)
    worker = TrainingWorker(
        {"onnx": trainer}, blobs=store.blobs, work_folder=store.work_folder, data="none", held_out=job.data
    )
    worker.start(task, 2**30)
    worker.join(60.0)
    outcome = worker.outcome()
    assert isinstance(outcome, EvaluationEnded)
    expected = trainer.evaluate(job, never)
    assert replace(outcome.result, measured_peak_bytes=0) == replace(expected, measured_peak_bytes=0)


def test_what_cannot_be_evaluated_says_why(tmp_path: Path) -> None:
    case = CASES["mlp"]
    job, trainer = write_job(tmp_path, case, "onnx"), OnnxTrainer()
    with pytest.raises(MemoryLimitError):
        trainer.evaluate(replace(job, memory_limit_bytes=1000), never)
    with pytest.raises(TrainingError, match="evaluation was stopped"):
        trainer.evaluate(job, lambda: True)
    with pytest.raises(ProtocolError, match="the task's batch size is 3, but its program takes 16"):
        trainer.evaluate(replace(job, work=replace(job.work, settings=EvaluationSettings(batch_size=3))), never)
    whole = part_of_digits()
    for data, words in (
        (Dataset(inputs=whole.inputs[:, :, :4], labels=whole.labels), "samples of"),
        (outputs(), "label"),
        (Dataset(inputs=whole.inputs, labels=whole.labels + 3), "label"),
    ):
        write_npz(Path(job.data), data)
        with pytest.raises(DataError, match=words):
            trainer.evaluate(job, never)
    write_npz(Path(job.data), whole)
    weights = decode_arrays(job.weights_path.read_bytes())
    job.weights_path.write_bytes(encode_arrays({name: np.full_like(array, np.nan) for name, array in weights.items()}))
    with pytest.raises(TrainingError, match="the loss of a batch is nan"):
        trainer.evaluate(job, never)
    job.weights_path.write_bytes(encode_arrays(dict(list(weights.items())[1:])))
    with pytest.raises(ProtocolError, match="must name the same tensors"):
        trainer.evaluate(job, never)


def test_a_program_for_something_else_is_refused(tmp_path: Path) -> None:
    case = CASES["mlp"]
    job, trainer = write_job(tmp_path, case, "onnx"), OnnxTrainer()
    training = Job(
        work=Train(settings=TrainingSettings(batch_size=BATCH)),
        program_path=job.program_path,
        weights_path=job.weights_path,
        output_path=tmp_path / "update",
        data=job.data,
        round=1,
        client_id="laptop",
        memory_limit_bytes=2**30,
    )
    with pytest.raises(ProtocolError, match=r"has purpose 'evaluate' .* but must have purpose 'train'"):
        trainer.train(training, never)
    request = TrainRequest(
        model=case.config,
        architecture=smallest(network_of(case.config)),
        target="onnx",
        batch_size=BATCH,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(),
    )
    job.program_path.write_bytes(program_bytes(request))
    with pytest.raises(ProtocolError, match=r"has purpose 'train' .* but must have purpose 'evaluate'"):
        trainer.evaluate(job, never)


def invalid_manifests(plain: ProgramManifest) -> dict[str, ProgramManifest]:
    """Manifests that are invalid for an evaluation."""
    masks = [value for value in plain.inputs if value.role == "sample_mask"]
    logits = plain.outputs[-1]
    return {
        "random": replace(plain, inputs=(*plain.inputs, replace(masks[0], name="r", role="random"))),
        "no mask": replace(plain, inputs=tuple(value for value in plain.inputs if value not in masks)),
        "no logits": replace(plain, outputs=plain.outputs[:-1]),
        "no count": replace(plain, outputs=tuple(value for value in plain.outputs if value.role != "count")),
        "a weight comes back": replace(
            plain, outputs=(*plain.outputs, replace(plain.inputs[-1], name="new", role="parameter"))
        ),
        "other logits": replace(plain, outputs=(*plain.outputs[:-1], replace(logits, shape=(BATCH, 3)))),
        "one tensor twice": replace(plain, inputs=(*plain.inputs, replace(plain.inputs[-1], name="again"))),
    }


def test_a_manifest_that_is_no_evaluation_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path, CASES["mlp"], "onnx")
    manifest = decode_program(job.program_path.read_bytes()).manifest
    layout = read_evaluation_layout(manifest)
    assert (layout.loss, layout.correct, layout.count, layout.logits) == ("loss", "correct", "count", "logits")
    for name, invalid in invalid_manifests(manifest).items():
        with pytest.raises(ProtocolError):
            pytest.fail(f"{name}: {read_evaluation_layout(invalid)}")


def test_a_program_that_the_runtime_refuses_is_an_error(tmp_path: Path) -> None:
    job = write_job(tmp_path, CASES["mlp"], "onnx")
    program = decode_program(job.program_path.read_bytes())
    job.program_path.write_bytes(encode_program(replace(program, body=b"no program")))
    with pytest.raises((LoadError, TrainingError, ProtocolError)):
        OnnxTrainer().evaluate(job, never)
