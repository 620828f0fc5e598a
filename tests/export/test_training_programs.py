"""Training programs of every family, submodel and target compared with PyTorch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export.export_cases import CASES, FULL_SGD, MLP, PLAIN, RESNET, largest, step_of, train_request
from matrices import crossed
from safetensors.torch import save_file
from shared_programs import program_of

from subfleet.elastic.building import build_module, network_of
from subfleet.export.programs import export_program
from subfleet.export.requests import TrainRequest
from subfleet.export.targets import TARGETS
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.programs import Program, decode_program, encode_program
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = [pytest.mark.export, pytest.mark.slow]


def run(program: Program, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {value.name: inputs[value.name] for value in program.manifest.inputs}
    results = TARGETS[program.manifest.target].run(bytes(program.body), named)
    return {value.name: result for value, result in zip(program.manifest.outputs, results, strict=True)}


def example_of(request: TrainRequest, seed: int = 7) -> dict[str, torch.Tensor]:
    step = step_of(request)
    tensors = step.example(torch.Generator().manual_seed(seed))
    return {value.name: tensor for value, tensor in zip(step.inputs, tensors, strict=True)}


_OPERATORS_OF_ALL = {"onnx": {"Mul", "Sub"}, "executorch": {"XnnpackBackend", "aten::eq.Tensor_out"}}


@pytest.mark.parametrize(
    ("case", "target"), crossed(CASES, TARGET_NAMES, "resnet largest", "ungrouped resnet scattered", "mlp largest")
)
def test_a_program_is_the_step(target: str, case: str) -> None:
    model, architecture = CASES[case]()
    request = train_request(target, model, architecture=architecture)
    program = decode_program(encode_program(program_of(request)))
    step = step_of(request)

    assert program.manifest.program_id == request.program_id
    assert (program.manifest.inputs, program.manifest.outputs) == (step.inputs, step.outputs)
    assert set(program.manifest.operators) >= _OPERATORS_OF_ALL[target]
    assert list(program.manifest.operators) == sorted(set(program.manifest.operators))
    assert 0 < program.manifest.max_abs_diff <= 1e-4
    for seed in range(3):
        inputs = example_of(request, seed)
        assert float(inputs["sample_mask"].sum()) == 3.0  # one of the four samples is padding
        expected = step.run(*inputs.values())
        for (name, result), tensor in zip(run(program, inputs).items(), expected, strict=True):
            assert torch.allclose(result, tensor, atol=1e-4, rtol=1e-4), name


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_steps_with_momentum_and_weight_decay_follow_the_optimiser_of_pytorch(target: str) -> None:
    request = train_request(target, RESNET)
    program = program_of(request)
    inputs = example_of(request)
    module = build_module(network_of(RESNET), request.architecture)
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        parameter.data.copy_(inputs[f"parameter.{name}"])
        inputs[f"momentum.{name}"] = torch.zeros_like(inputs[f"momentum.{name}"])
    optimiser = torch.optim.SGD(
        module.parameters(), lr=0.05, momentum=FULL_SGD.momentum, weight_decay=FULL_SGD.weight_decay
    )

    for seed in range(4):
        batch = example_of(request, seed=seed)
        inputs |= {name: batch[name] for name in ("input", "label", "sample_mask")}
        optimiser.zero_grad()
        logits, real = module(inputs["input"]), inputs["sample_mask"].bool()
        loss = torch.nn.functional.cross_entropy(logits[real], inputs["label"][real])
        loss.backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
        optimiser.step()
        results = run(program, inputs)
        torch.testing.assert_close(results["loss"], loss.detach(), atol=1e-5, rtol=1e-5)
        assert results["correct"] == (logits.argmax(1) == inputs["label"])[real].sum()
        inputs |= {name.removeprefix("new."): value for name, value in results.items() if name.startswith("new.")}
    for name, parameter in named.items():
        torch.testing.assert_close(inputs[f"parameter.{name}"], parameter.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_learning_rate_of_zero_changes_no_bit(target: str) -> None:
    request = train_request(target)
    inputs = example_of(request) | {"learning_rate": torch.tensor(0.0)}
    results = run(program_of(request), inputs)
    for name in (name for name in inputs if name.startswith("parameter.")):
        assert torch.equal(results[f"new.{name}"], inputs[name])


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_padding_samples_change_nothing(target: str) -> None:
    request = train_request(target, RESNET)
    program = program_of(request)
    inputs = example_of(request)
    other = inputs["input"].clone()
    other[-1] = 100.0
    first, second = run(program, inputs), run(program, inputs | {"input": other})
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-6, rtol=1e-5)
    empty = run(program, inputs | {"sample_mask": torch.zeros(4)})
    assert torch.equal(torch.stack([empty["loss"], empty["correct"]]), torch.zeros(2))


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_equal_requests_give_equal_bytes(target: str) -> None:
    request = train_request(target)
    assert export_program(request).body == program_of(request).body


def test_no_momentum_keeps_no_state() -> None:
    request = TrainRequest(
        model=MLP,
        architecture=largest(MLP),
        target="onnx",
        batch_size=1,
        objective=ObjectiveSettings(),
        optimiser=PLAIN,
    )
    roles = {value.role for value in program_of(request).manifest.inputs}
    assert roles == {"input", "label", "sample_mask", "learning_rate", "parameter"}


def test_onnx_stays_within_what_old_runtimes_read() -> None:
    model = onnx.load_from_string(bytes(program_of(train_request("onnx", RESNET)).body))
    assert model.ir_version <= 10
    assert [(opset.domain, opset.version <= 20) for opset in model.opset_import] == [("", True)]
    assert {node.domain for node in model.graph.node} == {""}


def test_a_device_without_pytorch_trains_with_the_onnx_program(tmp_path: Path) -> None:
    """A step in a process that cannot import torch gives the numbers of PyTorch."""
    request = train_request("onnx", RESNET)
    (tmp_path / "program").write_bytes(encode_program(program_of(request)))
    inputs = example_of(request)
    save_file(inputs, tmp_path / "inputs")
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'executorch', 'safetensors'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "import onnxruntime\n"
        "from subfleet.arrays import decode_arrays, encode_arrays\n"
        "from subfleet.protocol.programs import decode_program\n"
        "folder = Path(sys.argv[1])\n"
        "program = decode_program((folder / 'program').read_bytes())\n"
        "session = onnxruntime.InferenceSession(bytes(program.body), providers=['CPUExecutionProvider'])\n"
        "results = session.run(None, decode_arrays((folder / 'inputs').read_bytes()))\n"
        "names = [value.name for value in program.manifest.outputs]\n"
        "(folder / 'outputs').write_bytes(encode_arrays(dict(zip(names, results))))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    from safetensors.numpy import load_file

    step = step_of(request)
    outputs = load_file(tmp_path / "outputs")
    for value, expected in zip(step.outputs, step.run(*inputs.values()), strict=True):
        np.testing.assert_allclose(outputs[value.name], expected.numpy(), atol=1e-5, rtol=1e-5)


def test_optimiser_settings_are_part_of_the_program() -> None:
    heavy = OptimiserSettings(momentum=0.0, weight_decay=0.5)
    request = TrainRequest(
        model=MLP,
        architecture=largest(MLP),
        target="onnx",
        batch_size=2,
        objective=ObjectiveSettings(),
        optimiser=heavy,
    )
    inputs = example_of(request) | {"sample_mask": torch.zeros(2)}  # no real sample, so only weight decay acts
    results = run(program_of(request), inputs)
    for name in (name for name in inputs if name.startswith("parameter.")):
        torch.testing.assert_close(results[f"new.{name}"], inputs[name] * (1 - 0.05 * 0.5))
