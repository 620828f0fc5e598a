"""Results of FedADP compared with FlexiFed, clusters and standalone clients, on the same clients with unequal networks.

SUBFLEET_DATA=<folder> subfleet run fedadp-game --runs runs/fedadp
python benchmarks/fedadp.py runs/fedadp/fedadp-game-*                      # Markdown tables
python benchmarks/fedadp.py runs/fedadp/fedadp-game-* --first fedadp-game-fedadp --largest 0.85
python benchmarks/fedadp.py runs/fedadp/fedadp-game-* --largest 0.5        # must fail: nothing is left to gain

Accuracies of networks are those of the clients' own networks on the server's samples, after the last round. "Bytes up,
as published" is the size of the updates if clients sent them as wide and as deep as the union (FedADP, step 4).
Differences from the first entrant are paired over the seeds that both have.

`--largest` is the accuracy of the largest network if it is trained on all data in one place, as measured by
benchmarks/headroom.py. The exit status is 1 if it is not ten points above the median standalone client.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from run_tables import format_table, list_shared_seeds
from smoke import DIGITS, open_run_folders, parse_arguments

from subfleet.protocol.errors import SubfleetError
from subfleet.reporting.comparison import Entrant, measure_difference, read_entrants
from subfleet.settings.run import Run

LEAST = 0.10
"""Least difference of accuracy between the largest network on all data and the median standalone client."""
_FLOAT_BYTES = 4
_SMALL = (*DIGITS, *(f"fleet.devices.{index}.runtime=torch" for index in range(6)))
HEADS = (
    *("entrant", "seeds", "networks %", "median kind %", "worst kind %", "own samples %"),
    *("middle half %", "worst client %", "MB down", "MB up", "MB up, as published"),
)


def read_network_accuracies(run: Mapping[str, Any]) -> dict[str, float]:
    """Mean accuracy of the clients of each network, on the server's samples."""
    accuracies: dict[str, float] = run["figures"]["tiers"]
    return accuracies


def count_published_bytes(run: Mapping[str, Any]) -> int:
    """Bytes of all updates if each were as large as the union of its client's network."""
    unions = {network["network"]: _FLOAT_BYTES * network["parameters"] for network in run["networks"]}
    rows = (row for record in run["rounds"] for row in record["clients"] if row["status"].startswith("aggregated"))
    return sum(unions[row["network"]] for row in rows)


def build_row(entrant: Entrant) -> Sequence[str]:
    """One row of the table."""
    runs = [entrant.runs[seed] for seed in sorted(entrant.runs)]
    accuracies = [run["evaluation"]["accuracy"] for run in runs]
    shares = (
        statistics.fmean(run["accuracy"] for run in runs),
        statistics.fmean(statistics.median(read_network_accuracies(run).values()) for run in runs),
        statistics.fmean(min(read_network_accuracies(run).values()) for run in runs),
        statistics.fmean(accuracy["mean"] for accuracy in accuracies),
    )
    half = " to ".join(
        f"{100 * statistics.fmean(accuracy[key] for accuracy in accuracies):.1f}"
        for key in ("lower_quartile", "upper_quartile")
    )
    costs = [statistics.fmean(run["costs"][key] for run in runs) / 1e6 for key in ("bytes_down", "bytes_up")] + [
        statistics.fmean(count_published_bytes(run) for run in runs) / 1e6
    ]
    return (
        *(entrant.name, str(len(runs))),
        *(f"{100 * share:.1f}" for share in shares),
        *(half, f"{100 * statistics.fmean(accuracy['worst'] for accuracy in accuracies):.1f}"),
        *(f"{cost:.1f}" for cost in costs),
    )


def build_network_table(entrants: Sequence[Entrant]) -> str:
    """Each network's accuracy in each entrant, means over seeds."""
    names = list(read_network_accuracies(next(iter(entrants[0].runs.values()))))
    rows = []
    for entrant in entrants:
        means = [
            statistics.fmean(read_network_accuracies(run)[name] for run in entrant.runs.values()) for name in names
        ]
        rows.append((entrant.name, *(f"{100 * mean:.1f}" for mean in means)))
    return format_table(("entrant", *names), rows)


def build_client_table(entrants: Sequence[Entrant]) -> str:
    """Each client's accuracy on its own held-out samples in each entrant, means over seeds."""
    rows = []
    names = [row["client_id"] for row in next(iter(entrants[0].runs.values()))["evaluation"]["clients"]]
    for name in names:
        means = [
            statistics.fmean(find_own_accuracy(run, name) for run in entrant.runs.values()) for entrant in entrants
        ]
        rows.append((name, *(f"{100 * mean:.1f}" for mean in means)))
    return format_table(("client", *(entrant.name for entrant in entrants)), rows)


def find_own_accuracy(run: Mapping[str, Any], client_id: str) -> float:
    """A client's last accuracy on its own samples."""
    return float(next(row["accuracy"] for row in run["evaluation"]["clients"] if row["client_id"] == client_id))


def build_difference_table(first: Entrant, others: Sequence[Entrant]) -> str:
    """The first entrant minus each other one, over the seeds that both have."""
    rows = []
    for other in others:
        seeds = list_shared_seeds(first, other)
        if not seeds:
            continue
        difference = measure_difference(
            *([float(entrant.runs[seed]["accuracy"]) for seed in seeds] for entrant in (first, other))
        )
        interval = f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}{', a tie' if difference.tie else ''}"
        rows.append((other.name, f"{100 * difference.mean:+.1f}", interval, str(difference.pairs)))
    return format_table((f"{first.name} less", "points", "95 % interval", "seeds"), rows)


def describe_headroom(alone: Entrant, largest: float) -> tuple[str, bool]:
    """Describe the headroom in a sentence; returns it, and whether it is enough."""
    median = statistics.median(
        accuracy for run in alone.runs.values() for accuracy in read_network_accuracies(run).values()
    )
    accuracies = f"largest network on all data {100 * largest:.1f} %, median client alone {100 * median:.1f} %"
    return f"Headroom: {accuracies}, {100 * (largest - median):.1f} points.", largest - median >= LEAST


def _is_small(run: Run) -> bool:
    return run.name in {"fedadp-game-fedadp-s1", "fedadp-game-standalone-s1"}


def main() -> int:
    """Print the tables; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of finished runs")
    parser.add_argument("--first", default="fedadp-game-fedadp", help="the entrant to compare with the others")
    parser.add_argument("--alone", default="fedadp-game-standalone", help="the entrant with standalone clients")
    parser.add_argument("--largest", type=float, help="accuracy of the largest network on all data, 0 to 1")
    options = parse_arguments(parser)
    with open_run_folders(options, "fedadp-game", *_SMALL, include=_is_small) as folders:
        return print_tables(folders, options)


def print_tables(folders: Sequence[Path], options: argparse.Namespace) -> int:
    """Print the tables; return 1 if the runs cannot be compared or the headroom is too small."""
    try:
        entrants = read_entrants(folders)
    except SubfleetError as error:
        print(error, file=sys.stderr)
        return 1
    named = {entrant.name: entrant for entrant in entrants}
    enough = True
    if options.largest is not None and options.alone in named:
        headroom, enough = describe_headroom(named[options.alone], options.largest)
        print(headroom, end="\n\n")
    print(format_table(HEADS, [build_row(entrant) for entrant in entrants]))
    print(build_network_table(entrants))
    print(build_client_table(entrants))
    if options.first in named:
        others = [entrant for entrant in entrants if entrant.name != options.first]
        print(build_difference_table(named[options.first], others), end="")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
