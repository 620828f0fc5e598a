"""Plays every method with sixteen honest members and four liars: whether runs end, and what honest members lose.

python benchmarks/liars.py --methods fedavg oort --seeds 1      # two of the methods, as a table
python benchmarks/liars.py --write                              # all of them, and writes benchmarks/results/liars.md
python benchmarks/liars.py --processes                          # three of them, with a process for each member
python benchmarks/liars.py --unguarded                          # without the protection against liars: must fail
python benchmarks/liars.py --smoke                              # one round of one method, without judging

Sixteen members are honest. A claimer claims the largest values that messages can hold; a silent one never answers a
task; a garbler sends -30 times its change, NaN or the tiniest numbers; and a churner returns with a new session at each
heartbeat, claims one byte of memory, refuses tasks and then sends updates, and repeats messages. The honest members'
result is the mean accuracy of their own models on the server's samples. It is compared with the same run without liars.

The exit status is 1 if a run does not end by itself with all of its rounds, or if the honest members of a method lose
more than two points, the mean over seeds; with --processes also if a process fails or has to be stopped.
"""

import argparse
import logging
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from liar_benchmark.games import METHODS_AND_VARIANTS, Game, play
from liar_benchmark.headroom import describe_headroom
from liar_benchmark.processes import PROCESS_ROUNDS, play_in_processes
from liar_benchmark.tables import Row, build_process_table, build_row, build_table, find_problems
from smoke import parse_arguments

from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.protocol.errors import SubfleetError

RESULTS = Path(__file__).parent / "results" / "liars.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each method; return 1 if a method has a problem."""
    options = _parse_arguments(arguments)
    started_s = time.monotonic()
    try:
        with _disable_logs():
            lines, problems = _play_in_processes(options) if options.processes else _play_in_one_process(options)
    except SubfleetError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    verdict = [*(problems or ["Every run ended by itself, and nobody honest lost more than two points."])]
    print("\n".join(verdict))
    if options.write:
        _write(options, [*lines, "", *(f"- {line}" for line in verdict)], time.monotonic() - started_s)
    return bool(problems) and not options.smoke


@contextmanager
def _disable_logs() -> Iterator[None]:
    """Silence logging: servers log each invalid message that they drop."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help=f"some of: {', '.join(METHODS_AND_VARIANTS)} (default: all)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method, with seeds 1 to this (default: 3)")
    parser.add_argument(
        "--rounds", type=int, help="rounds of each run (default: 18; with --processes 10, with oort 30)"
    )
    parser.add_argument(
        "--processes",
        action="store_true",
        help=f"a server, a broker and a process for each member, by {', '.join(PROCESS_ROUNDS)}",
    )
    parser.add_argument(
        "--unguarded", action="store_true", help="plant the error: claims count unchanged, and no update is suspect"
    )
    parser.add_argument(
        "--declared-width", type=int, default=512, help="width of the networks that liars declare (default: 512)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="methods to play at once (default: 1)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/liars.md, or add to it the part")
    smallest = {"methods": ["fedavg"], "seeds": 1, "rounds": 1, "processes": False}
    options = parse_arguments(parser, arguments, **smallest)
    known = tuple(PROCESS_ROUNDS) if options.processes else tuple(METHODS_AND_VARIANTS)
    if unknown := [method for method in options.methods or () if method not in known]:
        parser.error(f"method {unknown[0]!r} is none of {', '.join(known)}")
    if min(options.seeds, options.jobs, options.rounds or 1) < 1 or options.rounds == 0:
        parser.error(
            f"--seeds, --jobs and --rounds are {options.seeds}, {options.jobs} and {options.rounds}, "
            "but must be 1 or more"
        )
    options.methods = options.methods or list(known)
    return options


def _play_in_one_process(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    rows = []
    for row in _play_methods(options):
        rows.append(row)
        print(f"{row.method}: {100 * row.without:.1f} % without, {100 * row.beside:.1f} % with liars", flush=True)
    lines = build_table(rows)
    print("\n".join(["", *lines, ""]))
    return lines, find_problems(rows)


def _play_methods(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each method in their order; `--jobs` plays several at once."""
    if options.jobs == 1:
        yield from map(partial(_play_method, options), options.methods)
        return
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), logging.disable, (logging.CRITICAL,)) as pool:
        yield from pool.map(partial(_play_method, options), options.methods)


def _play_method(options: argparse.Namespace, name: str) -> Row:
    rounds, seeds = options.rounds or 18, range(1, options.seeds + 1)
    with tempfile.TemporaryDirectory() as folder, ExportPool(CacheFolder(path=Path(folder)), workers=1) as exports:
        results = [
            [
                play(
                    Game(
                        method=name,
                        seed=seed,
                        rounds=rounds,
                        liars=liars,
                        guarded=not options.unguarded,
                        declared_width=options.declared_width,
                    ),
                    exports,
                )
                for seed in seeds
            ]
            for liars in (False, True)
        ]
    return build_row(name, *results)


def _play_in_processes(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    rows, problems = [], list[str]()
    for name in options.methods:
        with tempfile.TemporaryDirectory(prefix="subfleet-") as folder:
            seeds = range(1, options.seeds + 1)
            rows.append(play_in_processes(name, Path(folder), options.rounds or PROCESS_ROUNDS[name], seeds))
        print(f"{name}: {rows[-1].description}", flush=True)
        problems += rows[-1].problems
    lines = build_process_table(rows)
    print("\n".join(["", *lines, ""]))
    return lines, problems


def _write(arguments: argparse.Namespace, lines: Sequence[str], seconds: float) -> None:
    """Write a section of the page; the other sections stay."""
    title = "## With a process for each member" if arguments.processes else "## In one process"
    if arguments.unguarded:
        title = "## Unguarded: the planted error"
    command = shlex.join(["python", "benchmarks/liars.py", *sys.argv[1:]])
    machine = f"Python {platform.python_version()}, torch {version('torch')}, {platform.machine()}"
    part = [title, "", f"`{command}`, {machine}, {os.cpu_count()} cores, {seconds / 60:.0f} minutes.", "", *lines]
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    sections = {text.partition("\n")[0]: f"## {text}".strip() for text in old.split("\n## ")[1:]}
    sections[title.removeprefix("## ")] = "\n".join(part)
    head = ["# Liars", "", *_HEAD, "", *describe_headroom()]
    RESULTS.write_text("\n\n".join(["\n".join(head), *sections.values()]) + "\n", encoding="utf-8")
    print(f"\nWritten to {RESULTS}")


_HEAD = (
    "Twenty members, sixteen of them honest, learn digits with random signs ([details](../README.md#liarspy)).",
    "Accuracies are means over honest members' own models on the server's samples.",
)

if __name__ == "__main__":
    sys.exit(main())
