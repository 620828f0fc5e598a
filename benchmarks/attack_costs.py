"""Costs of attacks in the league's games: the lost fraction of the attack-free accuracy, mean of the last five rounds.

subfleet run league-depth --runs runs/league
python benchmarks/attack_costs.py runs/league/league-depth-*     # a Markdown table
python benchmarks/attack_costs.py --smoke                        # plays games itself, in seconds

Each entrant's loss is compared with FedFA's in the same games, paired over seeds.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from run_tables import format_table
from smoke import DIGITS, open_run_folders, parse_arguments

from subfleet.protocol.errors import ConfigError, SubfleetError
from subfleet.reporting.comparison import Entrant, measure_difference, read_entrants
from subfleet.settings.run import Run

ATTACKS = ("shuffled-5", "shuffled-1", "shuffled", "backdoor")
RIVAL, HONEST = "fedfa", "honest"
LAST_ROUNDS = 5
"""Rounds to average over, as attackers are not drawn in every round."""
_SMALL = (
    *DIGITS,
    *("min_clients=6", "clients_per_round=3", "fleet.devices.0.count=2"),
    *(f"fleet.devices.{index}.count=1" for index in range(1, 5)),
    *(f"fleet.devices.{index}.runtime=torch" for index in range(5)),
)
HEADS = ("game", "entrant", "attack", "seeds", "accuracy %", "lost %", f"lost, less {RIVAL}'s (points)")


def main() -> int:
    """Print the table for the folders of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of finished runs")
    options = parse_arguments(parser)
    with open_run_folders(options, "league-depth", *_SMALL, include=_is_small) as folders:
        return print_tables(folders)


def print_tables(folders: Sequence[Path]) -> int:
    """Print the table; return an exit code other than 0 if the runs cannot be compared."""
    try:
        entrants = {entrant.name: entrant for entrant in read_entrants(folders)}
        rows = [row for name in entrants for row in _build_rows(name, entrants)]
    except SubfleetError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    print(format_table(HEADS, rows), end="")
    return 0


def _is_small(run: Run) -> bool:
    return run.name in {f"league-depth-{entrant}-s1" for entrant in ("fedfa-honest", "fedfa-shuffled")}


def _build_rows(name: str, entrants: Mapping[str, Entrant]) -> Iterator[list[str]]:
    attack = next((attack_name for attack_name in ATTACKS if name.endswith(f"-{attack_name}")), None)
    if attack is None:
        return
    series = name.removesuffix(f"-{attack}")
    game, entrant = "-".join(series.split("-")[:2]), "-".join(series.split("-")[2:])
    lost, rival_lost = _compute_lost(series, attack, entrants), {}
    if entrant != RIVAL and f"{game}-{RIVAL}-{attack}" in entrants:
        rival_lost = _compute_lost(f"{game}-{RIVAL}", attack, entrants)
    seeds = sorted(lost.keys() & rival_lost.keys())
    accuracy = statistics.fmean(_average_last_rounds(entrants[name]).values())
    percentages = [f"{100 * value:.1f}" for value in (accuracy, statistics.fmean(lost.values()))]
    yield [game, entrant, attack, str(len(lost)), *percentages, _format_difference(seeds, lost, rival_lost)]


def _format_difference(seeds: Sequence[int], lost: Mapping[int, float], rival_lost: Mapping[int, float]) -> str:
    if len(seeds) < 2:
        return ""
    difference = measure_difference([lost[seed] for seed in seeds], [rival_lost[seed] for seed in seeds])
    tie = " tie" if difference.tie else ""
    return f"{100 * difference.mean:+.1f} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f}){tie}"


def _compute_lost(series: str, attack: str, entrants: Mapping[str, Entrant]) -> dict[int, float]:
    """By seed, the fraction of the attack-free accuracy that the attack costs."""
    if f"{series}-{HONEST}" not in entrants:
        raise ConfigError(f"{series}-{attack} is there without {series}-{HONEST}; name the folders of that, too")
    clean, attacked = (
        _average_last_rounds(entrants[f"{series}-{HONEST}"]),
        _average_last_rounds(entrants[f"{series}-{attack}"]),
    )
    if not attacked.keys() <= clean.keys():
        raise ConfigError(f"{series}-{attack} has seeds {sorted(attacked)}, but {series}-{HONEST} has {sorted(clean)}")
    return {seed: 1 - accuracy / clean[seed] for seed, accuracy in attacked.items()}


def _average_last_rounds(entrant: Entrant) -> dict[int, float]:
    return {
        seed: statistics.fmean(float(record["accuracy"]) for record in run["rounds"][-LAST_ROUNDS:])
        for seed, run in entrant.runs.items()
    }


if __name__ == "__main__":
    sys.exit(main())
