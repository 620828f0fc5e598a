"""Plants known defects, one at a time, and checks that the tests find each of them: `make mutants`.

The defects are listed in `tests/mutants/defects.toml`. Each is planted in a copy of the tree. The tests named in its
entry run first, then all tests of the same folders, until the first failure. A defect that no test finds is an error,
and so is one with a text that does not occur exactly once in its file.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
DEFECTS = ROOT / "tests" / "mutants" / "defects.toml"
NOT_COPIED = (".git", ".venv", "build", "__pycache__", "node_modules", ".hypothesis", ".*_cache")
NOT_COPIED_AT_ROOT = frozenset({"runs", "state"})
"""What commands write there; the settings have a folder `runs`, too, which is copied."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
OTHER_FOLDERS = {
    "arrays": ("tests/arrays", "tests/protocol"),
    "edge_client": ("tests/agent", "tests/device", "tests/edge_client"),
    "emulation": ("tests/emulation", "tests/testing"),
}
"""Test folders of packages, if their names differ from the package's."""
SERVER = frozenset({"search", "methods", "rounds", "aggregation", "programs", "journal", "settings"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A defective line to plant in a file.

    Attributes:
        package: its tests must find the defect.
        file: path below the root.
        old: text that occurs exactly once in the file.
        new: its replacement.
        why: the consequence of the defect.
        tests: files or folders of tests that are tried first.
    """

    package: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def list_folders(self) -> tuple[str, ...]:
        """The folders of all tests of the package."""
        folders = ("tests/server",) if self.package in SERVER else (f"tests/{self.package}",)
        return OTHER_FOLDERS.get(self.package, folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The test that failed, or "" if none did."""

    defect: Defect
    test: str
    seconds: float


class Tree:
    """A copy of the sources and tests, in which one defect at a time is planted."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._folder = folder
        never = shutil.ignore_patterns(*NOT_COPIED)

        def ignore(within: str, names: list[str]) -> set[str]:
            return {*never(within, names)} | (NOT_COPIED_AT_ROOT if Path(within) == source else set())

        shutil.copytree(source, folder, ignore=ignore, dirs_exist_ok=True)
        portions = sorted(str(path.parent) for path in folder.glob("*/subfleet"))
        path = os.pathsep.join([*portions, *filter(None, [os.environ.get("PYTHONPATH")])])
        # A planted line may have the length and modification second of the previous one, so no bytecode is kept.
        self._environment = {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def try_defect(self, defect: Defect, *, named_only: bool) -> Outcome:
        """Plant a defect, run tests until one fails, and take it out again."""
        started_s, path = time.monotonic(), self._folder / defect.file
        before = path.read_text(encoding="utf-8")
        path.write_text(before.replace(defect.old, defect.new), encoding="utf-8")
        try:
            test = self._find_first_failure(defect.tests)
            if not test and not named_only:
                test = self._find_first_failure(defect.list_folders())
        finally:
            path.write_text(before, encoding="utf-8")
        return Outcome(defect=defect, test=test, seconds=time.monotonic() - started_s)

    def _find_first_failure(self, tests: Sequence[str]) -> str:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        existing = [name for name in tests if (self._folder / name).exists()]
        if not existing:
            return ""
        process = subprocess.run(
            [*command, *existing], cwd=self._folder, env=self._environment, capture_output=True, text=True, check=False
        )
        if process.returncode == 0:
            return ""
        failure = FAILED.search(process.stdout)
        if failure is None:
            raise SystemExit(
                f"pytest ended with {process.returncode} and named no test: {process.stdout[-2000:]}{process.stderr}"
            )
        return failure[1].partition("[")[0]


def read_defects(path: Path) -> tuple[Defect, ...]:
    """Read all defects, in the order of the file."""
    plain = tomllib.loads(path.read_text(encoding="utf-8"))["defect"]
    return tuple(Defect(**{**entry, "tests": tuple(entry["tests"])}) for entry in plain)


def find_misplaced(defects: Iterable[Defect], tree: Path) -> Iterator[str]:
    """Yield a sentence for each defect that cannot be planted."""
    for defect in defects:
        path = tree / defect.file
        count = path.read_text(encoding="utf-8").count(defect.old) if path.exists() else 0
        if count != 1:
            yield f"{defect.file}: {defect.old!r} stands there {count} times, but must once; correct {DEFECTS.name}"


def try_defects(defects: Sequence[Defect], source: Path, *, jobs: int, named_only: bool) -> Iterator[Outcome]:
    """Yield the outcome of each defect in order, trying as many at a time as there are jobs."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(jobs):
            trees.put(Tree(source, Path(folder) / str(number)))

        def try_in_free_tree(defect: Defect) -> Outcome:
            tree = trees.get()
            try:
                return tree.try_defect(defect, named_only=named_only)
            finally:
                trees.put(tree)

        yield from pool.map(try_in_free_tree, defects)


def main() -> int:
    """Try the defects and print a line for each; return 1 if a defect was not found."""
    parser = argparse.ArgumentParser(description="Plants known defects and checks that the tests find each of them.")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to copy (this one)")
    parser.add_argument("--table", type=Path, default=DEFECTS, help="the defects (tests/mutants/defects.toml)")
    parser.add_argument("--only", default="", help="only defects with this text in their package or file")
    parser.add_argument("--jobs", type=int, default=1, help="defects to try at the same time (1)")
    parser.add_argument("--named", action="store_true", help="run only the tests that are named in a defect's entry")
    parser.add_argument("--smoke", action="store_true", help="only two defects")
    options = parser.parse_args()
    defects = [
        defect
        for defect in read_defects(options.table)
        if options.only in defect.package or options.only in defect.file
    ]
    defects = defects[:2] if options.smoke else defects
    problems = list(find_misplaced(defects, options.tree))
    if problems or not defects:
        print("\n".join(problems) or f"no defect has {options.only!r} in its package or file", file=sys.stderr)
        return 1
    missed = 0
    for outcome in try_defects(defects, options.tree.resolve(), jobs=options.jobs, named_only=options.named):
        missed += not outcome.test
        result = f"found by {outcome.test}" if outcome.test else "NOT FOUND"
        print(f"{outcome.seconds:6.0f} s  {outcome.defect.file}: {outcome.defect.why}: {result}", flush=True)
    print(f"{len(defects) - missed} of {len(defects)} planted defects were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
