"""`--smoke`: a benchmark on as little as it can take, to see that it still runs. Nobody judges its figures."""

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
"""What makes a game of images a matter of seconds: two rounds on handwritten digits, and no program is written."""


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, /, **smallest: object
) -> argparse.Namespace:
    """What the command line asks for; with `--smoke`, the smallest in place of what decides how much is measured.

    Args:
        parser: of all other options.
        arguments: in place of the command line's.
        smallest: by the name of an option.
    """
    parser.add_argument("--smoke", action="store_true", help="see in seconds that it runs; figures mean nothing")
    chosen = parser.parse_args(arguments)
    if chosen.smoke and getattr(chosen, "write", False):
        parser.error("--write takes a whole run; leave out --smoke")
    if chosen.smoke:
        vars(chosen).update(smallest)
    return chosen


@contextmanager
def open_run_folders(
    chosen: argparse.Namespace, game: str, *changes: str, include: "Callable[[Run], bool]"
) -> Iterator[list[Path]]:
    """The folders that the command line names; with `--smoke`, of a game that is played with one seed and forgotten.

    Args:
        chosen: of the command line; its `folders`, and whether it has `smoke`.
        game: a run file with a sweep, or its name.
        changes: of its keys.
        include: says which of its runs are played.
    """
    if not chosen.smoke:
        yield chosen.folders
        return
    # Benchmarks that measure the memory of fresh processes import this module, too.
    from subfleet.emulation.hosting import open_host
    from subfleet.export.cache import CacheFolder
    from subfleet.journal.guarding import Unobserved
    from subfleet.lab import load_all
    from subfleet.settings.run_folder import choose_folder, create_folder, write_description

    with tempfile.TemporaryDirectory(prefix="subfleet-") as scratch:
        games, folders = [one for one in load_all(game, *changes, seeds=(1,)) if include(one)], list[Path]()
        with open_host("batch", CacheFolder(path=Path(scratch) / "cache")) as host:
            for one in games:
                folders.append(create_folder(choose_folder(Path(scratch) / "runs", one.name, None)))
                write_description(folders[-1], one)
                host(one, folders[-1], Unobserved(), threading.Event())
        yield folders
