"""The league: every federated method on Fashion-MNIST, over 50 unequal clients, on the same logs and the same seeds.

python benchmarks/league.py                                     # every method, three seeds; prints tables
python benchmarks/league.py --methods heterofl fedavg --seeds 2 --rounds 10
python benchmarks/league.py --attacks honest shuffled           # an IID split, a fifth of the clients malicious
python benchmarks/league.py --json                              # ends with one JSON object

SUBFLEET_DATA names the folder of data and logs. Each game runs the real server and the real agents in one process under
a logical clock; its result is kept in the folder of --results, and is not played again where it is there.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Bits are promised for one thread; it must be said before NumPy and PyTorch are loaded, here and in every worker.
os.environ["OMP_NUM_THREADS"] = "1"

from league.attacks import ATTACKED, ATTACKS, RIVALS, attack_game
from league.attacks import CLIENTS as ATTACK_CLIENTS
from league.entrants import ENTRANTS
from league.experiment import game
from league.fleet import CLIENTS
from league.rendering import TextTable, as_markdown, print_tables
from league.samples import SampleCounts, cut
from league.table import league_tables, summary
from league.under_attack import attack_summary, attack_tables
from rich.console import Console

from subfleet.emulation.batch.compare import Build, compare
from subfleet.export.cache import CacheFolder
from subfleet.protocol.errors import ConfigError, SubfleetError

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
        found = _attacks(arguments, console) if arguments.attacks else _league(arguments, Path(data), console)
    except SubfleetError as error:
        console.print(str(error))
        return int(error.exit_code)
    if arguments.json:
        print(json.dumps(found))
    return 0


def _league(arguments: argparse.Namespace, data: Path, console: Console) -> dict[str, Any]:
    seeds = range(1, arguments.seeds + 1)
    names = _known(arguments.methods, ENTRANTS)
    rounds = arguments.rounds or 15
    counts = SampleCounts(train=arguments.samples or 10_000)
    samples = {seed: cut(arguments.results / "samples", seed, CLIENTS, counts) for seed in seeds}
    builds: dict[str, Build] = {
        f"{name}-r{rounds}-n{counts.train}-s{seed}": partial(game, name, seed, rounds, samples[seed], data)
        for name in names
        for seed in seeds
    }
    ordered = iter(_played(builds, arguments, console))
    games = {name: [next(ordered) for _ in seeds] for name in names}
    found = summary(games, baseline=BASELINE if BASELINE in games else next(iter(games)))
    _show(list(league_tables(found)), arguments, console)
    return found


def _attacks(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    seeds = range(1, arguments.seeds + 1)
    names = _known(arguments.methods, ATTACKED)
    # What an attack costs is told from a game without it.
    attacks = list(dict.fromkeys(("honest", *arguments.attacks)))
    rounds = arguments.rounds or 10
    counts = SampleCounts(train=arguments.samples or 10_000)
    folder = arguments.results / "samples"
    samples = {seed: cut(folder, seed, ATTACK_CLIENTS, counts, split="iid") for seed in seeds}
    builds: dict[str, Build] = {
        f"attack-{name}-{attack}-r{rounds}-n{counts.train}-s{seed}": partial(
            attack_game, name, attack, seed, rounds, samples[seed]
        )
        for name in names
        for attack in attacks
        for seed in seeds
    }
    ordered = iter(_played(builds, arguments, console))
    games = {name: {attack: [next(ordered) for _ in seeds] for attack in attacks} for name in names}
    found = attack_summary(games, rivals=RIVALS)
    _show(list(attack_tables(found)), arguments, console)
    return found


def _show(tables: Sequence[TextTable], arguments: argparse.Namespace, console: Console) -> None:
    print_tables(tables, console)
    if arguments.markdown:
        arguments.markdown.write_text(as_markdown(tables), encoding="utf-8")


def _known(names: list[str], entrants: Mapping[str, object]) -> list[str]:
    """The entrants that play; all where none is named."""
    unknown = sorted(set(names) - set(entrants))
    if unknown:
        raise ConfigError(f"there are no entrants {', '.join(unknown)} here; choose from: {', '.join(entrants)}")
    return names or list(entrants)


def _played(
    builds: Mapping[str, Build], arguments: argparse.Namespace, console: Console
) -> Iterable[Mapping[str, Any]]:
    return compare(
        builds,
        arguments.results,
        CacheFolder(path=arguments.cache),
        processes=arguments.processes,
        say=lambda text: console.print(text, highlight=False),
    ).values()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="all by default")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=[], help="play with and without these")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--rounds", type=int, help="15, or 10 under attack")
    parser.add_argument("--samples", type=int, help="of training, over all clients: 10,000")
    parser.add_argument("--processes", type=int, default=2, help="games that are played at once")
    parser.add_argument("--results", type=Path, default=Path("runs/league"), help="folder of the games' results")
    parser.add_argument("--cache", type=Path, default=Path("runs/league/programs"), help="folder of exported programs")
    parser.add_argument("--markdown", type=Path, help="file that gets the tables as Markdown")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
