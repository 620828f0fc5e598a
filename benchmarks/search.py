"""Search under budgets: assignments per second, and the parameters of the answers over the most that fit.

python benchmarks/search.py                        # prints tables
python benchmarks/search.py --plans plans.jsonl    # keeps exact plans, which take seconds each, for the next run
python benchmarks/search.py --smoke                # checks that it runs, on a tiny space
python benchmarks/search.py --json                 # ends with one JSON object
python benchmarks/search.py --write                # and writes benchmarks/results/search.md
python benchmarks/search.py --spoil                # sends chosen submodels whatever their plans: must fail

Budgets come from the Ghent 4G logs and from memory logs if SUBFLEET_DATA names their folder, else from a seed. The
configuration is the default one, with planned cost estimates. See `search_benchmark/` for spaces and
budgets.

The exit status is 1 if a task was sent above its budget. Times are reported and not judged: they are CPU seconds of a
separate process with one thread for each large space.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from pages import write_page
from search_benchmark.budgets import Share, read_shares
from search_benchmark.exact import ExactFigures, Plans, measure_exact
from search_benchmark.measuring import (
    Figures,
    build_export_table,
    build_hit_rate_table,
    measure_exhaustive,
    measure_large,
)
from search_benchmark.spaces import LARGE, SMALL, TINY, create_case
from smoke import parse_arguments

RESULTS = Path(__file__).parent / "results" / "search.md"
_LARGE_HEAD = (
    "| space | submodels | assignments a second | in the first round | first round, s | ours / most found, mean "
    "| worst | paper's | best uniform's | used | below either | fewer for more | over a budget |"
)
_SMALL_HEAD = (
    "| space | submodels | first round: ours / optimum, mean | worst | first half, mean | worst | second half, mean "
    "| worst | below 0.95 | paper's mean, second half | fewer for more | over a budget |"
)
_EXACT_HEAD = (
    "| space | too large, first round | too large later | sent / optimum, mean | worst | programs | over a budget |"
)


def main() -> None:
    """Measure, print, and write on request."""
    options = _parse_arguments()
    size = 150 if options.quick else 1500
    large_names, small_names = ((TINY,), (TINY,)) if options.smoke else (LARGE, SMALL)
    shares, origin = read_shares()
    large = _measure_in_processes(large_names, shares, size)
    small = [measure_exhaustive(create_case(name), shares, count=size) for name in small_names]
    plans, planned = Plans(options.plans), 3 if options.quick else 12
    exact = [
        measure_exact(
            create_case(name), shares, plans, count=planned, listed=name in small_names, checks=not options.spoil
        )
        for name in dict.fromkeys((*large_names, *small_names))
    ]
    lines = [
        f"Budgets: {origin}.",
        *_format_table("Large spaces", _LARGE_HEAD, [figures.row for figures in large]),
        *_format_table("Against the exhaustive optimum", _SMALL_HEAD, [figures.row for figures in small]),
        *_format_table("Under exact plans", _EXACT_HEAD, [figures.row for figures in exact]),
        "",
        *build_hit_rate_table(create_case(large_names[0]), shares, count=size // 3),
        "",
        *build_export_table(create_case(large_names[0]), shares, rounds=40, clients=max(size // 50, 5)),
    ]
    print("\n".join(lines))
    if options.write:
        head = ["# Search under budgets", "", "`SUBFLEET_DATA=<folder> python benchmarks/search.py --write`,"]
        head += [f"Python {platform.python_version()}, numpy {version('numpy')}, {platform.machine()}, one thread.", ""]
        write_page(RESULTS, "\n".join([*head, *lines]) + "\n")
    summary = _summarise(large, small, exact)
    if options.json:
        print(json.dumps(summary))
    sys.exit(1 if summary["violations"] else 0)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--quick", action="store_true", help="a tenth of the assignments, a quarter of the exact plans")
    parser.add_argument("--plans", type=Path, help="a file of exact plans; new ones are added")
    parser.add_argument(
        "--spoil", action="store_true", help="plant an error: send chosen submodels without checking their exact plans"
    )
    options = parse_arguments(parser, quick=True)
    if options.write and (options.spoil or options.quick):
        parser.error("--write takes a whole run as it is; leave out --spoil and --quick")
    return options


def _measure_in_processes(names: Sequence[str], shares: Sequence[Share], count: int) -> list[Figures]:
    """Measure each large space in a fresh process with one thread: waiting threads would count as busy."""
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return pool.map(partial(measure_large, shares=shares, count=count), names, chunksize=1)


def _format_table(title: str, head: str, rows: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", head, "|---|" + "---:|" * (head.count("|") - 2), *rows]


def _summarise(large: Sequence[Figures], small: Sequence[Figures], exact: Sequence[ExactFigures]) -> dict[str, object]:
    """The worst speeds and fractions, the mean utilisations, and all violations."""
    return {
        "assignments_per_s": {
            "cold": min(figures.cold_per_s for figures in large),
            "warm": min(figures.warm_per_s for figures in large),
        },
        "first_round_s": max(figures.first_round_s for figures in large),
        "utilisation": statistics.fmean(figures.utilisation for figures in large),
        "parameters_of_best": statistics.fmean(figures.mean for figures in large),
        "paper_utilisation": statistics.fmean(figures.paper_utilisation for figures in large),
        "exhaustive_fraction": min(figures.mean for figures in small),
        "exhaustive_fraction_exact": min(statistics.fmean(figures.fractions) for figures in exact if figures.fractions),
        "too_large": {
            "first_round": statistics.fmean(over for figures in exact for over in figures.first),
            "later": statistics.fmean(over for figures in exact for over in figures.later),
        },
        "violations": sum(figures.violations for figures in exact),
    }


if __name__ == "__main__":
    main()
