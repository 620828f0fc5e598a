"""What `subfleet methods` shows: every method by its default parameters, and whether three rounds go as they should."""

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.table import Table

from subfleet.cli.literal import literal
from subfleet.methods import METHODS, Method
from subfleet.methods.describing import MethodInfo, Setting, join_departures, list_departures
from subfleet.protocol.schema import to_plain

__all__ = ["listing", "row_of", "show", "show_parameters"]

Row = dict[str, Any]
_UNTOLD = MethodInfo(title="", paper="", varies=(), runtimes=())
"""Of a method that cannot be loaded."""


def listing() -> dict[str, Row]:
    """Every method as plain data, by the name that configurations give it; of a broken one its status says why."""
    rows = {name: row_of(name) for name in METHODS}
    rows |= {name: _row(_UNTOLD, f"broken: {why}", {}) for name, why in METHODS.broken.items()}
    return dict(sorted(rows.items()))


def row_of(name: str) -> Row:
    """One method as plain data.

    Raises:
        ConfigError: there is no such method, or it cannot be loaded.
    """
    kind = METHODS.named(name)
    return _row(kind.INFO, join_departures(list_departures(kind(), Setting())), _parameters(kind()))


def show_parameters(console: Console, name: str) -> None:
    """Print each parameter of a method beside what its paper has.

    Raises:
        ConfigError: there is no such method.
    """
    row = row_of(name)
    table = Table(title=f"{row['title']}: {row['paper']}", title_justify="left", title_style="bold")
    for title in ("parameter", "default", "paper"):
        table.add_column(title, overflow="fold")
    for parameter, told in row["parameters"].items():
        values = ("open" if value is None else str(value) for value in (told["default"], told["paper"]))
        table.add_row(*map(literal, (parameter, *values)))
    console.print(table)
    console.print(f"By default: {row['status']}", markup=False, highlight=False)


def show(console: Console, verdicts: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Print a table, with a column for the checks where there were any: what each policy of norms came to."""
    table = Table(title="Methods", title_justify="left", title_style="bold", show_lines=True)
    for title in ("name", "varies", "runtimes", "status", "paper", *(("check",) if verdicts is not None else ())):
        table.add_column(title, overflow="fold")
    for name, row in listing().items():
        cells = [
            name,
            ", ".join(row["varies"]) or "nothing",
            ", ".join(row["runtimes"]),
            str(row["status"]),
            str(row["paper"]),
        ]
        if verdicts is not None:
            cells.append("\n".join(f"{norms}: {said}" for norms, said in verdicts.get(name, {}).items()))
        table.add_row(*map(literal, cells))
    console.print(table)


def _parameters(method: Method) -> dict[str, dict[str, Any]]:
    """Of each parameter its default and the paper's value, None where the paper leaves it open."""
    published = method.INFO.published
    names = [one.name for one in fields(method) if not any(path.startswith(f"{one.name}.") for path in published)]
    told = dict.fromkeys([*published, *names])
    return {
        name: {
            "default": to_plain(attrgetter(name)(method)),
            "paper": None if (one := published.get(name)) is None else to_plain(one.value),
        }
        for name in told
    }


def _row(info: MethodInfo, status: str, parameters: Mapping[str, Any]) -> Row:
    return {
        "title": info.title,
        "paper": info.paper,
        "varies": list(info.varies),
        "runtimes": list(info.runtimes),
        "status": status,
        "parameters": dict(parameters),
    }
