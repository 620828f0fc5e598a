"""What `subfleet methods` shows: all methods, or the parameters of one."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from rich.console import Console

from subfleet.cli.console import show_table
from subfleet.methods import METHODS, Method
from subfleet.methods.describing import MethodInfo, Setting, join_departures, list_departures, list_parameters
from subfleet.protocol.schema import to_plain

Row = dict[str, Any]
_UNKNOWN = MethodInfo(title="", paper="", varies=(), runtimes=())
"""Stands for the description of a method that cannot be loaded."""


def describe_methods() -> dict[str, Row]:
    """Every method as plain data, by name; the status of a method that cannot be loaded gives the reason."""
    rows = {name: describe_method(name) for name in METHODS}
    rows |= {name: _build_row(_UNKNOWN, f"broken: {reason}", {}) for name, reason in METHODS.broken.items()}
    return dict(sorted(rows.items()))


def describe_method(name: str) -> Row:
    """One method as plain data.

    Raises:
        ConfigError: there is no such method, or it cannot be loaded.
    """
    kind = METHODS.load(name)
    return _build_row(kind.INFO, join_departures(list_departures(kind(), Setting())), _describe_parameters(kind()))


def show_parameters(console: Console, name: str) -> None:
    """Print each parameter of a method beside the value of its paper.

    Raises:
        ConfigError: there is no such method.
    """
    row = describe_method(name)
    titles = ("parameter", "default", "paper")
    rows = [
        (parameter, *("open" if value is None else str(value) for value in (values["default"], values["paper"])))
        for parameter, values in row["parameters"].items()
    ]
    show_table(console, titles, rows, title=f"{row['title']}: {row['paper']}", left=titles)
    console.print(f"By default: {row['status']}", markup=False, highlight=False)


def show_methods(console: Console, verdicts: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Print a table of all methods; verdicts of checks, by method and norm policy, get a column of their own."""
    titles = ("name", "varies", "runtimes", "status", "paper", *(() if verdicts is None else ("check",)))
    rows = []
    for name, row in describe_methods().items():
        cells = [name, ", ".join(row["varies"]) or "nothing", ", ".join(row["runtimes"]), row["status"], row["paper"]]
        if verdicts is not None:
            cells.append("\n".join(f"{norms}: {verdict}" for norms, verdict in verdicts.get(name, {}).items()))
        rows.append(cells)
    show_table(console, titles, rows, title="Methods", left=titles)


def _describe_parameters(method: Method) -> dict[str, dict[str, Any]]:
    """The default of each parameter, and the value of the paper; None if the paper leaves it open."""
    return {
        name: {
            "default": to_plain(attrgetter(name)(method)),
            "paper": None if published is None else to_plain(published.value),
        }
        for name, published in list_parameters(type(method)).items()
    }


def _build_row(info: MethodInfo, status: str, parameters: Mapping[str, Any]) -> Row:
    facts = {name: to_plain(getattr(info, name)) for name in ("title", "paper", "varies", "runtimes")}
    return {**facts, "status": status, "parameters": parameters}
