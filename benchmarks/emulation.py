"""CPU seconds of emulated rounds: a batch of this project, Flower's simulation engine, and a plain PyTorch loop.

python benchmarks/emulation.py                 # prints a table; ten minutes, with the install of Flower
python benchmarks/emulation.py --json          # ends with one JSON object
python benchmarks/emulation.py --members 1000 3000 10000
python benchmarks/emulation.py --write         # and writes benchmarks/results/emulation.md

The game is in `emulation_benchmark/game.py`: of 100 members, 20 train the network of PyTorch's beginners' tutorial
for five steps in each round. The first run creates an environment for Flower, `build/flower`. Each system runs in its
own process, in turn, and each round's figure is the CPU seconds of all its processes. Medians are
over the rounds after the first; "first" includes what is made once. With `--members` fleets grow, and 20 still train.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from emulation_benchmark.game import Game, play_eagerly
from pages import write_page
from smoke import parse_arguments

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


def play_exactly(game: Game, cache: Path, runtime: str = "onnx") -> dict[str, Any]:
    """What a batch of this project takes; see `emulation_benchmark/fleet.py`."""
    settings = json.dumps({"game": game.describe(), "runtime": runtime, "cache": str(cache)})
    return dict(_run([sys.executable, str(_PROGRAMS / "fleet.py"), settings]))


def _run(command: Sequence[str]) -> Any:
    """The last line that a process prints, as JSON."""
    process = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **_QUIET})
    if process.returncode:
        raise SystemExit(f"{command[1]} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Play all games; returns what `--json` prints."""
    game, cache = Game(rounds=options.rounds), options.cache
    players: dict[str, Callable[[], Rounds]] = {
        "eager": lambda: play_eagerly(game),
        "exact": lambda: list(play_exactly(game, cache)["rounds_s"]),
    }
    if not options.without_flower:
        players["flower"] = lambda: play_flower(game)
    played: dict[str, list[Rounds]] = {name: [] for name in players}
    for _ in range(options.repeats):
        for name, play in players.items():
            played[name].append(play())
    rates = {name: _rate(game, rounds) for name, rounds in played.items()}
    found: dict[str, Any] = {"flower": rates.get("flower"), "eager": rates["eager"]}
    found["exact"] = {
        "client_rounds_per_cpu_s": rates["exact"],
        "ratio_to_flower": round(rates["exact"] / rates["flower"], 2) if "flower" in rates else None,
        "ratio_to_eager": round(rates["exact"] / rates["eager"], 2),
    }
    found["members"], grown = {}, {}
    for count in options.members:
        fleet = play_exactly(replace(game, members=count, rounds=options.rounds), cache)
        first_s, *later_s = fleet["rounds_s"]
        found["members"][str(count)] = {"first_s": round(first_s, 2), "later_s": round(statistics.median(later_s), 3)}
        grown[count] = fleet["grown_kib"]
    if len(grown) > 1:
        few, many = min(grown), max(grown)
        found["bytes_per_idle_client"] = round(1024 * (grown[many] - grown[few]) / (many - few))
    return found


def _rate(game: Game, played: Sequence[Rounds]) -> float:
    """Client rounds for each CPU second, in the rounds after the first."""
    seconds = statistics.median(second for rounds in played for second in rounds[1:])
    return round(game.taking_part / seconds, 1)


def describe(found: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}, onnxruntime {version('onnxruntime')}"
    )
    exact = found["exact"]
    rows = [
        ("Flower's simulation engine", found["flower"], 1.0, ""),
        ("a batch of this project, ONNX Runtime", exact["client_rounds_per_cpu_s"], exact["ratio_to_flower"], ""),
        ("a plain PyTorch loop", found["eager"], "", ""),
    ]
    lines = [
        "# Emulated rounds",
        "",
        f"`python benchmarks/emulation.py --write`, {machine}.",
        "",
        "| emulator | client rounds per CPU second | of Flower's |",
        "|---|---:|---:|",
        *(f"| {name} | {'-' if rate is None else rate} | {ratio} |" for name, rate, ratio, _ in rows),
        "",
        "| members, 20 of them train | first round, CPU s | each later round, CPU s |",
        "|---:|---:|---:|",
        *(f"| {count} | {times['first_s']} | {times['later_s']} |" for count, times in found["members"].items()),
        "",
        f"A member that does not train takes {found.get('bytes_per_idle_client', '-')} bytes beside its samples.",
        "",
        f"`{json.dumps(found)}`",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each run, 2 or more; default 6")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system; default 3")
    parser.add_argument("--members", type=int, nargs="*", default=[1000, 3000], help="sizes of larger fleets")
    parser.add_argument("--without-flower", action="store_true", help="leave out what takes an install")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    smallest = {"rounds": 2, "repeats": 1, "members": [30], "without_flower": True}
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
