"""Predicted against measured seconds: one run file in a batch, by its logical clock, and in real client processes.

python benchmarks/emulated_time.py                     # prints a table; two minutes
python benchmarks/emulated_time.py --run mine.toml --set rounds=3
python benchmarks/emulated_time.py --json              # ends with one JSON object
python benchmarks/emulated_time.py --write             # and writes benchmarks/results/emulated-time.md

Compared is what each device took in each round, from its task to its update. Both hosts make the same choices, as far
as programs are ready: those that are missing are written first, in a batch that is not measured. A device can only be
emulated as fast as this machine is, so run it on an idle one; its load at the start is recorded.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pages import write_page
from smoke import parse_arguments

from subfleet.emulation.hosting import open_host
from subfleet.export.cache import open_default_cache
from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import RunResult
from subfleet.settings.fleet import HostKind
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run

RESULTS = Path(__file__).parent / "results" / "emulated-time.md"
PAGE = """# Emulated time

`python benchmarks/emulated_time.py --write`, {machine}, load {load} at the start.

What each device took in each round of `{run}`, from its task to its update: predicted by the logical
clock of a batch, and measured with client processes, whose memory is limited by {memory_limit}, their links
by their logs, and their training by the paces of their profiles.

Half of the {count} durations differ by {median:.1%} or less, the worst by {worst:.1%}:
{worst_device} in round {worst_round}, {worst_predicted} s predicted and {worst_measured} s measured.

| device | predicted, s a round | measured, s a round | median difference | worst |
|---|---:|---:|---:|---:|
{rows}

`{figures}`
"""


def play(run: Run, kind: HostKind) -> RunResult:
    """Run it in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="subfleet-time-") as folder, open_host(kind, open_default_cache()) as host:
        return host(run, Path(folder), Unobserved(), threading.Event()).result


def compare(predicted: RunResult, measured: RunResult) -> Iterator[dict[str, Any]]:
    """The durations that both hosts have, of the same submodels."""
    taken = {(record.round, row.client_id): row for record in measured.rounds for row in record.clients}
    for record in predicted.rounds:
        for row in record.clients:
            other = taken.get((record.round, row.client_id))
            if other is None or not row.took_s or not other.took_s or row.architecture_id != other.architecture_id:
                continue
            yield {
                "round": record.round,
                "device": row.client_id,
                "predicted_s": round(row.took_s, 2),
                "measured_s": round(other.took_s, 2),
                "difference": abs(other.took_s - row.took_s) / row.took_s,
            }


def summarise(durations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and worst difference, overall and by device."""
    if not durations:
        raise SystemExit("no device took part in both runs with the same submodel; try more rounds")
    worst = max(durations, key=lambda one: one["difference"])
    devices = {}
    for name in sorted({one["device"] for one in durations}):
        own = [one for one in durations if one["device"] == name]
        devices[name] = {
            "predicted_s": round(statistics.fmean(one["predicted_s"] for one in own), 2),
            "measured_s": round(statistics.fmean(one["measured_s"] for one in own), 2),
            "median": round(statistics.median(one["difference"] for one in own), 3),
            "worst": round(max(one["difference"] for one in own), 3),
        }
    median = round(statistics.median(one["difference"] for one in durations), 3)
    return {
        "median": median,
        "worst": {**worst, "difference": round(worst["difference"], 3)},
        "count": len(durations),
        "devices": devices,
    }


def write(name: str, load: float, memory_limit: str, found: Mapping[str, Any]) -> str:
    """The page."""
    worst = found["worst"]
    rows = "\n".join(
        f"| {device} | {row['predicted_s']} | {row['measured_s']} | {row['median']:.1%} | {row['worst']:.1%} |"
        for device, row in found["devices"].items()
    )
    return PAGE.format(
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        load=load,
        run=name,
        memory_limit=memory_limit or "nothing",
        count=found["count"],
        median=found["median"],
        worst=worst["difference"],
        worst_device=worst["device"],
        worst_round=worst["round"],
        worst_predicted=worst["predicted_s"],
        worst_measured=worst["measured_s"],
        rows=rows,
        figures=json.dumps(found),
    )


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="quickstart", help="a run file, or the name of an included run (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the file")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parse_arguments(parser, set=["rounds=1", "training.epochs=1"])
    run, load = read_run(options.run, ("deploy_targets=[]", *options.set)), round(os.getloadavg()[0], 1)
    play(run, "batch")
    predicted, measured = play(run, "batch"), play(run, "processes")
    found = summarise(list(compare(predicted, measured)))
    page = write(options.run, load, measured.memory_limit, found)
    if not options.json:
        print(page)
    if options.write:
        write_page(RESULTS, page)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
