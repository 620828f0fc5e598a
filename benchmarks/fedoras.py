"""Results of FedorAS on a task by tier and client, with its supernet's paths, bytes and multiplications.

SUBFLEET_DATA=<folder> subfleet run benchmarks/fedoras/speech.toml --runs runs/fedoras
python benchmarks/fedoras.py runs/fedoras/fedoras-speech-*                       # Markdown tables
python benchmarks/fedoras.py runs/fedoras/fedoras-speech-* --write speech       # writes them into results/fedoras.md
python benchmarks/fedoras.py runs/fedoras/fedoras-speech-* --spoil stages       # drops a tier: must fail

Differences from the first entrant are paired over the seeds that both have. The exit status is 1 if a run of `--first`
did not complete all stages: a supernet trained by devices, scored generations, and a found and trained network for
each tier.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from run_tables import compare_entrants, format_table, replace_tables
from smoke import open_run_folders, parse_arguments

from subfleet.protocol.errors import SubfleetError
from subfleet.reporting.comparison import Entrant, read_entrants
from subfleet.settings.run import Run

RESULTS = Path(__file__).resolve().parent / "results" / "fedoras.md"
GAMES = Path(__file__).resolve().parent / "fedoras"
TIERS = ("slow", "middle", "fast")
_SMALL = (
    *("rounds=3", "method.supernet_rounds=1", "training.epochs=1", "min_clients=3", "clients_per_round=3"),
    *("data.name=digits", "data.partition.name=iid", "model.input_shape=[1, 8, 8]", "model.class_count=10"),
    *("method.search.evolution.evaluations=6", "method.search.evolution.population=3"),
    *("method.search.evolution.offspring=3", "model.widths=[8]", "model.depths=[1]", "model.last_widths=[16]"),
    *(f"fleet.devices.{index}.count=1" for index in range(3)),
    *(f"fleet.devices.{index}.profile={GAMES}/{tier}.toml" for index, tier in enumerate(TIERS)),
)
HEADS = (
    "entrant",
    "seeds",
    "clients' own %",
    *(f"{tier} %" for tier in TIERS),
    "middle half",
    "worst client %",
    "server's samples %",
    "GMAC",
    "MB down",
    "MB up",
    "perplexity",
)


def find_networks(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The networks that a run's search found, from the lowest tier up; empty for a method without a search."""
    return [
        network
        for network in summary["networks"]
        if network["map"] in ("chosen", "drawn") and network["parent"] is not None
    ]


def find_problems(summary: Mapping[str, Any]) -> list[str]:
    """List the stages of FedorAS that a run is missing."""
    supernet, networks = summary["networks"][0], find_networks(summary)
    tiers = sorted({generation["tier"] for generation in summary["generations"]})
    problems = [] if supernet["trained_rounds"] else ["nobody trained the supernet"]
    if not tiers:
        problems.append("no generation was scored")
    if len(networks) != len(tiers) or len(tiers) < len(TIERS):
        problems.append(f"{len(networks)} networks were found in {len(tiers)} tiers, not {len(TIERS)} in as many")
    return problems + [f"{network['network']} was not trained" for network in networks if not network["trained_rounds"]]


def compute_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one run."""
    accuracy = summary["evaluation"]["accuracy"]
    rows = [row for record in summary["rounds"] for row in record["clients"]]
    scoring = [record["devices"] or {} for record in summary["generations"]]
    return {
        "own": accuracy["mean"],
        **{tier: accuracy["tiers"][tier] for tier in TIERS},
        "spread": accuracy["interquartile_range"],
        "worst": accuracy["worst"],
        "server": summary["figures"].get("submodels_accuracy", summary["figures"]["submodels"]),
        "gmacs": summary["figures"]["macs"] / 1e9,
        "down": (sum(row["bytes_down"] for row in rows) + sum(traffic.get("bytes_down", 0) for traffic in scoring))
        / 1e6,
        "perplexity": summary.get("metrics", {}).get("perplexity", 0.0),
        "up": (sum(row["bytes_up"] for row in rows) + sum(traffic.get("bytes_up", 0) for traffic in scoring)) / 1e6,
    }


def build_row(entrant: Entrant) -> list[str]:
    """Means over the seeds, as cells."""
    runs = [compute_figures(entrant.runs[seed]) for seed in sorted(entrant.runs)]
    mean = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    shares = [f"{100 * mean[name]:.1f}" for name in ("own", *TIERS, "spread", "worst", "server")]
    amounts = [f"{mean[name]:.0f}" for name in ("gmacs", "down", "up")]
    return [entrant.name, str(len(runs)), *shares, *amounts, f"{mean['perplexity']:.2f}" if mean["perplexity"] else "-"]


def build_stage_rows(entrant: Entrant) -> Iterator[list[str]]:
    """One row per tier and run of an entrant: the network found, its scores and its training."""
    for seed, summary in sorted(entrant.runs.items()):
        supernet = summary["networks"][0]
        last = [record for record in summary["rounds"] if record["round"] == supernet["retired_round"]]
        mean = f"{100 * last[0]['accuracy']:.1f}" if last else "-"
        for tier, network in enumerate(find_networks(summary), start=1):
            generations = [generation for generation in summary["generations"] if generation["tier"] == tier]
            best = max(generation["best"] for generation in generations)
            score = (
                f"{100 * best:.1f} %"
                if "perplexity" not in summary.get("metrics", {})
                else f"perplexity {math.exp(-best):.2f}"
            )
            share = network.get("metric", "accuracy") == "accuracy"
            own_mean = network.get("own_mean", network["accuracy"])
            own_cell = "-" if own_mean is None else f"{own_mean * (100 if share else 1):.1f}"
            yield [
                *(str(seed), str(tier), mean, f"{network['forward_macs'] / 1e6:.2f}", f"{network['parameters']:,}"),
                *(score, str(sum(generation["paths"] for generation in generations)), own_cell),
                *(str(network[name]) for name in ("owners", "clients", "trained_rounds")),
            ]


def build_rank_rows(entrant: Entrant) -> Iterator[list[str]]:
    """Per run, the rank correlation of the tiers' networks before and after fine-tuning."""
    for seed, summary in sorted(entrant.runs.items()):
        tuning = summary["tuning"]
        yield [str(seed), str(tuning["networks"]), "-" if tuning["tau"] is None else f"{tuning['tau']:+.2f}"]


def build_tables(first: Entrant, others: Sequence[Entrant], *, brief: bool) -> str:
    """All tables as Markdown; brief ones leave out the stages of the first entrant."""
    against = ("against", "seeds", "clients' own, points", "worst client, points", "server's samples, points")
    stages = ("seed", "tier", "mean of random paths %", "M multiplications", "parameters", "score when found")
    more = ("paths scored", "owners' own %", "owners", "trained by", "rounds")
    compared = (
        format_table(HEADS, [build_row(entrant) for entrant in (first, *others)]),
        f"`{first.name}` less each other one, paired over seeds:\n",
        format_table(against, list(compare_entrants(first, others, compute_figures, ("own", "worst", "server")))),
    )
    staged = (
        f"The stages of `{first.name}`:\n",
        format_table((*stages, *more), list(build_stage_rows(first))),
        "Kendall's tau of the tiers' networks when found and after fine-tuning:\n",
        format_table(("seed", "networks", "tau"), list(build_rank_rows(first))),
    )
    return "\n".join(compared if brief else (*compared, *staged))


def drop_highest_tier(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a run's summary without the search of its highest tier."""
    highest = max(generation["tier"] for generation in summary["generations"])
    return {
        **summary,
        "generations": [generation for generation in summary["generations"] if generation["tier"] < highest],
    }


def _is_small(run: Run) -> bool:
    return run.name == "fedoras-speech-opa-s1"


def main() -> int:
    """Print the tables, and write them on request; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="*", help="folders of finished runs")
    parser.add_argument(
        "--first", default="opa", help="the entrant that the others are compared with, by the end of its name"
    )
    parser.add_argument("--brief", action="store_true", help="leave out the stages of the first entrant")
    parser.add_argument(
        "--write", default="", metavar="TASK", help="write the tables into benchmarks/results/fedoras.md"
    )
    parser.add_argument("--spoil", choices=["", "stages"], default="", help="plant an error that must be found")
    options = parse_arguments(parser)
    with open_run_folders(options, f"{GAMES}/speech.toml", *_SMALL, include=_is_small) as folders:
        return print_tables(folders, options)


def print_tables(folders: Sequence[Path], options: argparse.Namespace) -> int:
    """Print the tables; return 1 if a run of FedorAS is missing a stage."""
    try:
        entrants = {entrant.name: entrant for entrant in read_entrants(folders)}
    except SubfleetError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    name = next((name for name in entrants if name.endswith(f"-{options.first}")), "")
    if not name:
        print(f"--first is {options.first!r}, but must be the end of one of {sorted(entrants)}", file=sys.stderr)
        return 2
    first = entrants.pop(name)
    runs = {seed: drop_highest_tier(run) if options.spoil else run for seed, run in sorted(first.runs.items())}
    problems = [f"seed {seed}: {problem}" for seed, run in runs.items() for problem in find_problems(run)]
    print("\n".join(problems) if problems else "Every run went through all stages.")
    if options.spoil:
        return bool(problems) and not options.smoke
    tables = build_tables(first, list(entrants.values()), brief=options.brief)
    print(tables)
    if options.write:
        replace_tables(tables, RESULTS, options.write)
    return bool(problems) and not options.smoke


if __name__ == "__main__":
    sys.exit(main())
