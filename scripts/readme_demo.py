"""Writes the output of the demo into the README from the recorded run, or checks that the two agree.

python scripts/readme_demo.py --check      # used by `make check`
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

__all__ = ["build_block", "main"]

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "results" / "quickstart.json"
BEGIN, END = "<!-- demo: scripts/readme_demo.py -->\n", "<!-- end of demo -->\n"
ENDINGS = {"onnx": ".onnx", "executorch": ".pte", "torch": ".safetensors"}
WIDTH = 104  # of the tables; with the indentation they fit where the README is read


def build_block(recorded: dict[str, Any]) -> str:
    """The main lines of a recorded run as Markdown, and its duration.

    The first and the last round are shown with their tables, the others by their first line, and each device's model
    in the format of its runtime.
    """
    printed: list[str] = recorded["printed"]
    joined = next(number for number, line in enumerate(printed) if line.startswith("client "))
    result = next(number for number, line in enumerate(printed) if line.startswith("Test accuracy of "))
    rounds = [_read_record(plain) for plain in recorded["summary"]["rounds"]]
    first, *between, last = (_render_table(record) for record in rounds)
    evaluated = (line for line in printed if "on held-out samples of their own" in line)
    files = [f"  {row.client_id}: models/{row.client_id}/model{ENDINGS[row.runtime]}," for row in rounds[0].clients]
    models = (line for line in printed[result:] if line.startswith(tuple(files)))
    shown = ["$ make demo", *printed[:joined], *first, *(table[0] for table in between), *last, *evaluated]
    lines = [f"    {line}".rstrip() for line in [*shown, printed[result], *models]]
    busy = f" with other work on the same cores (load {recorded['load']:g})" if recorded["load"] >= 1 else ""
    footnote = (
        f"Measured on {recorded['machine']}: {recorded['seconds']} s after the install{busy}, from an empty program "
        f"cache, {recorded['cpu_seconds']} s of CPU time."
    )
    return "\n".join([*lines, "", textwrap.fill(footnote, 120), ""])


def _read_record(plain: dict[str, Any]) -> RoundRecord:
    """Read a round of summary.json without its derived fields, such as `model`, which is a text there."""
    clients = [_select_fields(ClientRow, client) for client in plain["clients"]]
    stored = {name: value for name, value in _select_fields(RoundRecord, plain).items() if name != "model"}
    return from_plain(RoundRecord, {**stored, "clients": clients})


def _select_fields(kind: type[RoundRecord] | type[ClientRow], plain: dict[str, Any]) -> dict[str, Any]:
    return {field.name: plain[field.name] for field in dataclasses.fields(kind) if field.name in plain}


def _render_table(record: RoundRecord) -> list[str]:
    screen = io.StringIO()
    Tables(Console(file=screen, width=WIDTH, color_system=None)).round_finished(record)
    return screen.getvalue().splitlines()


def main(arguments: list[str] | None = None, *, readme: Path = ROOT / "README.md", recorded: Path = RECORDED) -> int:
    """Check or write the block; return 1 with a message if the README differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        print(f"{readme.name} has no block between {BEGIN.strip()!r} and {END.strip()!r}", file=sys.stderr)
        return 1
    updated = before + BEGIN + "\n" + build_block(json.loads(recorded.read_text(encoding="utf-8"))) + "\n" + END + after
    if options.write:
        readme.write_text(updated, encoding="utf-8")
    elif updated != text:
        print(
            f"{readme.name} and {recorded.name} do not agree; run: python scripts/readme_demo.py --write",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
