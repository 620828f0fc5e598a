"""CPU seconds of emulated rounds: a batch of this project, Flower's simulation engine, and a plain PyTorch loop.

python benchmarks/emulation.py                 # prints a table; ten minutes, with the install of Flower
python benchmarks/emulation.py --json          # ends with one JSON object
python benchmarks/emulation.py --members 1000 3000 10000
python benchmarks/emulation.py --write         # and writes benchmarks/results/emulation.md

The games are in `emulation_benchmark/game.py`: of 100 members, 20 train the network of PyTorch's beginners' tutorial,
or a smaller one, for five steps in each round. The first run creates an environment for Flower, `build/flower`. Each
system runs in its own process, in turn, and each round's figure is the CPU seconds of all its processes. Medians are
over the rounds after the first; "first" includes what is made once. With `--members` fleets grow, and 20 still train.
`emulation_benchmark/accounting.py` accounts a large fleet with a search, in seconds of wall time.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from emulation_benchmark.game import Game, play_eagerly
from pages import write_page
from smoke import parse_arguments

from subfleet.arrays import decode_arrays

RESULTS = Path(__file__).parent / "results" / "emulation.md"
_PROGRAMS = Path(__file__).parent / "emulation_benchmark"
_FLOWER, _FLOWER_VERSION = Path(__file__).resolve().parents[1] / "build" / "flower", "1.42.0"
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}

Rounds = list[float]


def play_flower(game: Game) -> Rounds:
    """CPU seconds of each round in Flower's engine."""
    python = _FLOWER / "bin" / "python"
    if not python.exists():
        sys.stderr.write(f"installing Flower {_FLOWER_VERSION} into {_FLOWER}\n")
        subprocess.run([sys.executable, "-m", "venv", str(_FLOWER)], check=True)
        packages = [f"torch=={version('torch').partition('+')[0]}", f"flwr[simulation]=={_FLOWER_VERSION}", "psutil"]
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, check=True)
    return list(_run([str(python), str(_PROGRAMS / "flower_app.py"), json.dumps(game.describe())]))


def play_batch(game: Game, cache: Path, **changes: Any) -> dict[str, Any]:
    """What a batch of this project takes; see `emulation_benchmark/fleet.py`."""
    settings = json.dumps({"game": game.describe(), "cache": str(cache), **changes})
    return dict(_run([sys.executable, str(_PROGRAMS / "fleet.py"), settings]))


def account_fleet(members: int, rounds: int, cache: Path) -> dict[str, Any]:
    """What it takes to account a large fleet; see `emulation_benchmark/accounting.py`."""
    settings = json.dumps({"members": members, "rounds": rounds, "cache": str(cache)})
    return dict(_run([sys.executable, str(_PROGRAMS / "accounting.py"), settings]))


def _run(command: Sequence[str]) -> Any:
    """The last line that a process prints, as JSON."""
    process = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **_QUIET})
    if process.returncode:
        raise SystemExit(f"{command[1]} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


BATCHES: dict[str, dict[str, Any]] = {
    "exact": {},
    "grouped_one": {"numerics": "grouped"},
    "grouped_four": {"numerics": "grouped", "submodels": 4},
}
"""How this project plays a game, by the names of `--json`."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Play all games; returns what `--json` prints."""
    cache: Path = options.cache
    found = compare(Game(rounds=options.rounds), options)
    found["small"] = compare(Game(network="small", rounds=options.rounds), options)
    found["members"], grown = {}, {}
    for count in options.members:
        fleet = play_batch(Game(members=count, rounds=options.rounds), cache)
        first_s, *later_s = fleet["rounds_s"]
        found["members"][str(count)] = {"first_s": round(first_s, 2), "later_s": round(statistics.median(later_s), 3)}
        grown[count] = fleet["grown_kib"]
    if len(grown) > 1:
        few, many = min(grown), max(grown)
        found["bytes_per_idle_client"] = round(1024 * (grown[many] - grown[few]) / (many - few))
    found["accounting"] = account_fleet(options.accounted, options.accounted_rounds, cache)
    return found


def compare(game: Game, options: argparse.Namespace) -> dict[str, Any]:
    """One game by all, in turn."""
    cache: Path = options.cache
    played: dict[str, list[Rounds]] = {}
    accuracies: dict[str, float] = {}
    for _ in range(options.repeats):
        played.setdefault("eager", []).append(play_eagerly(game))
        if not options.without_flower:
            played.setdefault("flower", []).append(play_flower(game))
        for name, changes in BATCHES.items():
            batch = play_batch(game, cache, **changes)
            played.setdefault(name, []).append(batch["rounds_s"])
            accuracies[name] = batch["accuracy"]
    rates = {name: _rate(game, rounds) for name, rounds in played.items()}
    found: dict[str, Any] = {"flower": rates.get("flower"), "eager": rates["eager"]}
    for name in BATCHES:
        found[name] = {
            "client_rounds_per_cpu_s": rates[name],
            "ratio_to_flower": round(rates[name] / rates["flower"], 2) if "flower" in rates else None,
            "ratio_to_eager": round(rates[name] / rates["eager"], 2),
        }
        if name != "exact":
            found[name] |= {"max_abs_diff": _compare_models(game, cache, name), "accuracy": accuracies[name]}
    return found


def _compare_models(game: Game, cache: Path, name: str) -> float:
    """The largest difference of a model after one round from that of the devices' own runtimes."""
    models, one_round = [], replace(game, rounds=1)
    for changes in (BATCHES[name], {**BATCHES[name], "numerics": "exact"}):
        file = cache / f"{name}.model"
        play_batch(one_round, cache, model=str(file), **changes)
        models.append(decode_arrays(file.read_bytes()))
    mine, exact = models
    return float(max(np.abs(np.asarray(mine[key], np.float64) - exact[key]).max() for key in exact))


def _rate(game: Game, played: Sequence[Rounds]) -> float:
    """Client rounds for each CPU second, in the rounds after the first."""
    seconds = statistics.median(second for rounds in played for second in rounds[1:])
    return round(game.taking_part / seconds, 1)


def describe(found: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}, onnxruntime {version('onnxruntime')}"
    )
    accounted = found["accounting"]
    lines = [
        "# Emulated rounds",
        "",
        f"`python benchmarks/emulation.py --write`, {machine}.",
        "",
        "| emulator | tutorial CNN: client rounds per CPU second | of Flower's | small CNN | of Flower's |",
        "|---|---:|---:|---:|---:|",
        *_describe_emulators(found),
        "",
        "The tutorial's CNN takes images of 32 x 32 pixels in batches of 32, the small one 28 x 28 in batches of 10;",
        "each client takes five steps. Exact numerics are ONNX Runtime's, grouped ones PyTorch's: with one submodel,",
        "or with four and unequal numbers of samples. After a round, grouped and exact models differ by",
        f"{_find_difference(found):.1e} at most (small CNN: {_find_difference(found['small']):.1e}).",
        "",
        "| members, 20 of them train | first round, CPU s | each later round, CPU s |",
        "|---:|---:|---:|",
        *(f"| {count} | {times['first_s']} | {times['later_s']} |" for count, times in found["members"].items()),
        "",
        f"A member that does not train takes {found.get('bytes_per_idle_client', '-')} bytes beside its samples.",
        "",
        f"Accounting {accounted['clients']} clients, of which 20 take part, for {accounted['rounds']} rounds takes",
        f"{accounted['seconds']} s, {accounted['cpu_s']} CPU s; searches find {accounted['submodels']} submodels.",
        "",
        f"`{json.dumps(found)}`",
    ]
    return "\n".join(lines) + "\n"


def _find_difference(game: Mapping[str, Any]) -> float:
    return max(game[name]["max_abs_diff"] for name in BATCHES if name != "exact")


def _describe_emulators(found: Mapping[str, Any]) -> Iterator[str]:
    games = (found, found["small"])
    titles = {
        "exact": "a batch, exact",
        "grouped_one": "a batch, grouped, one submodel",
        "grouped_four": "a batch, grouped, four submodels",
    }
    for name, title in {"flower": "Flower's simulation engine", "eager": "a plain PyTorch loop", **titles}.items():
        cells = []
        for game in games:
            rate = game[name]["client_rounds_per_cpu_s"] if name in titles else game[name]
            cells += [rate, round(rate / game["flower"], 2) if rate and game["flower"] else "-"]
        yield f"| {title} | {' | '.join(str(cell) for cell in cells)} |"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each run, 2 or more; default 6")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system; default 3")
    parser.add_argument("--members", type=int, nargs="*", default=[1000, 3000], help="sizes of larger fleets")
    parser.add_argument("--accounted", type=int, default=10_000, help="clients of the accounted fleet; default 10000")
    parser.add_argument("--accounted-rounds", type=int, default=100, help="its rounds; default 100")
    parser.add_argument("--without-flower", action="store_true", help="leave out what takes an install")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    smallest = {"rounds": 2, "repeats": 1, "members": [30], "without_flower": True}
    smallest |= {"accounted": 30, "accounted_rounds": 2}
    options = parse_arguments(parser, **smallest)
    if options.rounds < 2 or options.repeats < 1:
        parser.error("--rounds must be 2 or more, because the first is reported apart, and --repeats 1 or more")
    if any(count < Game().taking_part for count in options.members):
        parser.error(f"--members must be {Game().taking_part} or more, because so many train in each round")
    with tempfile.TemporaryDirectory(prefix="subfleet-") as cache:
        options.cache = Path(cache)
        found = measure(options)
    sys.stdout.write(json.dumps(found) + "\n" if options.json else describe(found))
    if options.write:
        write_page(RESULTS, describe(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
