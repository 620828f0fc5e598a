"""Networks that nobody here wrote, recorded, cut, exported and trained on both runtimes.

python benchmarks/corpus.py --rows rows.jsonl --json                 # all of them; hours, resumes from the file
python benchmarks/corpus.py --network "timm dla46x_c" --json         # one of them
python benchmarks/corpus.py --record-only --rows rows.jsonl --json   # only records and cuts; half an hour
python benchmarks/corpus.py --rows rows.jsonl --write                # and writes benchmarks/results/corpus.md
python benchmarks/corpus.py --plant cut --network "torchvision resnet18"   # a wrong cut: must fail

Each row is added to the file as soon as it is measured. A network is elastic if an eighth of every width without blocks
has at most a quarter of the parameters, and random submodels are the masked whole to 1e-5. Half of each width is
exported and trained for six steps in a fresh process. The list is `benchmarks/corpus_benchmark/networks.toml`; the
packages are installed in the versions that it names. The exit status is 1 if a goal is missed.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from corpus_benchmark.networks import SMOKE, list_networks
from pages import write_page
from plan_memory import TRAIN
from smoke import parse_arguments

RESULTS = Path(__file__).parent / "results" / "corpus.md"
TARGETS = ("onnx", "executorch")
GOALS: Mapping[str, float] = MappingProxyType({"elastic": 0.95, "exported": 0.90})
MOST_ERROR, MOST_SMALLEST = 1e-5, 0.25
LEAST_PLANNED, MOST_PLANNED, MOST_PLANNED_OF_SMALL, SMALL_BYTES = 1.0, 1.15, 1.4, 5e6
MOST_DISTANCE = 4.0
_BATCH_SIZE = 4
_TIMEOUT_S = 900

Row = dict[str, Any]


def measure(name: str, targets: Sequence[str]) -> Row:
    """Record one network, and export and train it for each target."""
    row: Row = run_job({"network": name})
    row["exports"] = {} if row.get("refused") else {target: _export(name, target) for target in targets}
    return row


def _export(name: str, target: str) -> Row:
    with tempfile.TemporaryDirectory(prefix="subfleet-") as folder:
        exported = run_job({"network": name, "target": target, "folder": folder})
        if "refused" in exported:
            return exported
        training = {"folder": folder, "target": target, "batch_size": _BATCH_SIZE, "parts": 1, "threads": 1}
        training |= {"accumulate": False}
        trained = _run_python(["-c", TRAIN, json.dumps(training)])
    return {**exported, **trained}


def run_job(job: Mapping[str, str]) -> Row:
    """Do a job of `corpus_benchmark.job` in a fresh process; a failure is a refusal."""
    return _run_python(["-m", "corpus_benchmark.job", json.dumps(job)], network=job["network"])


def _run_python(arguments: Sequence[str], **known: str) -> Row:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {**known, "refused": f"crash: it takes more than {_TIMEOUT_S} s"}
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["killed"]
        return {**known, "refused": f"crash: {lines[-1]:.300}"}
    row: Row = json.loads(process.stdout.splitlines()[-1])
    return row


def is_elastic(row: Row) -> bool:
    """Whether a network was recorded, and can be cut."""
    if row.get("refused"):
        return False
    return bool(row["smallest"] <= MOST_SMALLEST and max(row["submodel_error"], row["whole_error"]) <= MOST_ERROR)


def summarise(rows: Sequence[Row]) -> Row:
    """The figures of all rows."""
    exports = [export for row in rows for export in row["exports"].values() if "refused" not in export]
    planned = [export["planned_bytes"] / export["peak_bytes"] for export in exports]
    steps = [export["step_s"] / export["eager_step_s"] for export in exports]
    return {
        "networks": len(rows),
        "recorded": sum(not row.get("refused") for row in rows),
        "elastic": sum(map(is_elastic, rows)),
        "exported": {
            target: sum("refused" not in row["exports"].get(target, {"refused": ""}) for row in rows)
            for target in TARGETS
        },
        "distance_over_eager": max((export["distance_over_eager"] for export in exports), default=None),
        "planned_over_measured": {"min": min(planned, default=None), "max": max(planned, default=None)},
        "step_over_eager": {"median": median(steps) if steps else None, "worst": max(steps, default=None)},
        "submodel_error": max((row["submodel_error"] for row in rows if not row.get("refused")), default=None),
    }


def find_problems(rows: Sequence[Row], *, exported: bool) -> Iterator[str]:
    """Yield what is wrong with each network, and the missed goals."""
    for row in rows:
        if str(row.get("refused", "")).startswith("crash"):
            yield f"{row['network']} {row['refused']}"
        elif not row.get("refused") and not is_elastic(row):
            yield (
                f"{row['network']}: the smallest submodel has {row['smallest']:.2f} of the parameters, and submodels "
                f"differ by {row['submodel_error']:.0e}"
            )
        yield from _find_export_problems(row)
    figures = summarise(rows)
    counts = {"elastic": figures["elastic"]} | (figures["exported"] if exported else {})
    for name, count in counts.items():
        goal = GOALS.get(name, GOALS["exported"])
        if count < goal * len(rows):
            yield f"{count} of {len(rows)} networks: {name}, but {goal:.0%} must be"


def _find_export_problems(row: Row) -> Iterator[str]:
    for target, export in row["exports"].items():
        if "refused" in export:
            if export["refused"].startswith("crash"):
                yield f"{row['network']} on {target}: {export['refused']}"
            continue
        ratio = export["planned_bytes"] / export["peak_bytes"]
        most = MOST_PLANNED_OF_SMALL if export["peak_bytes"] < SMALL_BYTES else MOST_PLANNED
        if not LEAST_PLANNED <= ratio <= most:
            yield f"{row['network']} on {target}: planned are {ratio:.2f} of what it takes"
        if export["distance_over_eager"] > MOST_DISTANCE:
            yield (
                f"{row['network']} on {target}: {export['distance_over_eager']:.1f} times as far from double precision "
                "as PyTorch's own step"
            )


def build_table(rows: Sequence[Row]) -> list[str]:
    """The rows as a Markdown table."""
    lines = [
        "| network | parameters | smallest | axes | blocks | submodel error | record s | onnx | executorch |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        if row.get("refused"):
            lines.append(f"| {row['network']} | refused | | | | | | | |")
            continue
        cells = [_describe_export(row["exports"].get(target)) for target in TARGETS]
        lines.append(
            f"| {row['network']} | {row['parameters']:,} | {row['smallest']:.3f} | {row['axes']} | {row['blocks']} "
            f"| {row['submodel_error']:.0e} | {row['seconds']:.1f} | {cells[0]} | {cells[1]} |"
        )
    refused = [f"- {row['network']}: {row['refused']}" for row in rows if row.get("refused")]
    refused += [
        f"- {row['network']} on {target}: {export['refused']}"
        for row in rows
        for target, export in row["exports"].items()
        if "refused" in export
    ]
    return [*lines, "", "Refused:", "", *(refused or ["- none"])]


def _describe_export(export: Row | None) -> str:
    if export is None:
        return ""
    if "refused" in export:
        return "refused"
    ratio = export["planned_bytes"] / export["peak_bytes"]
    step = export["step_s"] / export["eager_step_s"]
    return f"plan {ratio:.2f}, step {step:.2f}, error {export['distance_over_eager']:.1f}"


def main() -> int:
    """Measure the networks, and print their figures; return 1 if something is wrong."""
    options = _parse_arguments()
    targets = () if options.record_only else TARGETS
    names = options.network or list(list_networks())
    known = _read_rows(options.rows)
    rows = []
    for name in names:
        row = known.get(name)
        if row is None or not (row.get("refused") or set(row["exports"]) >= set(targets)):
            row = measure(name, targets)
            if options.plant == "cut" and not row.get("refused"):
                row["submodel_error"] += 1.0
            if options.rows is not None:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{name}: {row.get('refused') or _describe(row)}", file=sys.stderr, flush=True)
        rows.append(row)
    problems = list(find_problems(rows, exported=bool(targets)))
    lines = [*build_table(rows), "", "Problems:", "", *(f"- {problem}" for problem in problems or ["none"])]
    if options.write:
        _write(lines, rows)
    if options.json:
        print(json.dumps(summarise(rows)))
    else:
        print("\n".join(lines))
    return bool(problems) and not options.smoke


def _describe(row: Row) -> str:
    return f"smallest {row['smallest']:.3f}, submodels differ by {row['submodel_error']:.0e}, " + ", ".join(
        f"{target} {_describe_export(export)}" for target, export in row["exports"].items()
    )


def _read_rows(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["network"]: row for row in rows}


def _write(lines: Sequence[str], rows: Sequence[Row]) -> None:
    tools = ("torch", "onnxruntime", "executorch")
    versions = ", ".join(f"{tool} {version(tool)}" for tool in tools)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    head = [
        "# Networks that nobody here wrote",
        "",
        f"`{shlex.join(['python', 'benchmarks/corpus.py', *sys.argv[1:]])}`, {versions}, {machine}.",
        "",
        f"`{json.dumps(summarise(rows))}`",
        "",
    ]
    write_page(RESULTS, "\n".join([*head, *lines]) + "\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", help="only this one; may be repeated")
    parser.add_argument("--rows", type=Path, help="a file of rows; those in it are not measured again")
    parser.add_argument("--record-only", action="store_true", help="export nothing")
    parser.add_argument("--plant", choices=["cut"], help="plant an error")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parse_arguments(parser, network=[SMOKE.name], record_only=True)
    if unknown := [name for name in options.network or () if name not in {*list_networks(), SMOKE.name}]:
        parser.error(f"network {unknown[0]!r} is not in the list, such as {next(iter(list_networks()))!r}")
    return options


if __name__ == "__main__":
    sys.exit(main())
