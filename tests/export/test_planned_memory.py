"""Planned memory compared with the memory of a fresh process in which a device's trainer trains the program."""

import json
import os
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrices import mostly_long
from safetensors.numpy import save_file
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from trainers.hidden_binding import hide_binding

from subfleet.device_profiles import detect_packing_width
from subfleet.elastic.building import network_of
from subfleet.elastic.families import preset
from subfleet.elastic.network import Family
from subfleet.export.memory import executorch_plan
from subfleet.export.memory.blocks import activation_peak_bytes
from subfleet.export.memory.executorch_plan import BASE_BYTES, HeapGrowth, plan_executorch
from subfleet.export.memory.first_step import measure_first_step
from subfleet.export.memory.heap import measure_passing_bytes
from subfleet.export.memory.step_bytes import fed_bytes, optimiser_bytes, round_up_count, weights_bytes
from subfleet.export.programs import export_program, write_program
from subfleet.export.requests import TrainRequest
from subfleet.export.steps import SampleSpec, Step, evaluation_step, training_step
from subfleet.export.targets import find_target
from subfleet.export.tracing import trace
from subfleet.protocol.memory_plan import PackingWidth, compute_peak_bytes
from subfleet.protocol.programs import Program, encode_program
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.protocol.task_kinds import Objective
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

pytestmark = [pytest.mark.slow, pytest.mark.export]
BATCH, SIDE = 16, 28
LOWEST, HIGHEST = 0.95, 1.10
COUNTING_BYTES = 200_000
DTYPES = {"F32": np.float32, "I64": np.int64}
MAPPED_BYTES = 2_000_000
"""Pages of libraries that a first step maps; a small fraction of training, but possibly most of an evaluation."""
TRAIN = """
import json, sys
from pathlib import Path
from subfleet.protocol.memory_plan import compute_peak_bytes

from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Train
from subfleet.device.runtimes import load_trainer
target, batch_size, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
trainer = load_trainer(target)
trainer.describe(str(folder / "data.npz"))
job = Job(
    program_path=folder / "program", weights_path=folder / "weights", output_path=folder / "change",
    data=str(folder / "data.npz"), work=Train(settings=TrainingSettings(batch_size=batch_size, learning_rate=0.01)),
    round=0, client_id="a", memory_limit_bytes=2**40,
)
print(json.dumps(trainer.train(job, lambda: False).measured_peak_bytes))
"""
EVALUATE = (
    TRAIN.replace("import Train\n", "import Evaluate\n")
    .replace("training import TrainingSettings", "evaluating import EvaluationSettings")
    .replace("Train(settings=TrainingSettings(", "Evaluate(settings=EvaluationSettings(")
    .replace(", learning_rate=0.01", "")
    .replace("trainer.train", "trainer.evaluate")
)


def planned_here(program: Program) -> int:
    """The plan for this processor: plans assume usual kernels, and this processor's may be wider."""
    memory = program.manifest.memory
    return compute_peak_bytes(memory.peak_bytes, memory.packings, detect_packing_width())


@pytest.mark.parametrize("counted_with", [8, 16, 32])
def test_a_plan_does_not_depend_on_the_processor_that_measured_it(
    counted_with: PackingWidth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two constant factors: 10 rows of one column, and 3 of 20."""
    filled = {4: 20, 8: 24, 16: 32, 32: 32, 64: 64}
    packed_bytes = {width: 4 * (10 * width + 3 * columns) for width, columns in filled.items()}
    growth = HeapGrowth(load_bytes=10**6 + packed_bytes[counted_with], step_bytes=0, scratch_bytes=0)
    monkeypatch.setattr(executorch_plan, "heap_growth", lambda *_, **__: growth)
    monkeypatch.setattr(executorch_plan, "detect_packing_width", lambda: counted_with)
    step = Step(run=lambda *_: (), reference=lambda *_: (), inputs=(), outputs=())
    plan = plan_executorch(step, body=b"body", arena_bytes=500, packed=[(10, 1), (3, 20)])
    assert plan.runtime_bytes == round_up_count(10**6 + packed_bytes[16]) + 3 * 4 + BASE_BYTES
    assert {packing.width: packing.more_bytes for packing in plan.packings} == {
        width: size - packed_bytes[16] for width, size in packed_bytes.items() if width != 16
    }


def test_a_plan_has_room_for_a_workspace_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    growth = HeapGrowth(load_bytes=0, step_bytes=0, scratch_bytes=0, passing_bytes=2_600_000)
    monkeypatch.setattr(executorch_plan, "heap_growth", lambda *_, **__: growth)
    step = Step(run=lambda *_: (), reference=lambda *_: (), inputs=(), outputs=())
    plan = plan_executorch(step, body=b"body", arena_bytes=500, packed=[])
    assert plan.activation_bytes == 500 + 2_000_000, "and one in the part of every plan"


@pytest.mark.parametrize("resettable", [False, True])
def test_memory_that_comes_and_goes_is_measured_if_the_kernel_tells(tmp_path: Path, *, resettable: bool) -> None:
    if not resettable:
        (tmp_path / "clear_refs").mkdir()
    sizes = iter([500, 400])

    def run() -> None:
        (tmp_path / "status").write_text(f"VmHWM:\t {next(sizes)} kB\nVmRSS:\t {next(sizes)} kB\n")

    assert measure_passing_bytes(run, tmp_path) == (100 * 1024 if resettable else 0)
    assert measure_passing_bytes(lambda: None, tmp_path / "nowhere") == 0


def test_a_program_that_cannot_be_run_in_a_new_process_is_not_measured_there() -> None:
    assert measure_first_step(b"no program", [((2,), "float32")], [], freed_bytes=0) is None


GROWING = """
import numpy as np

class Program:
    def __init__(self, body): ...
    def load_method(self, name): return self
    def execute(self, inputs, outputs):
        first = np.ones(4_000_000, np.uint8)
        self.workspace = np.empty(8_000_000, np.uint8)
        del first
        self.workspace[:] = 1

def set_thread_count(count): ...
"""


def test_what_a_growing_workspace_leaves_in_a_devices_heap_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has freed no large block returns the first workspace to the system at once."""
    (tmp_path / "subfleet_executorch.py").write_text(GROWING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    at_once, kept = (measure_first_step(b"", [], [], freed_bytes=freed) for freed in (0, 10_000_000))
    assert at_once is not None
    assert kept is not None
    assert at_once < 1_000_000
    assert 3_900_000 < kept < 5_000_000


@pytest.mark.parametrize(("target", "fraction"), [("onnx", 0.02), ("executorch", 0.0275)])
def test_the_plan_of_a_program_that_runs_alone_has_room_for_gaps_in_the_heap(target: str, fraction: float) -> None:
    """Programs of a chain share the gaps between its values, see `subfleet.export.chains.manifests`."""
    step, writer = step_of("wide"), find_target(target)
    counted = writer.write_training(trace(step, writer.lowerings), step).memory
    planned = write_program(step, target=target, program_id="memory").manifest.memory
    gaps_bytes = fraction * counted.peak_bytes
    assert gaps_bytes <= planned.peak_bytes - counted.peak_bytes < gaps_bytes + 2 * COUNTING_BYTES


def test_a_plan_does_not_depend_on_other_programs_of_the_process() -> None:
    """XNNPACK's workspace, which the programs of a process share, is already there for the second one."""
    native = pytest.importorskip("subfleet_executorch", reason="other bindings have no workspace for a program alone")
    program = write_module("wide", "executorch")
    infos = (program.manifest.inputs, program.manifest.outputs)
    arrays = [[np.zeros(info.shape, DTYPES[info.dtype]) for info in values] for values in infos]
    other = native.Program(bytes(program.body)).load_method()
    other.execute(*arrays)
    planned = write_program(step_of("wide"), target="executorch", program_id="memory").manifest.memory
    assert abs(planned.activation_bytes - program.manifest.memory.activation_bytes) < COUNTING_BYTES
    assert planned.activation_bytes > 18_000_000


class Block(nn.Module):
    """A smooth residual block, so that small errors stay small."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.second(torch.sigmoid(self.first(self.norm(x))))
        return x + changed


def convolutional() -> nn.Module:
    """A network that needs most of its memory for activations."""
    blocks = nn.Sequential(*(Block(24) for _ in range(3)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5))
    return nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), blocks, head)


def wide() -> nn.Module:
    """A network that needs most of its memory for weights and optimiser states."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 1024), nn.Tanh(), nn.Linear(1024, 5))


EAGER: dict[str, tuple[Family, int, Objective]] = {
    "operators": (preset("char_lstm", input_shape=(80,), class_count=80), 2, "next_token"),
    "convolutions": (preset("efficientnet_v2_tiny", input_shape=(3, 32, 32), class_count=10), 4, "cross_entropy"),
}
"""A network, the divisor of its width, and its objective."""
MODULES = {"convolutional": convolutional, "wide": wide}


@cache
def step_of(name: str, *, batch_size: int = BATCH, recompute: bool = False, accumulate: bool = False) -> Step:
    return training_step(
        MODULES[name](),
        SampleSpec(shape=(3, SIDE, SIDE)),
        batch_size=batch_size,
        objective=ObjectiveSettings(),
        optimiser=OptimiserSettings(),
        recompute=recompute,
        accumulate=accumulate,
    )


@cache
def write_module(name: str, target: str, **options: Any) -> Program:
    """Write a program; several tests share it."""
    return write_program(step_of(name, **options), target=target, program_id="memory")


def measured_bytes(program: Program, folder: Path) -> int:
    """Train or evaluate three and a half batches in a fresh process."""
    (folder / "program").write_bytes(encode_program(program))
    random = np.random.default_rng(0)
    weights = {
        value.tensor: (0.05 * random.standard_normal(value.shape)).astype(np.float32)
        for value in program.manifest.inputs
        if value.role in {"parameter", "buffer"}
    }
    save_file(weights, folder / "weights")
    count = 3 * BATCH + BATCH // 2
    sample, label = (next(info for info in program.manifest.inputs if info.role == role) for role in ("input", "label"))
    shape = (count, *sample.shape[1:])
    x = random.standard_normal(shape, np.float32) if sample.dtype == "F32" else random.integers(0, 5, shape)
    np.savez(folder / "data.npz", x=x, y=random.integers(0, 5, (count, *label.shape[1:])))
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            TRAIN if program.manifest.purpose == "train" else EVALUATE,
            program.manifest.target,
            str(BATCH),
            str(folder),
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return int(json.loads(process.stdout.splitlines()[-1]))


@pytest.mark.parametrize("target", ["onnx", "executorch"])
@pytest.mark.parametrize("name", MODULES)
def test_a_fresh_process_takes_what_was_planned(name: str, target: str, tmp_path: Path) -> None:
    program = write_module(name, target)
    measured = measured_bytes(program, tmp_path)
    assert LOWEST <= planned_here(program) / measured <= HIGHEST, program.manifest.memory


@pytest.mark.long
@pytest.mark.parametrize("name", EAGER)
def test_a_fresh_process_of_pytorch_takes_no_more_than_was_planned(name: str, tmp_path: Path) -> None:
    """Many operators, and many convolutions, all of them small."""
    config, divisor, objective = EAGER[name]
    axes = {key: axis for key, axis in network_of(config).axes.items() if axis.kind not in {"class", "kernel"}}
    architecture = Architecture(
        axes=tuple((key, Prefix(size=axis.size // divisor)) for key, axis in sorted(axes.items()))
    )
    program = export_program(
        TrainRequest(
            model=config,
            architecture=architecture,
            target="torch",
            batch_size=BATCH,
            objective=ObjectiveSettings(name=objective),
            optimiser=OptimiserSettings(momentum=0.9),
        )
    )
    assert measured_bytes(program, tmp_path) <= program.manifest.planned_peak_bytes


@pytest.mark.parametrize(
    ("name", "target"),
    mostly_long(product(MODULES, ["onnx", "executorch"]), ("convolutional", "executorch"), ("wide", "onnx")),
)
def test_an_evaluation_takes_what_was_planned(name: str, target: str, tmp_path: Path) -> None:
    sample = SampleSpec(shape=(3, SIDE, SIDE))
    step = evaluation_step(MODULES[name](), sample, batch_size=BATCH, objective=ObjectiveSettings())
    program = write_program(step, target=target, program_id="memory")
    difference = planned_here(program) - measured_bytes(program, tmp_path)
    assert abs(difference) <= MAPPED_BYTES, program.manifest.memory


@pytest.mark.parametrize("name", mostly_long(MODULES, "wide"))
def test_a_process_without_the_native_binding_takes_what_was_planned_without_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = write_module(name, "executorch").manifest
    hide_binding(tmp_path, monkeypatch)
    program = write_program(step_of(name), target="executorch", program_id="memory")
    # Structures and workspaces are counted in the heap, where each runtime adds some kilobytes.
    assert abs(program.manifest.planned_peak_bytes - native.planned_peak_bytes) <= COUNTING_BYTES
    measured = measured_bytes(program, tmp_path)
    assert LOWEST <= planned_here(program) / measured <= HIGHEST, program.manifest.memory


def test_recomputed_activations_take_less(tmp_path: Path) -> None:
    plain, frugal = (write_module("convolutional", "onnx"), write_module("convolutional", "onnx", recompute=True))
    assert frugal.manifest.memory.activation_bytes < 0.75 * plain.manifest.memory.activation_bytes
    measured = [measured_bytes(program, tmp_path) for program in (plain, frugal)]
    assert measured[1] < measured[0]
    assert LOWEST <= planned_here(frugal) / measured[1] <= HIGHEST


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_a_batch_in_parts_takes_less(target: str) -> None:
    whole = write_module("convolutional", target).manifest.memory
    parts = write_module("convolutional", target, batch_size=BATCH // 4, accumulate=True).manifest.memory
    assert parts.activation_bytes < 0.4 * whole.activation_bytes
    assert parts.optimiser_bytes == 2 * whole.optimiser_bytes  # the summed gradients
    assert parts.peak_bytes < whole.peak_bytes


@pytest.mark.parametrize("name", MODULES)
def test_memory_that_the_caller_holds(name: str) -> None:
    step = step_of(name)
    parameters = sum(parameter.numel() for parameter in MODULES[name]().parameters())
    assert optimiser_bytes(step) == weights_bytes(step) == 2 * 4 * parameters
    input_bytes = BATCH * (3 * SIDE * SIDE * 4 + 8 + 4)
    assert input_bytes < fed_bytes(step) < input_bytes + 100


def test_activations_alive_at_once() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor]:
        a = x * 2.0  # 400 bytes
        b = a.view(10, 10) + 1.0  # 400 more; the view costs nothing
        c = b.sum(0)  # 40 more, while b is alive; a was freed after b
        return (c.sum(0) * x,)  # the result is the caller's

    graph = make_fx(step, tracing_mode="fake")(torch.zeros(100))
    assert activation_peak_bytes(graph) == 800


def test_a_convolution_needs_the_patches_of_one_sample() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.conv2d(x, w),)

    graph = make_fx(step, tracing_mode="fake")(torch.zeros(2, 3, 6, 6), torch.zeros(5, 3, 3, 3))
    assert activation_peak_bytes(graph) == 3 * 3 * 3 * 4 * 4 * 4


def test_results_that_come_together_are_counted_where_they_are_taken_apart() -> None:
    def pooled(x: torch.Tensor) -> tuple[torch.Tensor]:
        values, indices = torch.ops.aten.max_pool2d_with_indices(torch.exp(x), [2, 2])
        return (torch.exp(values) + indices,)

    graph = make_fx(pooled)(torch.zeros(1, 1, 8, 8))
    assert activation_peak_bytes(graph) == 4 * 64 + 4 * 16 + 8 * 16
