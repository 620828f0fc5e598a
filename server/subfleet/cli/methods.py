"""What `subfleet methods` shows: every method by its default parameters, and whether three rounds go as they should."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from subfleet.cli.literal import literal
from subfleet.methods import METHODS
from subfleet.methods.describing import MethodInfo, Setting, status_of

__all__ = ["listing", "show"]

Row = dict[str, str | list[str]]
_UNTOLD = MethodInfo(title="", paper="", varies=(), runtimes=())
"""Of a method that cannot be loaded."""


def listing() -> dict[str, Row]:
    """Every method as plain data, by the name that configurations give it; of a broken one its status says why."""
    rows = {name: _row(kind.INFO, status_of(kind().departures(Setting()))) for name, kind in METHODS.items()}
    rows |= {name: _row(_UNTOLD, f"broken: {why}") for name, why in METHODS.broken.items()}
    return dict(sorted(rows.items()))


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


def _row(info: MethodInfo, status: str) -> Row:
    return {
        "title": info.title,
        "paper": info.paper,
        "varies": list(info.varies),
        "runtimes": list(info.runtimes),
        "status": status,
    }
