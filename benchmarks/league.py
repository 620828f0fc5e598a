"""The league: every federated method on Fashion-MNIST, over 50 unequal clients, on the same logs and the same seeds.

python benchmarks/league.py                                     # every method, three seeds; prints tables
python benchmarks/league.py --methods heterofl fedavg --seeds 2 --rounds 10
python benchmarks/league.py --json                              # ends with one JSON object

SUBFLEET_DATA names the folder of data and logs. Each game runs the real server and the real agents in one process under
a logical clock; its result is kept in the folder of --results, and is not played again where it is there.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

# Bits are promised for one thread; it must be said before NumPy and PyTorch are loaded, here and in every worker.
os.environ["OMP_NUM_THREADS"] = "1"

from league.entrants import ENTRANTS
from league.experiment import game
from league.fleet import CLIENTS
from league.samples import SampleCounts, cut
from league.table import print_league, summary
from rich.console import Console

from subfleet.emulation.virtual.compare import compare
from subfleet.export.cache import CacheFolder
from subfleet.protocol.errors import SubfleetError

BASELINE = "heterofl"


def main() -> int:
    """Play, and print."""
    arguments = _arguments()
    console = Console(stderr=arguments.json, width=160)
    data = os.environ.get("SUBFLEET_DATA")
    if not data:
        console.print("SUBFLEET_DATA is not set, but must name the folder of data and logs; see benchmarks/README.md")
        return 1
    try:
        found = _play(arguments, Path(data), console)
    except SubfleetError as error:
        console.print(str(error))
        return int(error.exit_code)
    print_league(found, console)
    if arguments.json:
        print(json.dumps(found))
    return 0


def _play(arguments: argparse.Namespace, data: Path, console: Console) -> dict[str, object]:
    seeds = range(1, arguments.seeds + 1)
    counts = SampleCounts(train=arguments.samples)
    samples = {seed: cut(arguments.results / "samples", seed, CLIENTS, counts) for seed in seeds}
    builds = {
        f"{name}-r{arguments.rounds}-n{arguments.samples}-s{seed}": partial(
            game, name, seed, arguments.rounds, samples[seed], data
        )
        for name in arguments.methods
        for seed in seeds
    }
    results = compare(
        builds,
        arguments.results,
        CacheFolder(path=arguments.cache),
        processes=arguments.processes,
        say=lambda text: console.print(text, highlight=False),
    )
    ordered = iter(results.values())
    games = {name: [next(ordered) for _ in seeds] for name in arguments.methods}
    return summary(games, baseline=BASELINE if BASELINE in games else next(iter(games)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(ENTRANTS), default=list(ENTRANTS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--samples", type=int, default=10_000, help="of training, over all clients")
    parser.add_argument("--processes", type=int, default=2, help="games that are played at once")
    parser.add_argument("--results", type=Path, default=Path("runs/league"), help="folder of the games' results")
    parser.add_argument("--cache", type=Path, default=Path("runs/league/programs"), help="folder of exported programs")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
