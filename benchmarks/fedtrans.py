"""Results of FedTrans compared with methods that cut one network: accuracy, multiplications, bytes and family tree.

SUBFLEET_DATA=<folder> subfleet run benchmarks/fedtrans.toml --runs runs/fedtrans
python benchmarks/fedtrans.py runs/fedtrans/fedtrans-*                  # Markdown tables
python benchmarks/fedtrans.py runs/fedtrans/fedtrans-* --write        # writes them into benchmarks/results/fedtrans.md

Differences from the first entrant are paired over the seeds that both have. The exit status is 1 if a run of `--first`
has fewer than three new networks that were each trained in 20 rounds or more, by three or more devices with a budget
for its program.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_tables import compare_entrants, format_table, list_shared_seeds, replace_tables
from smoke import DIGITS, open_run_folders, parse_arguments

from subfleet.protocol.errors import SubfleetError
from subfleet.reporting.comparison import Entrant, read_entrants
from subfleet.settings.run import Run

BORN, ROUNDS, DEVICES = 3, 20, 3
"""Requirements of a run of FedTrans: networks born, and rounds and devices that trained each."""
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "fedtrans.md"
_FLOAT_BYTES = 4
_SMALL = (
    *DIGITS,
    *("fleet.devices.0.count=4", "min_clients=4", "fleet.devices.0.runtime=torch", "fleet.devices.0.population=mixed"),
    *("communication_s=1000.0", "memory_limits={}"),
    # A network grows once its loss is known from two rounds.
    *("method.beta=1e9", "method.gamma=1", "method.delta=1"),
)
HEADS = (
    "entrant",
    "seeds",
    "clients' own %",
    "middle half",
    "worst %",
    "server's samples %",
    "GMAC",
    "MB moved",
    "MB stored",
    "took part %",
    "rounds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedNetwork:
    """How much one network of a run was trained.

    Attributes:
        rounds: rounds in which any device trained it.
        together: rounds in which three or more devices trained it.
        devices: devices that trained it within their budgets.
        often: number of these devices that did so in 20 rounds or more each.
        trainings: number of all trainings.
    """

    network: str
    parent: str
    born_round: int
    reason: str
    parameters: int
    rounds: int
    together: int
    devices: int
    often: int
    trainings: int

    @property
    def problem(self) -> str:
        """Why it was trained too little; empty if it was trained enough."""
        if self.rounds < ROUNDS:
            return f"{self.network} was trained in {self.rounds} rounds, not {ROUNDS}"
        if self.devices < DEVICES:
            return f"{self.network} was trained by {self.devices} devices, not {DEVICES}"
        return ""


def list_trained_networks(summary: Mapping[str, Any]) -> list[TrainedNetwork]:
    """The networks of a run that were in use, in order of appearance."""
    networks = []
    for network in summary["networks"]:
        if network["retired_round"] == 0:
            continue
        rows = [
            (record["round"], row)
            for record in summary["rounds"]
            for row in record["clients"]
            if row["status"].startswith("aggregated") and row["architecture"].partition(" ")[0] == network["network"]
        ]
        carried = [(number, row) for number, row in rows if row["planned_peak_bytes"] <= row["budget_bytes"]]
        by_round, by_device = ({}, {})  # type: dict[int, int], dict[str, int]
        for number, row in carried:
            by_round[number] = by_round.get(number, 0) + 1
            by_device[row["client_id"]] = by_device.get(row["client_id"], 0) + 1
        networks.append(
            TrainedNetwork(
                network=network["network"],
                parent=network["parent"] or "",
                born_round=network["born_round"],
                reason=network["reason"],
                parameters=max((row["parameters"] for _, row in rows), default=0),
                rounds=len(by_round),
                together=sum(count >= DEVICES for count in by_round.values()),
                devices=len(by_device),
                often=sum(count >= ROUNDS for count in by_device.values()),
                trainings=len(carried),
            )
        )
    return networks


def find_problems(summary: Mapping[str, Any]) -> list[str]:
    """List the requirements that a run of FedTrans does not meet."""
    born = [network for network in list_trained_networks(summary) if network.parent]
    few = [f"{len(born)} networks were born, not {BORN}"] if len(born) < BORN else []
    return [*few, *(network.problem for network in born if network.problem)]


def compute_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one run."""
    accuracy = summary["evaluation"]["accuracy"]
    rows = [row for record in summary["rounds"] for row in record["clients"]]
    return {
        "own": accuracy["mean"],
        "spread": accuracy["interquartile_range"],
        "worst": accuracy["worst"],
        "server": summary["figures"]["submodels"],
        "gmacs": summary["figures"]["macs"] / 1e9,
        "megabytes": sum(row["bytes_down"] + row["bytes_up"] for row in rows) / 1e6,
        "stored": count_stored_bytes(summary) / 1e6,
        "participation": summary["participation"],
        "rounds": len(summary["rounds"]),
    }


def count_stored_bytes(summary: Mapping[str, Any]) -> int:
    """Bytes of weights that the server keeps: all networks, or the largest submodel that took part."""
    networks = list_trained_networks(summary)
    if any(network.parent for network in networks):
        return _FLOAT_BYTES * sum(network.parameters for network in networks)
    return _FLOAT_BYTES * max(row["parameters"] for record in summary["rounds"] for row in record["clients"])


def build_row(entrant: Entrant) -> list[str]:
    """Means over the seeds, as cells."""
    runs = [compute_figures(entrant.runs[seed]) for seed in sorted(entrant.runs)]
    mean = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    shares = [f"{100 * mean[name]:.1f}" for name in ("own", "spread", "worst", "server")]
    amounts = [f"{mean[name]:.{digits}f}" for name, digits in (("gmacs", 0), ("megabytes", 1), ("stored", 2))]
    return [
        entrant.name,
        str(len(runs)),
        *shares,
        *amounts,
        f"{100 * mean['participation']:.0f}",
        f"{mean['rounds']:.0f}",
    ]


def compare_macs(first: Entrant, others: Sequence[Entrant]) -> Iterator[str]:
    """The first entrant's multiplications over those of each other one."""
    for other in others:
        if seeds := list_shared_seeds(first, other):
            first_macs, other_macs = (
                [compute_figures(entrant.runs[seed])["gmacs"] for seed in seeds] for entrant in (first, other)
            )
            ratios = (own / reference for own, reference in zip(first_macs, other_macs, strict=True))
            yield f"{statistics.fmean(ratios):.2f}"


def build_tree_rows(seed: int, summary: Mapping[str, Any]) -> list[list[str]]:
    """One row per network of a run."""
    return [
        [str(seed), network.network, network.parent, str(network.born_round), network.reason, f"{network.parameters:,}"]
        + [
            str(count)
            for count in (network.rounds, network.together, network.devices, network.often, network.trainings)
        ]
        for network in list_trained_networks(summary)
    ]


def build_tables(first: Entrant, others: Sequence[Entrant]) -> str:
    """All tables, as Markdown."""
    against = ("against", "seeds", "clients' own, points", "server's samples, points", "times its GMAC")
    tree = ("seed", "network", "from", "after round", "what was changed, and why", "parameters", "rounds")
    more = (f"with {DEVICES} devices or more", "devices", f"in {ROUNDS} rounds each", "trainings")
    compared = compare_entrants(first, others, compute_figures, ("own", "server"))
    return "\n".join(
        (
            format_table(HEADS, [build_row(entrant) for entrant in (first, *others)]),
            f"`{first.name}` less each other one, paired over seeds:\n",
            format_table(
                against, [[*row, share] for row, share in zip(compared, compare_macs(first, others), strict=True)]
            ),
            f"The family tree of `{first.name}`; of each network, who trained it within the device's budget:\n",
            format_table(
                (*tree, *more), [row for seed, run in sorted(first.runs.items()) for row in build_tree_rows(seed, run)]
            ),
        )
    )


def _is_small(run: Run) -> bool:
    return run.name in {"fedtrans-fedtrans-s1", "fedtrans-heterofl-s1"}


def main() -> int:
    """Print the tables, and write them on request; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="*", help="folders of finished runs")
    parser.add_argument("--first", default="fedtrans-fedtrans", help="the entrant that the others are compared with")
    parser.add_argument("--write", action="store_true", help="write the tables into benchmarks/results/fedtrans.md")
    options = parse_arguments(parser)
    with open_run_folders(options, f"{HERE}/fedtrans.toml", *_SMALL, include=_is_small) as folders:
        return print_tables(folders, options)


def print_tables(folders: Sequence[Path], options: argparse.Namespace) -> int:
    """Print the tables; return 1 if a run of FedTrans does not meet a requirement."""
    try:
        entrants = {entrant.name: entrant for entrant in read_entrants(folders)}
    except SubfleetError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    if options.first not in entrants:
        print(f"--first is {options.first!r}, but must be one of {sorted(entrants)}", file=sys.stderr)
        return 2
    first = entrants.pop(options.first)
    tables = build_tables(first, list(entrants.values()))
    print(tables)
    if options.write:
        replace_tables(tables, RESULTS, "runs")
    problems = [f"seed {seed}: {problem}" for seed, run in sorted(first.runs.items()) for problem in find_problems(run)]
    print("\n".join(problems) if problems else "Every run had what it had to show.")
    return bool(problems) and not options.smoke


if __name__ == "__main__":
    sys.exit(main())
