"""Evaluation programs compared with plain PyTorch: their results, unchanged state, and refusals."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL
from elastic.token_cases import BERT, CLASSIFIER, DECODER, LSTM, VIT
from export.export_cases import MLP, RESNET, largest, smallest, train_request
from matrices import mostly_long
from shared_programs import program_of
from torch import Tensor, nn
from torch.nn import functional

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.network import Family
from subfleet.export.programs import export_program, write_program
from subfleet.export.requests import EvaluateRequest
from subfleet.export.steps import SampleSpec, Step, evaluation_step
from subfleet.export.targets import TARGETS
from subfleet.export.targets.torch import read_torch_step
from subfleet.export.verification.verifying import seeded_generator, verify_evaluation
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.errors import ExportError
from subfleet.protocol.programs import Program
from subfleet.protocol.training import ObjectiveSettings

pytestmark = [pytest.mark.export, pytest.mark.slow]

BATCH = 4
BATCH_NORM = replace(RESNET, norm="batch")


class Transformer(nn.Module):
    """Attention and dropout over symbols; it predicts the next symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.5, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 7))

    def forward(self, symbols: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embedding(symbols)))
        return logits


class Exits(nn.Module):
    """Two exits; the last one predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x))
        return self.first(hidden), self.last(hidden)


def request(target: str, model: Family = MLP, **changes: object) -> EvaluateRequest:
    plain = EvaluateRequest(
        model=model, architecture=largest(model), target=target, batch_size=BATCH, objective=ObjectiveSettings()
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # fields of EvaluateRequest


def step_of(name: str) -> tuple[nn.Module, Step]:
    """A module in training mode, as users pass it, and its evaluation step."""
    module: nn.Module
    if name == "transformer":
        module, sample = Transformer(), SampleSpec(shape=(5,), dtype="I64", limit=7)
        objective = ObjectiveSettings(name="next_token")
    elif name == "exits":
        module, sample, objective = Exits(), SampleSpec(shape=(5,)), ObjectiveSettings()
    else:
        model = {"batch norm": BATCH_NORM, "group norm": RESNET}[name]
        module = build_module(network_of(model), largest(model))
        sample, objective = SampleSpec(shape=model.input_shape), ObjectiveSettings()
    return module.train(), evaluation_step(module, sample, batch_size=BATCH, objective=objective)


def named_inputs(step: Step, real: int) -> dict[str, Tensor]:
    """The step's inputs by name, with `real` real samples."""
    example = step.example(torch.Generator().manual_seed(1), sample_count=real)
    return {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}


def evaluate_in_pytorch(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, float, float]:
    """Loss, correct and count of the real samples alone."""
    named = {name.partition(".")[2]: tensor for name, tensor in inputs.items() if "." in name}
    module.load_state_dict(named, strict=False)
    real = inputs["sample_mask"] > 0
    labels = inputs["label"][real]
    with torch.no_grad():
        outputs = module.eval()(inputs["input"][real])
    logits = outputs[-1] if isinstance(outputs, tuple) else outputs
    loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-1)
    counted = labels >= 0
    return float(loss), float((logits.argmax(-1) == labels)[counted].sum()), float(counted.sum())


@pytest.mark.parametrize("name", ["batch norm", "group norm", "transformer", "exits"])
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_an_evaluation_is_that_of_pytorch_in_evaluation_mode(target: str, name: str) -> None:
    module, step = step_of(name)
    program = None if target == "torch" else write_program(step, target=target, program_id=name)
    for real in (BATCH, 1):
        inputs = named_inputs(step, real)
        results = step.run(*inputs.values()) if program is None else TARGETS[target].run(bytes(program.body), inputs)
        metrics = dict(zip((value.name for value in step.outputs), results, strict=True))
        loss, correct, count = evaluate_in_pytorch(module, inputs)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
        assert (float(metrics["correct"]), float(metrics["count"])) == (correct, count)
        module.train()


EVERY_FAMILY = {**CONVOLUTIONAL, "vit": VIT, "decoder": DECODER, "bert": BERT, "classifier": CLASSIFIER, "lstm": LSTM}


@pytest.mark.parametrize(
    ("target", "name"),
    mostly_long(
        product(TARGET_NAMES, EVERY_FAMILY), ("onnx", "vit"), ("onnx", "decoder"), ("executorch", "mobilenet_v3")
    ),
)
def test_every_family_can_be_evaluated(target: str, name: str) -> None:
    objective = ObjectiveSettings(name="next_token" if name in {"decoder", "bert", "lstm"} else "cross_entropy")
    program = export_program(request(target, EVERY_FAMILY[name], batch_size=3, objective=objective))
    assert program.manifest.max_abs_diff < 1e-5


def test_nothing_is_carried_and_the_module_is_left_as_it_was() -> None:
    module, step = step_of("batch norm")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert [value.role for value in step.outputs] == ["loss", "correct", "count", "logits"]
    assert {value.role for value in step.inputs} == {"input", "label", "sample_mask", "parameter", "buffer"}
    assert all(layer.training for layer in module.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_no_step_is_paid_for(target: str) -> None:
    """Weights are held once, and there is no gradient and no state."""
    trained = program_of(train_request(target, RESNET, batch_size=BATCH))
    memory = export_program(request(target, RESNET)).manifest.memory
    assert memory.optimiser_bytes == 0
    assert 2 * memory.weights_bytes == trained.manifest.memory.weights_bytes
    assert memory.peak_bytes < trained.manifest.memory.peak_bytes


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_manifest_states_the_purpose_of_the_program(target: str) -> None:
    evaluation = request(target)
    program = export_program(evaluation)
    manifest = program.manifest
    assert (manifest.purpose, manifest.target, manifest.batch_size) == ("evaluate", target, BATCH)
    assert manifest.program_id == evaluation.program_id != train_request(target).program_id
    assert 0 <= manifest.max_abs_diff < 1e-5
    if target == "torch":
        step = read_torch_step(Program(manifest=manifest, body=program.body))
        assert step.outputs == manifest.outputs


def test_ids_depend_only_on_the_program() -> None:
    plain = request("onnx")
    assert replace(plain, architecture=replace(plain.architecture, name="other")).program_id == plain.program_id
    variants = (
        replace(plain, batch_size=5),
        replace(plain, architecture=smallest(MLP)),
        replace(plain, target="executorch"),
        replace(plain, objective=ObjectiveSettings(name="mean_squared_error")),
    )
    assert len({plain.program_id, *(variant.program_id for variant in variants)}) == 5
    with pytest.raises(ValueError, match="batch_size is 0"):
        replace(plain, batch_size=0)
    with pytest.raises(ValueError, match=r"has training terms; use objective\.plain"):
        replace(plain, objective=ObjectiveSettings(proximal=True))


def test_what_cannot_be_evaluated_is_refused() -> None:
    sample, plain = SampleSpec(shape=(5,)), ObjectiveSettings()
    with pytest.raises(ExportError, match="must be a plain one"):
        evaluation_step(nn.Linear(5, 3), sample, batch_size=2, objective=ObjectiveSettings(label_smoothing=0.1))
    norm = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ExportError, match="statistics"):
        evaluation_step(norm, sample, batch_size=2, objective=plain)
    with pytest.raises(ExportError, match="'next_token' needs logits"):
        evaluation_step(nn.Linear(5, 3), sample, batch_size=2, objective=ObjectiveSettings(name="next_token"))


def test_a_program_that_counts_padding_is_not_written() -> None:
    _, step = step_of("group norm")

    def counting_padding(example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs = [
            torch.ones_like(tensor) if value.role == "sample_mask" else tensor
            for value, tensor in zip(step.inputs, example, strict=True)
        ]
        return step.run(*inputs)

    verify_evaluation(lambda example: step.run(*example), step, seeded_generator("right"))
    with pytest.raises(ExportError, match="is off by"):
        verify_evaluation(lambda example: counting_padding(tuple(example)), step, seeded_generator("right"))
