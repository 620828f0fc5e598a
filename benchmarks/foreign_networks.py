"""Third-party networks, exported and trained: which can be exported, their difference from PyTorch, and their memory.

python benchmarks/foreign_networks.py                                        # all of them, as a table; an hour
python benchmarks/foreign_networks.py --network BERT --target onnx --json    # one program; ends with one JSON object
python benchmarks/foreign_networks.py --write                                # and writes results/foreign-networks.md
python benchmarks/foreign_networks.py --rows rows.jsonl --write              # resumes an interrupted run
python benchmarks/foreign_networks.py --network BERT --plant gradient        # a wrong program, which must not pass

Each row is added to the file of rows as soon as it is measured, and not measured again. The exit status is 1 if fewer
programs than the goal are written, a plan is off, or a refusal names no layer or no remedy.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from foreign.network import ForeignNetwork
from foreign.planting import PLANTS
from foreign.registry import NETWORKS
from pages import write_page
from plan_memory import TRAIN
from smoke import parse_arguments

RESULTS = Path(__file__).parent / "results" / "foreign-networks.md"
GOALS: Mapping[str, int] = MappingProxyType({"onnx": 18, "executorch": 16})
"""Number of networks that must be exported, by target."""
MEGABYTE = 1e6
LOWEST, HIGHEST = 0.95, 1.10
HIGHEST_OF_SMALL = 1.25
SMALL_BYTES = 30e6
"""Least peak of an ExecuTorch program to judge; below it, the mapped pages of kernels affect the ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The outcome for one network on one target.

    Attributes:
        network: its name.
        target: target of the program.
        refused: the exporter's error message; empty if it was exported.
        export_s: seconds to trace, lower, write and verify.
        max_abs_diff: largest difference from PyTorch, according to the manifest.
        planned_bytes: planned memory of its training.
        measured_bytes: growth of a fresh process during its training.
    """

    network: str
    target: str
    refused: str = ""
    export_s: float = 0.0
    max_abs_diff: float = 0.0
    planned_bytes: int = 0
    measured_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Planned over measured memory."""
        return self.planned_bytes / max(self.measured_bytes, 1)

    @property
    def fault(self) -> str:
        """What is wrong with the row; empty if it is fine."""
        if self.refused:
            named = self.refused.startswith(("layer ", "the network (")) and "; " in self.refused
            return "" if named else "the refusal names no layer or no remedy"
        small = self.target == "executorch" and self.measured_bytes < SMALL_BYTES
        highest = HIGHEST_OF_SMALL if small else HIGHEST
        if not LOWEST <= self.ratio <= highest:
            return f"its plan is {self.ratio:.3f} of what it takes, but must be {LOWEST} to {highest}"
        return ""


def measure(network: ForeignNetwork, target: str, folder: Path, *, plant: str = "") -> Row:
    """Export one program in a fresh process, and train it for three and a half steps in another."""
    job = {"network": network.name, "target": target, "folder": str(folder), "plant": plant}
    export = json.loads(_run_python(["-m", "foreign.exporting", json.dumps(job)]))
    if "refused" in export:
        return Row(network=network.name, target=target, refused=export["refused"])
    training = {
        "folder": str(folder),
        "target": target,
        "batch_size": network.batch_size,
        "parts": 1,
        "accumulate": False,
        "threads": 1,
    }
    training_figures = json.loads(_run_python(["-c", TRAIN, json.dumps(training)]))
    return Row(network=network.name, target=target, measured_bytes=training_figures["peak_bytes"], **export)


def _run_python(arguments: Sequence[str]) -> str:
    """Run Python in a fresh process, and return the last line that it prints."""
    # NumPy's threads would add stacks and buffers that no device's trainer has.
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        raise SystemExit(f"a process failed: {process.stderr.strip()}")
    return process.stdout.splitlines()[-1]


def read_rows(path: Path) -> dict[tuple[str, str], Row]:
    """Read the rows of a file, by network and target."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = (Row(**json.loads(line)) for line in lines)
    return {(row.network, row.target): row for row in rows}


def build_table(rows: Sequence[Row]) -> list[str]:
    """The rows as a Markdown table."""
    lines = [
        "| network | code | target | difference | planned MB | measured MB | planned / measured | export s |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        start = f"| {row.network} | {NETWORKS[row.network].origin} | {row.target} |"
        if row.refused:
            lines.append(f"{start} refused | | | | |")
            continue
        sizes = f"{row.planned_bytes / MEGABYTE:.1f} | {row.measured_bytes / MEGABYTE:.1f} | {row.ratio:.3f}"
        lines.append(f"{start} {row.max_abs_diff:.1e} | {sizes} | {row.export_s:.0f} |")
    return lines


def find_faults(rows: Sequence[Row], *, whole: bool) -> list[str]:
    """List the faults of all rows and the missed goals."""
    problems = [f"{row.network} on {row.target}: {row.fault}" for row in rows if row.fault]
    for target, goal in GOALS.items() if whole else ():
        count = sum(row.target == target and not row.refused for row in rows)
        if count < goal:
            problems.append(f"{count} networks are exported to {target}, but {goal} must be")
    return problems


ABOUT = """
Each network is its authors' own code with random weights and a small input; those of transformers also have a small
configuration (`benchmarks/foreign/`). It is exported with its training step, SGD with momentum at a batch of 8, and
verified against the original module in double precision. Then a device's trainer takes three and a half steps with
the program, on one thread, in a separate process; *measured* is the growth of that process (`VmHWM`). A plan must be
0.95 to 1.10 of it; up to 1.25 for ExecuTorch programs below 30 MB. The difference is the largest of any number of a
step's results, relative to the largest number of its tensor if that is above 1. ConvMixer's 32 blocks make rounding
so large that PyTorch's own float32 is as far off: most of its parameters cannot be verified
(`docs/reference/training-programs.md`), and the exporter says so.
"""


def write_results(rows: Sequence[Row]) -> None:
    """Write the page of results."""
    tools = ("torch", "onnxruntime", "executorch", "torchvision", "timm", "transformers")
    counts = {target: sum(row.target == target and not row.refused for row in rows) for target in GOALS}
    exported = ", ".join(f"{count} of {len(NETWORKS)} to {target}" for target, count in counts.items())
    refused = [f"- {row.network}, {row.target}: {row.refused}" for row in rows if row.refused]
    versions = ", ".join(f"{tool} {version(tool)}" for tool in tools)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    lines = [
        "# Third-party networks",
        "",
        f"`python benchmarks/foreign_networks.py --rows rows.jsonl --write`, {versions}, {machine}.",
        "",
        f"Exported: {exported}.",
        ABOUT,
        *build_table(rows),
        *(["", "Refused:", "", *refused] if refused else []),
    ]
    write_page(RESULTS, "\n".join(lines) + "\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=list(NETWORKS), help="only this one; may be repeated")
    parser.add_argument("--target", action="append", choices=list(GOALS), help="only this target; may be repeated")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/foreign-networks.md")
    parser.add_argument("--rows", type=Path, help="a file of rows; its rows are not measured again")
    parser.add_argument("--plant", choices=PLANTS, default="", help="plant an error that must be found")
    return parse_arguments(parser, network=["U-Net"], target=["onnx"])


def main() -> int:
    """Measure, print, and write on request."""
    options = _parse_arguments()
    known = read_rows(options.rows) if options.rows else {}
    rows: list[Row] = []
    for name in options.network or NETWORKS:
        for target in options.target or GOALS:
            if (name, target) not in known:
                with tempfile.TemporaryDirectory() as folder:
                    known[name, target] = measure(NETWORKS[name], target, Path(folder), plant=options.plant)
                if options.rows:
                    with options.rows.open("a") as file:
                        file.write(json.dumps(asdict(known[name, target])) + "\n")
            rows.append(known[name, target])
            lines = [*build_table(rows)[0 if len(rows) == 1 else -1 :], *filter(None, [rows[-1].refused])]
            print("\n".join(lines), flush=True)
    whole = not (options.network or options.target)
    problems = find_faults(rows, whole=whole)
    print("\n".join(problems), file=sys.stderr)
    if options.write and whole and not options.plant:
        write_results(rows)
    if options.json:
        print(json.dumps({"programs": [asdict(row) | {"ratio": row.ratio} for row in rows], "faults": problems}))
    return 1 if problems and not options.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
