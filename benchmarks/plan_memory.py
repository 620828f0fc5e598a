"""Planned and measured peak memory of training programs, each trained in a fresh process by a device's trainer.

python benchmarks/plan_memory.py                          # prints a table of the whole zoo
python benchmarks/plan_memory.py --model ds_cnn --json    # one model; ends with one JSON object
python benchmarks/plan_memory.py --write                  # and writes benchmarks/results/plan-memory.md
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages import write_page
from smoke import parse_arguments

RESULTS = Path(__file__).parent / "results" / "plan-memory.md"
TARGETS = ("onnx", "executorch")
MEGABYTE = 1e6
# A fresh process for exporting as well as for training, so that no memory of another program is reused.
EXPORT = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from safetensors.numpy import save_file
from step_benchmark.zoo import ZOO, build_seeded
from subfleet.export.programs import write_program
from subfleet.export.steps import SampleSpec, training_step
from subfleet.protocol.programs import encode_program
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings
torch.set_num_threads(1)
job = json.loads(sys.argv[1])
folder, model = Path(job["folder"]), ZOO[job["model"]]
module = build_seeded(model, 0)
step = training_step(
    module,
    SampleSpec(shape=model.sample_shape, dtype=model.sample_dtype, limit=model.sample_limit),
    batch_size=job["batch_size"],
    objective=ObjectiveSettings(name=model.objective),
    optimiser=OptimiserSettings(),
    accumulate=job["accumulate"],
    recompute=job["recompute"],
)
program = write_program(step, target=job["target"], program_id="plan")
(folder / "program").write_bytes(encode_program(program))
state = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
kept = {value.tensor for value in program.manifest.inputs if value.role in ("parameter", "buffer")}
save_file({name: array for name, array in state.items() if name in kept}, folder / "weights")
random = np.random.default_rng(0)
count = 3 * job["batch_size"] + max(job["batch_size"] // 2, 1)
label = next(value for value in program.manifest.inputs if value.role == "label")
if model.sample_limit:
    x = random.integers(0, model.sample_limit, (count, *model.sample_shape))
else:
    x = random.standard_normal((count, *model.sample_shape), dtype=np.float32)
y = random.integers(0, model.class_count, (count, *label.shape[1:]))
np.savez(folder / "data.npz", x=x, y=y)
"""
TRAIN = """
import json, sys
from pathlib import Path

from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings
job = json.loads(sys.argv[1])
folder = Path(job["folder"])
if job["target"] == "onnx":
    from subfleet.trainers.onnx import OnnxTrainer as Trainer
else:
    from subfleet.trainers.executorch import ExecutorchTrainer as Trainer
settings = TrainingSettings(
    batch_size=job["batch_size"] * job["parts"],
    micro_batch_size=job["batch_size"] if job["accumulate"] else 0,
    learning_rate=0.01,
)
trainer = Trainer()
trainer.describe(str(folder / "data.npz"))
result = trainer.train(
    Job(
        program_path=folder / "program",
        weights_path=folder / "weights",
        frozen_path=folder / "frozen" if (folder / "frozen").exists() else None,
        output_path=folder / "change",
        data=str(folder / "data.npz"),
        work=Train(settings=settings),
        round=0,
        client_id="a",
        memory_limit_bytes=2**40,
        threads=job["threads"],
    ),
    lambda: False,
)
step_s = result.train_seconds / result.step_count
sys.stdout.write(json.dumps({"peak_bytes": result.measured_peak_bytes, "step_s": step_s}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program to export and train.

    Attributes:
        model: name in the zoo.
        target: target of the program.
        batch_size: samples that the program takes at once.
        parts: micro-batches of a batch, above 1 with summed gradients.
        recompute: activations in the backward pass.
        threads: threads of the trainer.
    """

    model: str
    target: str
    batch_size: int
    parts: int = 1
    recompute: bool = False
    threads: int = 1

    @property
    def label(self) -> str:
        """The model, and the options that differ from the default."""
        unusual = [f"{self.parts} parts"] * (self.parts > 1) + ["recomputed"] * self.recompute
        return ", ".join([self.model, *unusual])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The parts of a case's plan in bytes, and the measured growth of a fresh process."""

    case: Case
    plan: Mapping[str, int]
    measured_bytes: int
    step_s: float

    @property
    def planned_bytes(self) -> int:
        """The sum of the plan's parts."""
        return sum(self.plan.values())

    @property
    def ratio(self) -> float:
        """Planned over measured memory."""
        return self.planned_bytes / max(self.measured_bytes, 1)


def measure(case: Case, folder: Path) -> Row:
    """Export one program in a fresh process, and train it for three and a half steps in another."""
    from subfleet.device_profiles import detect_packing_width
    from subfleet.protocol.memory_plan import compute_peak_bytes
    from subfleet.protocol.programs import decode_program

    job = json.dumps({**asdict(case), "accumulate": case.parts > 1, "folder": str(folder)})
    _run_python(EXPORT, job)
    training = json.loads(_run_python(TRAIN, job))
    plan = decode_program((folder / "program").read_bytes()).manifest.memory
    # Plans assume the usual kernels; this processor's may be wider.
    local = replace(
        plan, runtime_bytes=compute_peak_bytes(plan.runtime_bytes, plan.packings, detect_packing_width()), packings=()
    )
    return Row(
        case=case,
        plan={name: size_bytes for name, size_bytes in asdict(local).items() if name != "packings"},
        measured_bytes=training["peak_bytes"],
        step_s=training["step_s"],
    )


def _run_python(program: str, argument: str) -> str:
    # NumPy's threads would add stacks and buffers that no device's trainer has.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.run(
        [sys.executable, "-c", program, argument], capture_output=True, text=True, env=environment, check=False
    )
    if process.returncode:
        raise SystemExit(f"a case failed: {process.stderr.strip().splitlines()[-1:]}")
    return process.stdout.splitlines()[-1] if process.stdout else ""


def list_cases(options: argparse.Namespace) -> Iterator[Case]:
    """List the zoo on every target, and on request its variants that need less memory."""
    from step_benchmark.zoo import ZOO

    for name in options.model or list(ZOO):
        for target in options.target or TARGETS:
            batch_size = ZOO[name].batch_size
            yield Case(model=name, target=target, batch_size=batch_size, threads=options.threads)
            if options.variants:
                yield Case(model=name, target=target, batch_size=batch_size, recompute=True, threads=options.threads)
                yield Case(model=name, target=target, batch_size=batch_size // 4, parts=4, threads=options.threads)


def build_table(rows: Sequence[Row]) -> list[str]:
    """The rows as a Markdown table, sizes in MB."""
    parts = ("weights", "optimiser", "fed", "activation", "workspace", "runtime")
    lines = [
        "| model | target | batch | " + " | ".join(parts) + " | planned | measured | planned / measured |",
        "|---|---|---:|" + "---:|" * (len(parts) + 3),
    ]
    for row in rows:
        sizes = [*(row.plan[f"{part}_bytes"] for part in parts), row.planned_bytes, row.measured_bytes]
        numbers = " | ".join(f"{size / MEGABYTE:.1f}" for size in sizes)
        lines.append(f"| {row.case.label} | {row.case.target} | {row.case.batch_size} | {numbers} | {row.ratio:.3f} |")
    return lines


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The object that `--json` prints."""
    by_target: dict[str, Any] = {}
    for target in sorted({row.case.target for row in rows}):
        ratios = [row.ratio for row in rows if row.case.target == target]
        by_target[target] = {"min": min(ratios), "max": max(ratios)}
    ratios = [row.ratio for row in rows]
    return {
        "planned_over_measured": {"min": min(ratios), "max": max(ratios)},
        **by_target,
        "models": [
            {**asdict(row.case), **row.plan, "measured_bytes": row.measured_bytes, "planned_over_measured": row.ratio}
            for row in rows
        ],
    }


ABOUT = """
A device's trainer takes three and a half steps with each program, on one thread, in a separate process. Measured is
the growth of the process's high-water mark (`VmHWM`) over loading, training and writing the change; sizes are in MB
of 10^6 bytes. The data set and the runtime's libraries are loaded before.

- weights, optimiser: parameters and buffers, and momenta; twice, since a step reads one set and writes the other.
- fed: one batch (ExecuTorch: two, since the next one is made during a step), and the outputs that are read after it.
- activation: ONNX Runtime: peak of the step's own tensors, over the graph after the runtime's own optimisation, in
  execution order. ExecuTorch: the program's planned buffers and XNNPACK's workspace.
- workspace: kernels' scratch memory, and gaps in ONNX Runtime's arena, from a simulation of it.
- runtime: the session's or method's objects, counted in the C library's heap; the program; a constant of about 1 MB
  (ExecuTorch: 0.3 MB) for Python's objects; 2 % (ExecuTorch: 2.75 %) of the rest for gaps in the heap.
"""


def write_results(rows: Sequence[Row]) -> None:
    """Write the page of results."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "executorch", "torch"))
    ratios = summarise(rows)["planned_over_measured"]
    lines = [
        "# Planned against measured peak memory",
        "",
        f"`python benchmarks/plan_memory.py --write`, {versions}, {platform.machine()}.",
        "",
        f"Planned over measured: {ratios['min']:.3f} to {ratios['max']:.3f}.",
        ABOUT,
        *build_table(rows),
    ]
    write_page(RESULTS, "\n".join(lines) + "\n")


def main() -> None:
    """Measure, print, and write on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/plan-memory.md")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--model", action="append", help="only this model of the zoo; may be repeated")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this target; may be repeated")
    parser.add_argument(
        "--variants", action="store_true", help="also with recomputed activations, and with batches in 4 parts"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of the trainers")
    options = parse_arguments(parser, model=["mlp"], target=["onnx"])
    rows = []
    for case in list_cases(options):
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(measure(case, Path(folder)))
            except SystemExit as error:
                print(f"{case.label} on {case.target}: {error}", file=sys.stderr, flush=True)
                continue
        print("\n".join(build_table(rows)[0 if len(rows) == 1 else -1 :]), flush=True)
    if options.write:
        write_results(rows)
    if options.json:
        print(json.dumps(summarise(rows)))


if __name__ == "__main__":
    main()
