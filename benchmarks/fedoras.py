"""What FedorAS comes to on a task: by tier and by client, with its supernet's paths, bytes and multiplications.

SUBFLEET_DATA=<folder> subfleet run benchmarks/fedoras/speech.toml --runs runs/fedoras
python benchmarks/fedoras.py runs/fedoras/fedoras-speech-*                       # Markdown tables
python benchmarks/fedoras.py runs/fedoras/fedoras-speech-* --write speech       # puts them into results/fedoras.md
python benchmarks/fedoras.py runs/fedoras/fedoras-speech-* --spoil stages       # forgets a tier: has to fail

Differences from the first entrant are paired over the seeds that both have. The exit status is 1 where a run of
`--first` did not go through all stages: a supernet that devices trained, generations that were scored, and for each
tier a network that came of them and was trained.
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
    *(f"fleet.devices.{place}.count=1" for place in range(3)),
    *(f"fleet.devices.{place}.profile={GAMES}/{tier}.toml" for place, tier in enumerate(TIERS)),
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
    """The networks that a run's search has found, from the lowest tier up; none of a method without a search."""
    return [one for one in summary["networks"] if one["map"] in ("chosen", "drawn") and one["parent"] is not None]


def find_problems(summary: Mapping[str, Any]) -> list[str]:
    """What a run lacks of FedorAS' stages."""
    first, found = summary["networks"][0], find_networks(summary)
    tiers = sorted({one["tier"] for one in summary["generations"]})
    lacking = [] if first["trained_rounds"] else ["nobody trained the supernet"]
    if not tiers:
        lacking.append("no generation was scored")
    if len(found) != len(tiers) or len(tiers) < len(TIERS):
        lacking.append(f"{len(found)} networks were found in {len(tiers)} tiers, not {len(TIERS)} in as many")
    return lacking + [f"{one['network']} was not trained" for one in found if not one["trained_rounds"]]


def compute_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Of one run."""
    own = summary["evaluation"]["accuracy"]
    rows = [row for record in summary["rounds"] for row in record["clients"]]
    moved = [record["devices"] or {} for record in summary["generations"]]
    return {
        "own": own["mean"],
        **{tier: own["tiers"][tier] for tier in TIERS},
        "spread": own["interquartile_range"],
        "worst": own["worst"],
        "server": summary["figures"].get("submodels_accuracy", summary["figures"]["submodels"]),
        "gmacs": summary["figures"]["macs"] / 1e9,
        "down": (sum(row["bytes_down"] for row in rows) + sum(one.get("bytes_down", 0) for one in moved)) / 1e6,
        "perplexity": summary.get("metrics", {}).get("perplexity", 0.0),
        "up": (sum(row["bytes_up"] for row in rows) + sum(one.get("bytes_up", 0) for one in moved)) / 1e6,
    }


def build_row(entrant: Entrant) -> list[str]:
    """Means over the seeds, as cells."""
    runs = [compute_figures(entrant.runs[seed]) for seed in sorted(entrant.runs)]
    mean = {name: statistics.fmean(one[name] for one in runs) for name in runs[0]}
    shares = [f"{100 * mean[name]:.1f}" for name in ("own", *TIERS, "spread", "worst", "server")]
    amounts = [f"{mean[name]:.0f}" for name in ("gmacs", "down", "up")]
    return [entrant.name, str(len(runs)), *shares, *amounts, f"{mean['perplexity']:.2f}" if mean["perplexity"] else "-"]


def build_stage_rows(entrant: Entrant) -> Iterator[list[str]]:
    """One row for each tier of each run of an entrant: what was found, and what became of it."""
    for seed, summary in sorted(entrant.runs.items()):
        supernet = summary["networks"][0]
        last = [one for one in summary["rounds"] if one["round"] == supernet["retired_round"]]
        mean = f"{100 * last[0]['accuracy']:.1f}" if last else "-"
        for tier, network in enumerate(find_networks(summary), start=1):
            of_tier = [one for one in summary["generations"] if one["tier"] == tier]
            best = max(one["best"] for one in of_tier)
            score = (
                f"{100 * best:.1f} %"
                if "perplexity" not in summary.get("metrics", {})
                else f"perplexity {math.exp(-best):.2f}"
            )
            share = network.get("metric", "accuracy") == "accuracy"
            found = network.get("own_mean", network["accuracy"])
            own = "-" if found is None else f"{found * (100 if share else 1):.1f}"
            yield [
                *(str(seed), str(tier), mean, f"{network['forward_macs'] / 1e6:.2f}", f"{network['parameters']:,}"),
                *(score, str(sum(one["paths"] for one in of_tier)), own),
                *(str(network[name]) for name in ("owners", "clients", "trained_rounds")),
            ]


def build_rank_rows(entrant: Entrant) -> Iterator[list[str]]:
    """Of each run, how far the tiers' networks rank alike before and after fine-tuning."""
    for seed, summary in sorted(entrant.runs.items()):
        found = summary["tuning"]
        yield [str(seed), str(found["networks"]), "-" if found["tau"] is None else f"{found['tau']:+.2f}"]


def build_tables(first: Entrant, others: Sequence[Entrant], *, brief: bool) -> str:
    """All tables, as Markdown; when brief, without the stages of the first entrant."""
    against = ("against", "seeds", "clients' own, points", "worst client, points", "server's samples, points")
    stages = ("seed", "tier", "mean of random paths %", "M multiplications", "parameters", "score when found")
    more = ("paths scored", "owners' own %", "owners", "trained by", "rounds")
    compared = (
        format_table(HEADS, [build_row(one) for one in (first, *others)]),
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
    """A run as if its highest tier had not been searched."""
    highest = max(one["tier"] for one in summary["generations"])
    return {**summary, "generations": [one for one in summary["generations"] if one["tier"] < highest]}


def _is_small(run: Run) -> bool:
    return run.name == "fedoras-speech-opa-s1"


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="*", help="of runs that are over")
    parser.add_argument("--first", default="opa", help="the entrant that the others are compared with, by its end")
    parser.add_argument("--brief", action="store_true", help="leave out the stages of the first entrant")
    parser.add_argument("--write", default="", metavar="TASK", help="put the tables into benchmarks/results/fedoras.md")
    parser.add_argument("--spoil", choices=["", "stages"], default="", help="an error that has to be found")
    asked = parse_arguments(parser)
    with open_run_folders(asked, f"{GAMES}/speech.toml", *_SMALL, include=_is_small) as folders:
        return print_tables(folders, asked)


def print_tables(folders: Sequence[Path], asked: argparse.Namespace) -> int:
    """Print the tables; 1 where a run of FedorAS lacks something."""
    try:
        entrants = {one.name: one for one in read_entrants(folders)}
    except SubfleetError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    name = next((name for name in entrants if name.endswith(f"-{asked.first}")), "")
    if not name:
        print(f"--first is {asked.first!r}, but must be the end of one of {sorted(entrants)}", file=sys.stderr)
        return 2
    first = entrants.pop(name)
    runs = {seed: drop_highest_tier(run) if asked.spoil else run for seed, run in sorted(first.runs.items())}
    lacking = [f"seed {seed}: {one}" for seed, run in runs.items() for one in find_problems(run)]
    print("\n".join(lacking) if lacking else "Every run went through all stages.")
    if asked.spoil:
        return bool(lacking) and not asked.smoke
    tables = build_tables(first, list(entrants.values()), brief=asked.brief)
    print(tables)
    if asked.write:
        replace_tables(tables, RESULTS, asked.write)
    return bool(lacking) and not asked.smoke


if __name__ == "__main__":
    sys.exit(main())
