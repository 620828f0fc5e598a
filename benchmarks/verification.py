"""Findings and costs of verifying programs, for every network of the zoo and every target.

python benchmarks/verification.py                                  # prints a table of the whole zoo
python benchmarks/verification.py --models mlp ds_cnn --write      # and writes benchmarks/results/verification.md
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from pages import write_page
from smoke import parse_arguments
from step_benchmark.zoo import ZOO, ZooModel, build_seeded
from torch import Tensor

from subfleet.export.steps import SampleSpec, Step, training_step
from subfleet.export.targets import TARGETS, find_target
from subfleet.export.tracing import trace
from subfleet.export.verification.verifying import seeded_generator, verify_training
from subfleet.protocol.errors import ExportError
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

RESULTS = Path(__file__).parent / "results" / "verification.md"
OPTIMISER = OptimiserSettings(momentum=0.9)
COMMAND = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
HEAD = f"""# Verifying programs

`python benchmarks/{COMMAND}`, onnxruntime {version("onnxruntime")}, executorch {version("executorch")}, \
torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread.

Each program's second step is compared with the original module in float64, see
[training programs](../../docs/reference/training-programs.md#verification). *Not distinguishable* are parameters with
gradients that are only rounding in float32: all other wrong gradients are refused. *Largest* is the manifest's
`max_abs_diff`. Seconds are CPU time.

| network | target | parameters | not distinguishable | largest | trace and write, s | verify, s |
|---|---|---:|---|---:|---:|---:|
"""


def build_rows(model: ZooModel) -> Iterator[str]:
    """Yield a row for each target."""
    step = training_step(
        build_seeded(model, 0).train(),
        SampleSpec(shape=model.sample_shape, dtype=model.sample_dtype, limit=model.sample_limit),
        batch_size=model.batch_size,
        objective=ObjectiveSettings(name=model.objective),
        optimiser=OPTIMISER,
    )
    count = sum(value.role == "parameter" for value in step.inputs)
    for target in TARGETS:
        try:
            yield f"| {model.name} | {target} | {count} | {measure(step, target, model.name)} |"
        except ExportError as error:
            yield f"| {model.name} | {target} | {count} | {error!s:.150} | | | |"


def measure(step: Step, target: str, name: str) -> str:
    """Verify a program, and return findings and CPU times as cells."""
    writer, started_s = find_target(target), time.process_time()
    body = writer.write_training(trace(step, writer.lowerings), step).body
    written_s = time.process_time()

    def run(example: Sequence[Tensor]) -> Sequence[Tensor]:
        return writer.run(body, {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)})

    verification = verify_training(run, step, seeded_generator(name))
    verified_s = time.process_time()
    unseen = sorted(
        name.removeprefix("new.momentum.") for name in verification.unseen if name.startswith("new.momentum.")
    )
    unseen_names = ", ".join(f"`{name}`" for name in unseen) or "none"
    return (
        f"{unseen_names} | {verification.max_abs_diff:.0e} | {written_s - started_s:.1f} | {verified_s - written_s:.1f}"
    )


def main() -> None:
    """Measure, print, and write on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=sorted(ZOO), default=list(ZOO))
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parse_arguments(parser, models=["mlp"])
    torch.set_num_threads(1)
    rows = []
    print(HEAD, end="")
    for name in options.models:
        for row in build_rows(ZOO[name]):
            print(row, flush=True)
            rows.append(row)
    if options.write:
        write_page(RESULTS, HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
