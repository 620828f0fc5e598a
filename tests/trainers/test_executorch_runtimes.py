"""Both runtimes of ExecuTorch programs: the native binding, and ExecuTorch's own bindings with PyTorch."""

import gc
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from subfleet.arrays import decode_arrays
from subfleet.device_profiles.process_memory import release_free_memory
from subfleet.protocol.errors import TrainingError
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import Program, encode_program
from subfleet.protocol.training import TrainingSettings
from subfleet.trainers.executorch import ExecutorchTrainer
from subfleet.trainers.program_layout import list_stages
from subfleet.trainers.program_session import ProgramSession
from subfleet.trainers.runtime import Runtime

pytest.importorskip("executorch")
from trainers.array_runtime import loaded_program
from trainers.hidden_binding import NO_BINDING
from trainers.pte_cases import BIG, Types, scattered, with_number, write
from trainers.softmax_program import BATCH, CLASSES, SHAPE, manifest, samples, weights, write_job
from trainers.softmax_pte import pte_program

pytestmark = [pytest.mark.export, pytest.mark.slow]
Array = npt.NDArray[Any]
MODEL = Path("model.pte")


@pytest.fixture(params=["native", "bindings"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if request.param == "native":
        pytest.importorskip("subfleet_executorch", reason=NO_BINDING)
        from subfleet.trainers.executorch_native import NativeRuntime

        return NativeRuntime()
    from subfleet.trainers.executorch_bindings import BindingsRuntime

    return BindingsRuntime()


@pytest.fixture(scope="module")
def program() -> Program:
    return pte_program()


def initial_weights() -> dict[str, Array]:
    return {"weight": weights()["head.weight"], "bias": weights()["head.bias"]}


def step_inputs(rate: float = 0.1) -> Mapping[str, Any]:
    batch = samples(BATCH)
    return {
        "samples": batch.inputs,
        "labels": batch.labels,
        "mask": np.ones(BATCH, np.float32),
        "rate": np.array(rate, np.float32),
    }


def resident_bytes() -> int:
    release_free_memory()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def reference(steps: int) -> tuple[Array, float]:
    """The weight after some steps, and the last step's loss, in float64."""
    batch = samples(BATCH)
    flat, one_hot = batch.inputs.reshape(BATCH, -1).astype(np.float64), np.eye(CLASSES)[batch.labels]
    weight, bias = (array.astype(np.float64) for array in initial_weights().values())
    weight_momentum, bias_momentum, loss = np.zeros_like(weight), np.zeros_like(bias), 0.0
    for _ in range(steps):
        exponentials = np.exp(flat @ weight + bias)
        probabilities = exponentials / exponentials.sum(1, keepdims=True)
        loss = -float((np.log(probabilities) * one_hot).sum()) / BATCH
        errors = (probabilities - one_hot) / BATCH
        weight_momentum = 0.9 * weight_momentum + flat.T @ errors
        bias_momentum = 0.9 * bias_momentum + errors.sum(0)
        weight, bias = weight - 0.1 * weight_momentum, bias - 0.1 * bias_momentum
    return weight, loss


def test_a_program_gets_no_tensor_from_outside_its_own_bytes(runtime: Runtime) -> None:
    """Such programs contain no path; a host may pass them a second file, and Subfleet passes none."""

    def predict() -> Array:
        return runtime.open_model(MODEL, scattered(), 1).infer(np.ones((2, 3), np.float32))

    with pytest.raises(TrainingError, match="refused"):
        predict()


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_follow_a_reference_again_and_again(runtime: Runtime, program: Program, threads: int) -> None:
    loaded = loaded_program(runtime, program, threads)
    links = loaded.layout.chain.links
    path = tuple(list_stages(links))
    weight, loss = reference(4)
    start = weights()
    for _ in range(2):
        session = ProgramSession(loaded, links, start, {})
        read: Mapping[str, Array] = {}
        for _ in range(4):
            read = session.step(path, step_inputs())
        finished = session.finish()
        np.testing.assert_allclose(np.asarray(finished["head.weight"], np.float64), weight, atol=1e-6)
        assert float(read["loss"]) == pytest.approx(loss, abs=1e-6)
    np.testing.assert_array_equal(start["head.weight"], weights()["head.weight"])


def test_a_model_is_run(runtime: Runtime) -> None:
    import torch

    class Doubling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = runtime.open_model(MODEL, write(Doubling(), (torch.ones(2, 3),), planned=True), 1)
    assert (model.batch_size, model.form.sample_shape, model.form.dtype) == (2, (3,), "float32")
    first = model.infer(np.ones((2, 3), np.float32))
    model.infer(np.zeros((2, 3), np.float32))
    np.testing.assert_array_equal(first, np.full((2, 3), 2))


@pytest.mark.parametrize("body", [b"no program" * 100, b""])
def test_a_body_that_is_no_program_is_refused(runtime: Runtime, program: Program, body: bytes) -> None:
    with pytest.raises(TrainingError, match=r"refused .* exported again"):
        loaded_program(runtime, replace(program, body=body))
    with pytest.raises(TrainingError, match=r"refused .* exported again"):
        loaded_program(runtime, replace(program, body=program.body[:-500]))


def test_a_program_of_another_manifest_is_refused(runtime: Runtime, program: Program) -> None:
    import torch

    arguments = (torch.ones(2, 3), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))
    other = write(Types(), arguments, planned=False)
    with pytest.raises(TrainingError, match="has 3 inputs, but its manifest names 8"):
        loaded_program(runtime, replace(program, body=other))
    plain = manifest("executorch")
    inputs = (replace(plain.inputs[0], shape=(BATCH, *SHAPE[::-1])), *plain.inputs[1:])
    changed = replace(plain, inputs=inputs)
    with pytest.raises(TrainingError, match=r"'samples' is float32 of shape .* its manifest says"):
        loaded_program(runtime, Program(manifest=changed, body=program.body))


def test_memory_is_given_back(runtime: Runtime) -> None:
    import torch

    class Wide(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sum(x.repeat(1, BIG) + 1)

    body = write(Wide(), (torch.ones(1, 1),), planned=False)
    runtime.open_model(MODEL, body, 1).infer(np.ones((1, 1), np.float32))
    gc.collect()
    before = resident_bytes()
    model = runtime.open_model(MODEL, body, 1)
    model.infer(np.ones((1, 1), np.float32))
    assert resident_bytes() - before > 25_000_000
    del model
    gc.collect()
    assert resident_bytes() - before < 3_000_000


def test_a_thousand_trainings_do_not_grow(runtime: Runtime, program: Program) -> None:
    loaded = loaded_program(runtime, program)
    links = loaded.layout.chain.links
    path = tuple(list_stages(links))
    values = step_inputs()

    def train(count: int) -> None:
        for _ in range(count):
            session = ProgramSession(loaded, links, weights(), {})
            session.step(path, values)
            session.finish()

    train(100)
    before = resident_bytes()
    train(1000)
    assert resident_bytes() - before < 1_000_000


ALONE = """
import sys
from pathlib import Path
for name in ("torch", "executorch", "onnx", "onnxruntime", "safetensors"):
    sys.modules[name] = None  # importing it raises ImportError, as where it is not installed

from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Train
from subfleet.trainers.executorch import ExecutorchTrainer
folder = Path(sys.argv[1])
job = Job(
    program_path=folder / "program", weights_path=folder / "weights", output_path=folder / "alone",
    data=str(folder / "data.npz"), work=Train(settings=TrainingSettings(epochs=2, batch_size=8, learning_rate=0.1)),
    round=3, client_id="device-1", memory_limit_bytes=2**30,
)
trainer = ExecutorchTrainer()
trainer.describe(job.data)
print(trainer.train(job, lambda: False).step_count)
libraries = {line.split("/")[-1] for line in open("/proc/self/maps") if ".so" in line}
assert not [name for name in libraries if name.startswith(("libtorch", "libc10", "libexecutorch"))], libraries
"""


def test_a_process_trains_without_pytorch_and_without_executorchs_python(tmp_path: Path, program: Program) -> None:
    pytest.importorskip("subfleet_executorch", reason=NO_BINDING)
    settings = TrainingSettings(epochs=2, batch_size=8, learning_rate=0.1)
    job = write_job(tmp_path, samples(BATCH * 2), settings=settings)
    job.program_path.write_bytes(encode_program(program))
    process = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "4"
    ExecutorchTrainer().train(job, lambda: False)
    assert (tmp_path / "alone").read_bytes() == job.output_path.read_bytes()
    assert any(array.any() for array in decode_arrays(job.output_path.read_bytes()).values())


def test_a_program_that_takes_more_than_its_plan_is_refused(program: Program) -> None:
    pytest.importorskip("subfleet_executorch", reason=NO_BINDING)
    from subfleet.trainers.executorch_native import NativeRuntime

    small = replace(program, manifest=replace(program.manifest, memory=MemoryPlan(weights_bytes=100)))
    with pytest.raises(TrainingError, match="OutOfResources"):
        loaded_program(NativeRuntime(), small)


def test_a_value_that_is_no_tensor_is_a_refused_program(runtime: Runtime) -> None:
    with pytest.raises(TrainingError, match=r"ExecuTorch .*refused the .*input.* 1"):
        runtime.open_model(MODEL, with_number(), 1)
