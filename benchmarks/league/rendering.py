"""Tables of text, on a terminal and as Markdown, and how a paired difference is written in them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from subfleet.reporting.paired import PairedDifference

__all__ = ["TextTable", "as_markdown", "difference_text", "plain_difference", "print_tables"]

_WORDS = frozenset({"entrant", "attack"})
"""Heads of columns that hold no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table whose cells are text."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def print_tables(tables: Iterable[TextTable], console: Console) -> None:
    """Print them."""
    for one in tables:
        table = Table(title=one.title)
        for head in one.heads:
            table.add_column(head, justify="left" if head in _WORDS else "right")
        for row in one.rows:
            table.add_row(*row)
        console.print(table)


def as_markdown(tables: Iterable[TextTable]) -> str:
    """Write them, each below its title."""
    return "\n".join(
        "\n".join((f"{one.title}:", "", _line(one.heads), _line(_rule(one.heads)), *map(_line, one.rows), ""))
        for one in tables
    )


def plain_difference(found: PairedDifference) -> dict[str, Any]:
    """For JSON."""
    return {"mean": found.mean, "low": found.low, "high": found.high, "pairs": found.pairs, "tie": found.tie}


def difference_text(one: Mapping[str, Any]) -> str:
    """A plain difference in points, with its interval; a tie is called a tie."""
    span = f"{100 * one['mean']:+.1f} ({100 * one['low']:+.1f} to {100 * one['high']:+.1f})"
    return f"{span} tie" if one["tie"] else span


def _rule(heads: Sequence[str]) -> list[str]:
    return ["---" if head in _WORDS else "---:" for head in heads]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
