"""Chains of programs compared with one program of the same path: step time, planned and measured memory, exports.

python benchmarks/chains.py                             # prints tables
python benchmarks/chains.py --networks cnn_s --targets onnx --paths 2
python benchmarks/chains.py --json                      # ends with one JSON object
python benchmarks/chains.py --write                     # and writes benchmarks/results/chains.md
python benchmarks/chains.py --spoil plan                # plans without the memory that paths keep: must fail

The networks are the presets of FedorAS at their own sizes, for CIFAR-10, for 12 spoken words and for characters. Paths
are drawn uniformly. The device's own trainer trains each one in turns by the supernet's chain and by the program of the
path as a separate network, which recomputes activations as the chain does. Every training is a fresh process with one
thread. Step times are medians over the turns, memory is the maximum.

The exit status is 1 if a chain's step takes more than 1.5 times the program's, or plans are not 0.95 to 1.10 of the
measured memory.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from pages import write_page
from rich.console import Console
from rich.table import Table
from run_tables import format_table
from smoke import parse_arguments

from subfleet.arrays import encode_arrays
from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.families import preset
from subfleet.elastic.families.records.choices import ChoiceCnn
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Family, Network
from subfleet.elastic.supernets import path_architecture, specialise_family
from subfleet.export.programs import export_program
from subfleet.export.requests import TrainRequest
from subfleet.methods.assigner import open_stream
from subfleet.protocol.chains import Chain
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.programs import Program, encode_program
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

RESULTS = Path(__file__).parent / "results" / "chains.md"
NETWORKS: Mapping[str, Family] = MappingProxyType(
    {
        "cnn_l": preset("cnn_l", input_shape=(3, 32, 32), class_count=10, norm="group"),
        "cnn_s": preset("cnn_s", input_shape=(1, 49, 10), class_count=12, norm="group"),
        "rnn": preset("rnn", input_shape=(80,), class_count=80, norm="none"),
    }
)
SMALL = ChoiceCnn(input_shape=(1, 8, 8), class_count=2, widths=(8,), depths=(1,), last_widths=(16,))
TARGETS = ("onnx", "executorch")
BATCH, STEPS = 16, 6
MOST_TIMES, LEAST_PLAN, MOST_PLAN = 1.5, 0.95, 1.10
OPTIMISER = OptimiserSettings(momentum=0.9)
CLIPPED = OptimiserSettings(momentum=0.0, max_gradient_norm=5.0)
TRAIN = """
import json, sys
from pathlib import Path
from subfleet.protocol.paths import PathSettings

from subfleet.protocol.schema import from_plain
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Train
from subfleet.protocol.training import TrainingSettings
job = json.loads(sys.argv[1])
folder = Path(job["folder"])
if job["target"] == "onnx":
    from subfleet.trainers.onnx import OnnxTrainer as Trainer
else:
    from subfleet.trainers.executorch import ExecutorchTrainer as Trainer
trainer = Trainer()
trainer.describe(str(folder / "data.npz"))
choices = tuple((name, tuple(own)) for name, own in job["choices"])
result = trainer.train(
    Job(
        program_path=folder / job["program"],
        weights_path=folder / job["weights"],
        output_path=folder / "change",
        data=str(folder / "data.npz"),
        work=Train(
            settings=from_plain(TrainingSettings, job["settings"]), paths=PathSettings() if choices else None
        ),
        round=0,
        client_id="a",
        memory_limit_bytes=2**40,
        choices=choices,
    ),
    lambda: False,
)
step_s = result.train_seconds / result.step_count
sys.stdout.write(json.dumps({"peak_bytes": result.measured_peak_bytes, "step_s": step_s}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Measurements of one path of a network on a target.

    Attributes:
        chain_s, whole_s: seconds of a step of the chain, and of the path's program.
        planned_bytes, measured_bytes: memory of the chain.
        whole_bytes: measured memory of the path's program.
    """

    network: str
    target: str
    path: tuple[str, ...]
    chain_s: float
    whole_s: float
    planned_bytes: int
    measured_bytes: int
    whole_bytes: int

    @property
    def times(self) -> float:
        """The chain's step time over the program's."""
        return self.chain_s / self.whole_s

    @property
    def plan(self) -> float:
        """Planned over measured memory."""
        return self.planned_bytes / self.measured_bytes

    @property
    def accepted(self) -> bool:
        """Whether step time and plan are within their bounds."""
        return self.times <= MOST_TIMES and LEAST_PLAN <= self.plan <= MOST_PLAN


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenChain:
    """Size and export time of a supernet's chain.

    Attributes:
        places: operators of all choices, and links without a choice; pieces: different programs among them.
        seconds: its export time; path_seconds: that of the first path's own program.
    """

    network: str
    target: str
    places: int
    pieces: int
    bytes: int
    seconds: float
    path_seconds: float


class Bench:
    """A network on a target, with its chain written once into a folder with data.

    Args:
        name: name of the network.
        family: its settings.
        target: target of the programs.
        folder: folder for files.
    """

    def __init__(self, name: str, family: Family, target: str, folder: Path) -> None:
        self.name, self.target, self.folder = name, target, folder
        self.network: Network = network_of(family)
        self.tokens = self.network.symbols > 0
        self._write_data(family.input_shape, family.class_count)
        started_s = time.perf_counter()
        program = self._export(self.network.config, self.network.full_architecture(), recompute=False)
        self.seconds, self.program = time.perf_counter() - started_s, program
        content = encode_program(program)
        (folder / "chain").write_bytes(content)
        self.bytes, self.path_seconds = len(content), 0.0

    @property
    def chain(self) -> Chain:
        """The supernet's chain.

        Raises:
            ValueError: its program has no chain.
        """
        if self.program.manifest.chain is None:
            raise ValueError(f"the program of {self.name} is no chain")
        return self.program.manifest.chain

    def measure_path(self, path: Architecture, turns: int, *, spoil: bool) -> Row:
        """Train a path in turns with the chain and with its own program."""
        alone: Family = specialise_family(self.network, path)
        started_s = time.perf_counter()
        whole = self._export(alone, Architecture(), recompute=True)
        self.path_seconds = self.path_seconds or time.perf_counter() - started_s
        (self.folder / "whole").write_bytes(encode_program(whole))
        state = extract(self.network, path, init_state(self.network, 0))
        weights = encode_arrays({name: tensor.numpy() for name, tensor in state.items()})
        (self.folder / "weights").write_bytes(weights)
        runs = [(self._train("chain", path.choices), self._train("whole", ())) for _ in range(turns)]
        room = self.chain.plan_memory(self.chain.restrict(dict(path.choices)))
        return Row(
            network=self.name,
            target=self.target,
            path=tuple(operators[0] for _, operators in path.choices),
            chain_s=statistics.median(chain["step_s"] for chain, _ in runs),
            whole_s=statistics.median(whole_run["step_s"] for _, whole_run in runs),
            planned_bytes=room.held_bytes if spoil else room.largest_peak_bytes,
            measured_bytes=max(chain["peak_bytes"] for chain, _ in runs),
            whole_bytes=max(whole_run["peak_bytes"] for _, whole_run in runs),
        )

    def summarise_export(self) -> WrittenChain:
        """Size and export time of the chain."""
        pieces = {operator.piece for link in self.chain.links for operator in link.operators}
        return WrittenChain(
            network=self.name,
            target=self.target,
            places=sum(len(link.operators) for link in self.chain.links),
            pieces=len(pieces),
            bytes=self.bytes,
            seconds=self.seconds,
            path_seconds=self.path_seconds,
        )

    def _export(self, model: Any, architecture: Architecture, *, recompute: bool) -> Program:
        request = TrainRequest(
            model=model,
            architecture=architecture,
            target=self.target,
            batch_size=BATCH,
            objective=ObjectiveSettings(name="next_token" if self.tokens else "cross_entropy"),
            optimiser=CLIPPED if self.tokens else OPTIMISER,
            recompute=recompute,
        )
        return export_program(request)

    def _write_data(self, shape: tuple[int, ...], classes: int) -> None:
        random, count = np.random.default_rng(0), BATCH * STEPS
        x = random.integers(0, classes, (count, *shape)) if self.tokens else random.standard_normal((count, *shape))
        y = random.integers(0, classes, (count, *shape) if self.tokens else count)
        np.savez(self.folder / "data.npz", x=x if self.tokens else x.astype(np.float32), y=y)

    def _train(self, program: str, choices: Sequence[tuple[str, tuple[str, ...]]]) -> dict[str, Any]:
        optimiser, name = (CLIPPED, "next_token") if self.tokens else (OPTIMISER, "cross_entropy")
        job = {
            "folder": str(self.folder),
            "program": program,
            "weights": "weights",
            "target": self.target,
            "choices": list(choices),
            "settings": {
                "batch_size": BATCH,
                "learning_rate": 0.001,
                "recompute": program == "whole",
                "objective": {"name": name},
                "optimiser": {"momentum": optimiser.momentum, "max_gradient_norm": optimiser.max_gradient_norm},
            },
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", TRAIN, json.dumps(job)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if process.returncode:
            raise RuntimeError(f"{program} of {self.name} on {self.target} failed: {process.stderr[-2000:]}")
        figures: dict[str, Any] = json.loads(process.stdout)
        return figures


def build_path_table(rows: Sequence[Row]) -> list[list[str]]:
    """The table of paths as cells, headers first."""
    heads = ["network", "target", "path", "chain ms", "program ms", "times", "planned MB", "measured MB", "plan"]
    return [[*heads, "program MB"]] + [
        [
            *(row.network, row.target, " ".join(row.path)),
            *(f"{row.chain_s * 1e3:.1f}", f"{row.whole_s * 1e3:.1f}", f"{row.times:.2f}"),
            *(f"{row.planned_bytes / 1e6:.1f}", f"{row.measured_bytes / 1e6:.1f}", f"{row.plan:.2f}"),
            f"{row.whole_bytes / 1e6:.1f}",
        ]
        for row in rows
    ]


def build_export_table(rows: Sequence[WrittenChain]) -> list[list[str]]:
    """The table of exports as cells, headers first."""
    heads = [
        "network",
        "target",
        "places",
        "pieces",
        "chain MB",
        "seconds, cold",
        "seconds a piece",
        "one path, seconds",
    ]
    return [heads] + [
        [
            *(row.network, row.target, str(row.places), str(row.pieces), f"{row.bytes / 1e6:.1f}"),
            *(f"{row.seconds:.0f}", f"{row.seconds / row.pieces:.1f}", f"{row.path_seconds:.1f}"),
        ]
        for row in rows
    ]


def print_table(console: Console, cells: Sequence[Sequence[str]]) -> None:
    """Print cells as a table on the console."""
    table = Table(*cells[0])
    for row in cells[1:]:
        table.add_row(*row)
    console.print(table)


def measure(options: argparse.Namespace, console: Console) -> tuple[list[Row], list[WrittenChain]]:
    """Measure all networks on all targets."""
    rows, written = [], []
    for name in options.networks:
        for target in options.targets:
            console.print(f"writing the chain of {name} for {target}")
            with tempfile.TemporaryDirectory() as folder:
                bench, rng = (
                    Bench(name, NETWORKS.get(name, SMALL), target, Path(folder)),
                    open_stream(f"{options.seed}/{name}"),
                )
                for _ in range(options.paths):
                    operators = [rng.choice(choice.operators) for choice in bench.network.choices.values()]
                    path = path_architecture(bench.network, operators)
                    rows.append(bench.measure_path(path, options.turns, spoil=options.spoil == "plan"))
                    last = rows[-1]
                    console.print(f"  {' '.join(operators)}: {last.times:.2f} times, plan {last.plan:.2f}")
                written.append(bench.summarise_export())
    return rows, written


def main() -> int:
    """Measure, print, and write on request; return 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--paths", type=int, default=3, help="paths of each network; default 3")
    parser.add_argument("--turns", type=int, default=3, help="trainings of each path, both ways; default 3")
    parser.add_argument("--seed", type=int, default=1, help="seed of the drawn paths")
    parser.add_argument("--spoil", choices=["", "plan"], default="", help="plant an error that must be found")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parse_arguments(parser, networks=["small"], targets=["onnx"], paths=1, turns=1)
    console = Console(stderr=options.json, width=200)
    try:
        rows, written = measure(options, console)
    except SubfleetError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    paths, exports = build_path_table(rows), build_export_table(written)
    print_table(console, paths)
    print_table(console, exports)
    times, plans = [row.times for row in rows], [row.plan for row in rows]
    summary = (
        f"a step takes {statistics.median(times):.2f} times the program's, {max(times):.2f} at worst; "
        f"plans are {min(plans):.2f} to {max(plans):.2f} of what was measured"
    )
    console.print(summary)
    if options.write:
        tools = ", ".join(f"{package} {version(package)}" for package in ("torch", "onnxruntime", "executorch"))
        head = "# Chains of programs\n\n`python benchmarks/chains.py --write`, "
        head += f"Python {platform.python_version()}, {tools},\n"
        head += f"{platform.machine()}, one thread: {summary}.\n\n"
        body = "\n".join(format_table(cells[0], cells[1:]) for cells in (paths, exports))
        write_page(RESULTS, f"{head}{body}")
    if options.json:
        print(json.dumps({"paths": [asdict(row) for row in rows], "exports": [asdict(row) for row in written]}))
    return not options.smoke and not all(row.accepted for row in rows)


if __name__ == "__main__":
    sys.exit(main())
