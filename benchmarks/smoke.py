"""`--smoke`: the smallest run of a benchmark, to check that it works. Its figures are not judged."""

import argparse
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subfleet.settings.run import Run

__all__ = ["DIGITS", "open_run_folders", "parse_arguments"]

DIGITS = (
    *("rounds=2", "training.epochs=1", "data.name=digits", "data.samples=300", "data.test_samples=100"),
    *("data.partition.min_samples=2", "model.input_shape=[1, 8, 8]", 'targets=["torch"]', "deploy_targets=[]"),
    "memory_overhead_bytes={ torch = 0 }",
)
"""Overrides that make a game of images take seconds: two rounds on handwritten digits, without exports."""


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, /, **smallest: object
) -> argparse.Namespace:
    """Parse the command line; `--smoke` replaces the options that decide how much is measured.

    Args:
        parser: the parser with all other options.
        arguments: used instead of the command line.
        smallest: values for `--smoke`, by the name of the option.
    """
    parser.add_argument("--smoke", action="store_true", help="check in seconds that it runs; figures mean nothing")
    options = parser.parse_args(arguments)
    if options.smoke and getattr(options, "write", False):
        parser.error("--write takes a whole run; leave out --smoke")
    if options.smoke:
        vars(options).update(smallest)
    return options


@contextmanager
def open_run_folders(
    options: argparse.Namespace, game: str, *changes: str, include: "Callable[[Run], bool]"
) -> Iterator[list[Path]]:
    """Open the folders of the command line, or with `--smoke` play a game with one seed in a temporary folder.

    Args:
        options: the parsed command line, with `folders` and `smoke`.
        game: a run file with a sweep, or its name.
        changes: overrides of its keys.
        include: whether to play a run.
    """
    if not options.smoke:
        yield options.folders
        return
    # Benchmarks that measure the memory of fresh processes import this module, too.
    from subfleet.emulation.hosting import open_host
    from subfleet.export.cache import CacheFolder
    from subfleet.journal.guarding import Unobserved
    from subfleet.lab import load_all
    from subfleet.settings.run_folder import choose_folder, create_folder, write_description

    with tempfile.TemporaryDirectory(prefix="subfleet-") as scratch:
        runs, folders = [run for run in load_all(game, *changes, seeds=(1,)) if include(run)], list[Path]()
        with open_host("batch", CacheFolder(path=Path(scratch) / "cache")) as host:
            for run in runs:
                folders.append(create_folder(choose_folder(Path(scratch) / "runs", run.name, None)))
                write_description(folders[-1], run)
                host(run, folders[-1], Unobserved(), threading.Event())
        yield folders
