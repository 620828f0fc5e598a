"""Planned against measured peak memory of training programs, each trained in a fresh process by the device's trainer.

python benchmarks/plan_memory.py                          # prints a table
python benchmarks/plan_memory.py --write                  # and writes benchmarks/results/plan-memory.md
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subfleet.elastic.network import ModelConfig
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

RESULTS = Path(__file__).parent / "results" / "plan-memory.md"
MODELS = {
    "resnet 1x8x8 16-32-64": ModelConfig(
        family="preact_resnet", input_shape=(1, 8, 8), class_count=10, widths=(16, 32, 64), depths=(2, 2, 2)
    ),
    "resnet 1x28x28 32-64": ModelConfig(
        family="preact_resnet", input_shape=(1, 28, 28), class_count=10, widths=(32, 64), depths=(2, 2)
    ),
    "resnet 3x32x32 64-128-256": ModelConfig(
        family="preact_resnet", input_shape=(3, 32, 32), class_count=10, widths=(64, 128, 256), depths=(2, 2, 2)
    ),
    "mlp 64-256 (quickstart)": ModelConfig(
        family="mlp", input_shape=(1, 8, 8), class_count=10, widths=(256,), depths=(2,), group_size=16
    ),
    "mlp 64-512-256": ModelConfig(
        family="mlp", input_shape=(1, 8, 8), class_count=10, widths=(512, 256), depths=(2, 2)
    ),
}
MEASURE = """
import json, sys
from pathlib import Path
from subfleet.protocol.programs import TrainingSettings, TrainJob
job = json.loads(sys.argv[1])
target = job.pop("target")
if target == "onnx":
    from subfleet.trainers.onnx import OnnxTrainer as Trainer
else:
    from subfleet.trainers.executorch import ExecutorchTrainer as Trainer
paths = {name: Path(job[name]) for name in ("program_path", "weights_path", "output_path")}
settings = TrainingSettings(batch_size=job["batch_size"], learning_rate=0.01)
trainer = Trainer()
trainer.describe(job["data"])
result = trainer.train(
    TrainJob(**paths, data=job["data"], settings=settings, round=0, client_id="a", memory_limit_bytes=2**40),
    lambda: False,
)
step_s = result.train_seconds / result.step_count
sys.stdout.write(json.dumps({"peak_bytes": result.measured_peak_bytes, "step_s": step_s}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program: what was planned, and what a fresh process grew by."""

    model: str
    spec: str
    target: str
    batch_size: int
    planned_bytes: int
    measured_bytes: int
    step_s: float


def rows(folder: Path, names: list[str], batch_sizes: list[int]) -> Iterator[Row]:
    """Export, train, measure."""
    from subfleet.elastic.families import network_of
    from subfleet.elastic.spaces import uniform_space

    for name in names:
        model = MODELS[name]
        space = uniform_space(network_of(model), [0.25, 0.5, 1.0])
        for spec in (space[0], space[len(space) // 2], space[-1]):
            for target in ("onnx", "executorch"):
                for batch_size in batch_sizes:
                    yield measure(folder, name, spec, target, batch_size)


def measure(folder: Path, name: str, spec: SubnetSpec, target: str, batch_size: int) -> Row:
    """Export one program and train three steps and a half with it in a fresh process."""
    import numpy as np
    from safetensors.torch import save_file

    from subfleet.elastic.families import init_state, network_of
    from subfleet.elastic.maps import extract
    from subfleet.export.programs import export_training_program
    from subfleet.export.requests import TrainRequest
    from subfleet.protocol.programs import encode_program

    model = MODELS[name]
    network = network_of(model)
    program = export_training_program(
        TrainRequest(
            model=model,
            spec=spec,
            target=target,
            batch_size=batch_size,
            objective=ObjectiveSettings(),
            optimiser=OptimiserSettings(),
        )
    )
    (folder / "program").write_bytes(encode_program(program))
    save_file(extract(network, spec, init_state(network, 0)), folder / "weights")
    random = np.random.default_rng(0)
    count = 3 * batch_size + batch_size // 2
    inputs = random.standard_normal((count, *model.input_shape), dtype=np.float32)
    np.savez(folder / "data.npz", x=inputs, y=random.integers(0, model.class_count, count))
    job = {
        "target": target,
        "program_path": str(folder / "program"),
        "weights_path": str(folder / "weights"),
        "output_path": str(folder / "change"),
        "data": str(folder / "data.npz"),
        "batch_size": batch_size,
    }
    done = subprocess.run([sys.executable, "-c", MEASURE, json.dumps(job)], capture_output=True, check=True)
    found = json.loads(done.stdout)
    return Row(
        model=name,
        spec=spec.name,
        target=target,
        batch_size=batch_size,
        planned_bytes=program.manifest.planned_peak_bytes,
        measured_bytes=found["peak_bytes"],
        step_s=found["step_s"],
    )


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/plan-memory.md")
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="only this model; may be repeated")
    parser.add_argument("--batch", action="append", type=int, help="only this batch size; default 16 and 64")
    arguments = parser.parse_args()
    lines = [
        "| model | subnet | target | batch | planned MB | measured MB | planned / measured | ms a step |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), arguments.model or list(MODELS), arguments.batch or [16, 64]):
            lines.append(
                f"| {row.model} | {row.spec} | {row.target} | {row.batch_size} | {row.planned_bytes / 1e6:.1f} "
                f"| {row.measured_bytes / 1e6:.1f} | {row.planned_bytes / max(row.measured_bytes, 1):.2f} "
                f"| {row.step_s * 1e3:.1f} |"
            )
            print(lines[-1], flush=True)
    if arguments.write:
        import onnxruntime
        import torch

        versions = f"onnxruntime {onnxruntime.__version__}, torch {torch.__version__}, {platform.machine()}"
        head = ["# Planned against measured peak memory", "", f"`python benchmarks/plan_memory.py`, {versions}.", ""]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
