"""What attacks cost in the league's games: the fraction of the accuracy without one, mean of the last five rounds.

subfleet run league-depth --runs runs/league
python benchmarks/attack_costs.py runs/league/league-depth-*     # a Markdown table
python benchmarks/attack_costs.py --smoke                        # of games that are played for it, in seconds

Each entrant's loss is compared with FedFA's in the same games, paired over seeds.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from smoke import DIGITS, open_run_folders, parse_arguments

from subfleet.protocol.errors import ConfigError, SubfleetError
from subfleet.reporting.comparison import Entrant, measure_difference, read_entrants
from subfleet.settings.run import Run

ATTACKS = ("shuffled-5", "shuffled-1", "shuffled", "backdoor")
RIVAL, HONEST = "fedfa", "honest"
LAST_ROUNDS = 5
"""Attackers are drawn for some rounds and not for others."""
_SMALL = (
    *DIGITS,
    *("min_clients=6", "clients_per_round=3", "fleet.devices.0.count=2"),
    *(f"fleet.devices.{place}.count=1" for place in range(1, 5)),
    *(f"fleet.devices.{place}.runtime=torch" for place in range(5)),
)
HEADS = ("game", "entrant", "attack", "seeds", "accuracy %", "lost %", f"lost, less {RIVAL}'s (points)")


def main() -> int:
    """Print the table of runs' folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="of runs that are over")
    chosen = parse_arguments(parser)
    with open_run_folders(chosen, "league-depth", *_SMALL, include=_is_small) as folders:
        return print_tables(folders)


def print_tables(folders: Sequence[Path]) -> int:
    """Print the table; an exit code other than 0 where it cannot be told."""
    try:
        entrants = {one.name: one for one in read_entrants(folders)}
        rows = [row for name in entrants for row in _build_rows(name, entrants)]
    except SubfleetError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    for row in (HEADS, ["---"] * len(HEADS), *rows):
        print(f"| {' | '.join(row)} |")
    return 0


def _is_small(run: Run) -> bool:
    return run.name in {f"league-depth-{one}-s1" for one in ("fedfa-honest", "fedfa-shuffled")}


def _build_rows(name: str, entrants: Mapping[str, Entrant]) -> Iterator[list[str]]:
    attack = next((one for one in ATTACKS if name.endswith(f"-{one}")), None)
    if attack is None:
        return
    series = name.removesuffix(f"-{attack}")
    game, entrant = "-".join(series.split("-")[:2]), "-".join(series.split("-")[2:])
    ours, theirs = _compute_lost(series, attack, entrants), {}
    if entrant != RIVAL and f"{game}-{RIVAL}-{attack}" in entrants:
        theirs = _compute_lost(f"{game}-{RIVAL}", attack, entrants)
    seeds = sorted(ours.keys() & theirs.keys())
    accuracy = statistics.fmean(_average_last_rounds(entrants[name]).values())
    told = [f"{100 * value:.1f}" for value in (accuracy, statistics.fmean(ours.values()))]
    yield [game, entrant, attack, str(len(ours)), *told, _format_difference(seeds, ours, theirs)]


def _format_difference(seeds: Sequence[int], ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    if len(seeds) < 2:
        return ""
    found = measure_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    tie = " tie" if found.tie else ""
    return f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f}){tie}"


def _compute_lost(series: str, attack: str, entrants: Mapping[str, Entrant]) -> dict[int, float]:
    """By seed, the fraction of the accuracy of the game without an attack that this one costs."""
    if f"{series}-{HONEST}" not in entrants:
        raise ConfigError(f"{series}-{attack} is there without {series}-{HONEST}; name the folders of that, too")
    clean, found = (
        _average_last_rounds(entrants[f"{series}-{HONEST}"]),
        _average_last_rounds(entrants[f"{series}-{attack}"]),
    )
    if not found.keys() <= clean.keys():
        raise ConfigError(f"{series}-{attack} has seeds {sorted(found)}, but {series}-{HONEST} has {sorted(clean)}")
    return {seed: 1 - accuracy / clean[seed] for seed, accuracy in found.items()}


def _average_last_rounds(entrant: Entrant) -> dict[int, float]:
    return {
        seed: statistics.fmean(float(record["accuracy"]) for record in run["rounds"][-LAST_ROUNDS:])
        for seed, run in entrant.runs.items()
    }


if __name__ == "__main__":
    sys.exit(main())
