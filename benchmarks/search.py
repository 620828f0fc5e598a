"""Search under budgets: assignments a second, and how many of the most parameters that fit the answers have.

python benchmarks/search.py                 # prints tables
python benchmarks/search.py --json          # ends with one JSON object
python benchmarks/search.py --write         # and writes benchmarks/results/search.md

Budgets come from the Ghent 4G logs and from memory logs where SUBFLEET_DATA names the folder that holds them, else from
a seed. Prices are those of `subfleet.elastic.cost`. See `search_benchmark/` for spaces and budgets.
"""

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path

from search_benchmark.budgets import read_shares
from search_benchmark.measuring import exhaustive_figures, export_figures, hit_rates, large_figures
from search_benchmark.spaces import LARGE, SMALL, case_of

RESULTS = Path(__file__).parent / "results" / "search.md"
_LARGE_HEAD = (
    "| space | subnets | assignments a second | ours / most found, mean | worst | paper's | best uniform's | used "
    "| below either | fewer for more | over a budget |"
)
_SMALL_HEAD = (
    "| space | subnets | first round: ours / optimum, mean | worst | first half, mean | worst | second half, mean "
    "| worst | below 0.95 | paper's mean, second half | fewer for more | over a budget |"
)


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--quick", action="store_true", help="a tenth of the assignments")
    arguments = parser.parse_args()
    size = 150 if arguments.quick else 1500
    shares, origin = read_shares()
    large = [large_figures(case_of(name), shares, count=size) for name in LARGE]
    small = [exhaustive_figures(case_of(name), shares, count=size) for name in SMALL]
    lines = [
        f"Budgets: {origin}.",
        "",
        "## Large spaces",
        "",
        _LARGE_HEAD,
        "|---|" + "---:|" * (_LARGE_HEAD.count("|") - 2),
        *(one.row for one in large),
        "",
        "## Against the exhaustive optimum",
        "",
        _SMALL_HEAD,
        "|---|" + "---:|" * (_SMALL_HEAD.count("|") - 2),
        *(one.row for one in small),
        "",
        *hit_rates(case_of(LARGE[0]), shares, count=size // 3),
        "",
        *export_figures(case_of(LARGE[0]), shares, rounds=40, clients=max(size // 50, 5)),
    ]
    print("\n".join(lines))
    if arguments.write:
        text = RESULTS.read_text() if RESULTS.exists() else ""
        _, mark, remarks = text.partition("\n## Remarks")
        head = ["# Search under budgets", "", "`SUBFLEET_DATA=<folder> python benchmarks/search.py --write`,"]
        head += [f"Python {platform.python_version()}, numpy {version('numpy')}, {platform.machine()}, one thread.", ""]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n" + mark + remarks)
    if arguments.json:
        figures = {
            "assignments_per_s": min(one.assignments_per_s for one in large),
            "exhaustive_mean": min(one.mean for one in small),
            "exhaustive_worst": min(one.worst for one in small),
            "long_search_mean": min(one.mean for one in large),
            "long_search_worst": min(one.worst for one in large),
            "fewer_for_more": sum(one.fewer for one in (*large, *small)),
            "violations": sum(one.violations for one in (*large, *small)),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
