"""Runs the quickstart like a new user, with an empty program cache, and stores its output.

python benchmarks/quickstart.py                    # the default seed and two others: a table
python benchmarks/quickstart.py --seeds 3          # only the default seed
python benchmarks/quickstart.py --write            # writes benchmarks/results/quickstart.md and quickstart.json
python scripts/readme_demo.py --write              # then the README's block, from quickstart.json

Seconds are the duration of the whole command after the installation. Links are paced, so part of the time is waiting.
Run it on an idle machine; its load at the start is recorded.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages import write_page
from smoke import parse_arguments

RESULTS = Path(__file__).parent / "results"
SEEDS = (3, 1, 2)
_SMALL = ("rounds=1",)
PACKAGES = ("torch", "onnxruntime", "executorch", "amqtt")
PAGE = """# Quickstart

`python benchmarks/quickstart.py --write`, {machine}.

Each run began with an empty program cache. Links are paced to their logs, so their seconds are real. {load}

| seed | full model | worst own | own models | submodels each round | by memory | by link | by both | s | CPU s |
|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|
{rows}

`own models`: number of different final models of the five devices. `by memory`, `by link`: submodels, of 25, that
this limit alone kept from being larger. Seed {first} is the default. A seed changes the held-out samples, the slices,
the first weights and the data order, but no choice of a submodel: these follow from the logs.
"""


def describe_machine() -> str:
    """Cores, processor and versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"{os.cpu_count()} cores ({model}, {platform.machine()}), Python {platform.python_version()}, {packages}"


def measure(seed: int, *changes: str) -> dict[str, Any]:
    """Run the quickstart once, and return its duration, its output and its summary."""
    with tempfile.TemporaryDirectory(prefix="subfleet-quickstart-") as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-m", "subfleet.cli.main", "run", "quickstart", "--runs", str(folder / "runs")]
        environment = {**os.environ, "SUBFLEET_CACHE": str(folder / "cache")}
        load, before, started_s = os.getloadavg()[0], _read_cpu_s(), time.monotonic()
        process = subprocess.run(
            [*command, "--set", f"seed={seed}", *(f"--set={change}" for change in changes)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = time.monotonic() - started_s
        summary = json.loads((folder / "runs" / "quickstart" / "summary.json").read_text(encoding="utf-8"))
    return {
        "seed": seed,
        "machine": describe_machine(),
        "seconds": round(seconds),
        "cpu_seconds": round(_read_cpu_s() - before),
        "load": round(load, 1),
        "printed": process.stdout.splitlines(),
        "summary": summary,
    }


def _read_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def format_row(run: dict[str, Any]) -> str:
    """One run as a row of the page's table."""
    summary = run["summary"]
    limits = [client["limit"] for record in summary["rounds"] for client in record["clients"]]
    cells = (
        run["seed"],
        f"{summary['accuracy']:.3f}",
        f"{min(model['accuracy'] for model in summary['models']):.3f}",
        len({model["architecture"] for model in summary["models"]}),
        ", ".join(str(record["submodels"]) for record in summary["rounds"]),
        limits.count("memory"),
        limits.count("link"),
        limits.count("memory+link"),
        run["seconds"],
        run["cpu_seconds"],
    )
    return f"| {' | '.join(map(str, cells))} |"


def build_page(runs: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    # The load before a later run includes the rest of the run before.
    first = runs[0]["load"]
    load = f"The machine's load when the first began was {first:g}" + (
        "." if first < 1 else ", with other work on the same cores."
    )
    text = PAGE.format(
        machine=runs[0]["machine"], load=load, rows="\n".join(map(format_row, runs)), first=runs[0]["seed"]
    )
    return "\n".join(line if line.startswith("|") else textwrap.fill(line, 120) for line in text.split("\n"))


def main() -> int:
    """Run, print, and write on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/quickstart.md and quickstart.json"
    )
    options = parse_arguments(parser, seeds=SEEDS[:1])
    runs = []
    for seed in options.seeds:
        runs.append(measure(seed, *(_SMALL if options.smoke else ())))
        print(format_row(runs[-1]), flush=True)
    if options.write:
        write_page(RESULTS / "quickstart.md", build_page(runs))
        (RESULTS / "quickstart.json").write_text(json.dumps(runs[0], indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
