"""Resident memory of a client's process that trains the small CNN with PyTorch, ONNX Runtime and native ExecuTorch.

python benchmarks/client_memory.py                        # prints a table
python benchmarks/client_memory.py --json                 # ends with one JSON object
python benchmarks/client_memory.py --write                # and writes benchmarks/results/client-memory.md

The network is two residual blocks with GroupNorm on batches of 16 of 28x28, trained with SGD and momentum, one thread.
Every process is a fresh one and holds Python, NumPy and the data set; all of it counts. PyTorch trains as in an
ordinary client: the module, `torch.optim.SGD` and a loop. The others are the device's own trainers with exported
programs.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages import write_page
from smoke import parse_arguments

RESULTS = Path(__file__).parent / "results" / "client-memory.md"
CLIENTS = ("torch", "onnx", "executorch")
NAMES = {"torch": "PyTorch, eager", "onnx": "ONNX Runtime", "executorch": "ExecuTorch, native binding"}
GOALS = {"onnx": 3, "executorch": 5}
BATCH = 16
STEPS = 40
MEGABYTE = 1e6


def build_small_cnn() -> Any:
    """Build two residual blocks of 16 and 32 channels."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels_in: int, channels: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
            self.norm = nn.GroupNorm(4, channels)
            self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
            self.shortcut = nn.Conv2d(channels_in, channels, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            residual = self.conv2(torch.relu(self.norm(self.conv1(x))))
            return torch.relu(residual + self.shortcut(x))

    return nn.Sequential(
        Block(1, 16), nn.AvgPool2d(2), Block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


def export(folder: Path) -> None:
    """Write the programs, the weights and the data."""
    import numpy as np
    import torch
    from safetensors.numpy import save_file

    from subfleet.export.programs import write_program
    from subfleet.export.steps import SampleSpec, training_step
    from subfleet.protocol.programs import encode_program
    from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

    torch.set_num_threads(1)
    module = build_small_cnn()
    for target in ("onnx", "executorch"):
        step = training_step(
            module,
            SampleSpec(shape=(1, 28, 28)),
            batch_size=BATCH,
            objective=ObjectiveSettings(),
            optimiser=OptimiserSettings(momentum=0.9),
        )
        program = write_program(step, target=target, program_id="small_cnn")
        (folder / f"program.{target}").write_bytes(encode_program(program))
    save_file({name: tensor.numpy() for name, tensor in module.state_dict().items()}, folder / "weights")
    random = np.random.default_rng(0)
    count = BATCH * STEPS
    x = random.standard_normal((count, 1, 28, 28), dtype=np.float32)
    np.savez(folder / "data.npz", x=x, y=random.integers(0, 10, count))


def train_torch(folder: Path) -> float:
    """Train in an ordinary loop, and return the seconds per step."""
    import time

    import torch
    from torch.nn.functional import cross_entropy

    from subfleet.tasks import read_dataset

    torch.set_num_threads(1)
    dataset = read_dataset(str(folder / "data.npz"))
    module = build_small_cnn()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    started_s = time.perf_counter()
    for start in range(0, len(dataset), BATCH):
        x = torch.from_numpy(dataset.inputs[start : start + BATCH])
        y = torch.from_numpy(dataset.labels[start : start + BATCH])
        optimiser.zero_grad()
        cross_entropy(module(x), y).backward()
        optimiser.step()
    return (time.perf_counter() - started_s) / STEPS


def train_program(target: str, folder: Path) -> float:
    """Train with the device's trainer, and return the seconds per step."""
    from subfleet.protocol.jobs import Job, Trainer
    from subfleet.protocol.task import Train
    from subfleet.protocol.training import OptimiserSettings, TrainingSettings

    trainer: Trainer
    if target == "onnx":
        from subfleet.trainers.onnx import OnnxTrainer

        trainer = OnnxTrainer()
    else:
        import subfleet_executorch  # noqa: F401 - without it, PyTorch would be measured
        from subfleet.trainers.executorch import ExecutorchTrainer

        trainer = ExecutorchTrainer()
    trainer.describe(str(folder / "data.npz"))
    job = Job(
        work=Train(
            settings=TrainingSettings(batch_size=BATCH, learning_rate=0.01, optimiser=OptimiserSettings(momentum=0.9))
        ),
        program_path=folder / f"program.{target}",
        weights_path=folder / "weights",
        output_path=folder / f"change.{target}",
        data=str(folder / "data.npz"),
        round=0,
        client_id="a",
        memory_limit_bytes=2**40,
    )
    result = trainer.train(job, lambda: False)
    return result.train_seconds / result.step_count


def read_resident_bytes(field: str) -> int:
    """Read a field of this process: VmHWM is its peak resident memory, VmRSS its current size."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def train_client(client: str, folder: Path) -> None:
    """Train in this process, and print the measurements as JSON."""
    step_s = train_torch(folder) if client == "torch" else train_program(client, folder)
    figures = {
        "peak_bytes": read_resident_bytes("VmHWM"),
        "after_bytes": read_resident_bytes("VmRSS"),
        "step_s": step_s,
    }
    figures["torch_loaded"] = "torch" in sys.modules
    sys.stdout.write(json.dumps(figures))


def run_in_fresh_process(*arguments: str) -> str:
    """Run this file in a fresh process, and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def measure(repeats: int) -> dict[str, dict[str, Any]]:
    """Measure every client in turns, and take the median of each figure."""
    with tempfile.TemporaryDirectory() as folder:
        run_in_fresh_process("--child", "export", folder)
        runs = [
            {name: json.loads(run_in_fresh_process("--child", name, folder)) for name in CLIENTS}
            for _ in range(repeats)
        ]
    clients: dict[str, dict[str, Any]] = {}
    for name in CLIENTS:
        figures = [run[name] for run in runs]
        clients[name] = {
            key: sorted(figure[key] for figure in figures)[repeats // 2]
            for key in ("peak_bytes", "after_bytes", "step_s", "torch_loaded")
        }
        clients[name]["torch_over_this"] = clients["torch"]["peak_bytes"] / clients[name]["peak_bytes"]
    return clients


def build_table(clients: dict[str, dict[str, Any]]) -> list[str]:
    """The measurements as a Markdown table."""
    lines = [
        "| client | peak MB | after training MB | PyTorch's peak / this | goal | ms a step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, figures in clients.items():
        goal = f"{GOALS[name]} or more" if name in GOALS else "-"
        lines.append(
            f"| {NAMES[name]} | {figures['peak_bytes'] / MEGABYTE:.1f} | {figures['after_bytes'] / MEGABYTE:.1f} "
            f"| {figures['torch_over_this']:.2f} | {goal} | {figures['step_s'] * 1e3:.1f} |"
        )
    return lines


def main() -> None:
    """Measure, print, and write on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes for each client; default 3")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    options = parse_arguments(parser, repeats=1)
    if options.child:
        role, folder = options.child[0], Path(options.child[1])
        export(folder) if role == "export" else train_client(role, folder)
        return
    clients = measure(options.repeats)
    lines = build_table(clients)
    print("\n".join(lines))
    if options.write:
        packages = ("torch", "onnxruntime", "numpy", "executorch")
        versions = ", ".join(f"{package} {version(package)}" for package in packages)
        head = ["# Resident memory of a client's process", "", "`python benchmarks/client_memory.py --write`,"]
        head += [f"Python {platform.python_version()}, {versions}, {platform.machine()}, one thread.", ""]
        write_page(RESULTS, "\n".join([*head, *lines]) + "\n")
    if options.json:
        print(json.dumps(clients))


if __name__ == "__main__":
    main()
