"""Writes the README's block of what the demo shows from the recorded run, or checks that it agrees with that run.

python scripts/readme_demo.py --check      # what `make check` does
python scripts/readme_demo.py --write      # after `python benchmarks/quickstart.py --write`
"""

import argparse
import dataclasses
import io
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console

from subfleet.cli.console import Tables
from subfleet.journal.records import ClientRow, RoundRecord
from subfleet.protocol.schema import from_plain

__all__ = ["block", "main"]

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "results" / "quickstart.json"
BEGIN, END = "<!-- demo: scripts/readme_demo.py -->\n", "<!-- end of demo -->\n"
WIDTH = 104  # of the tables; with the indentation they fit where the README is read


def block(recorded: dict[str, Any]) -> str:
    """What a terminal shows of a recorded run, as Markdown, with what it took."""
    printed: list[str] = recorded["printed"]
    first = next(place for place, line in enumerate(printed) if line.startswith("client "))
    after = next(place for place, line in enumerate(printed) if line.startswith("Loading "))
    last = next(place for place, line in enumerate(printed) if line.startswith("Everything is in "))
    rounds = [_record(plain) for plain in recorded["summary"]["rounds"]]
    tables = (line for one in rounds for line in _table(one))
    found = (line for line in printed[first:after] if "on held-out samples of their own" in line)
    shown = ["$ make demo", *printed[:first], *tables, *found, *printed[after:last]]
    lines = [f"    {line}".rstrip() for line in shown]
    busy = f" while other work had its cores too (load {recorded['load']:g})" if recorded["load"] >= 1 else ""
    told = (
        f"That is what it printed on {recorded['machine']}; from an empty program cache it took "
        f"{recorded['seconds']} s after the install{busy}, {recorded['cpu_seconds']} s of CPU."
    )
    return "\n".join([*lines, "", textwrap.fill(told, 120), ""])


def _record(plain: dict[str, Any]) -> RoundRecord:
    """A round of summary.json without what is derived in it."""
    clients = [_fields(ClientRow, client) for client in plain["clients"]]
    return from_plain(RoundRecord, {**_fields(RoundRecord, plain), "clients": clients})


def _fields(kind: type[RoundRecord] | type[ClientRow], plain: dict[str, Any]) -> dict[str, Any]:
    return {field.name: plain[field.name] for field in dataclasses.fields(kind) if field.name in plain}


def _table(record: RoundRecord) -> list[str]:
    screen = io.StringIO()
    Tables(Console(file=screen, width=WIDTH, color_system=None)).round_finished(record)
    return screen.getvalue().splitlines()


def main(arguments: list[str] | None = None, *, readme: Path = ROOT / "README.md", recorded: Path = RECORDED) -> int:
    """Check or write; a sentence and 1 where the README says something else."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--write", action="store_true")
    chosen = parser.parse_args(arguments)
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, found, behind = rest.partition(END)
    if not found:
        print(f"{readme.name} has no block between {BEGIN.strip()!r} and {END.strip()!r}", file=sys.stderr)
        return 1
    made = before + BEGIN + "\n" + block(json.loads(recorded.read_text(encoding="utf-8"))) + "\n" + END + behind
    if chosen.write:
        readme.write_text(made, encoding="utf-8")
    elif made != text:
        print(
            f"{readme.name} and {recorded.name} do not agree; run: python scripts/readme_demo.py --write",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
