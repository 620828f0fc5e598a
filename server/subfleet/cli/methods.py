"""What `subfleet methods` shows: every method, and whether three rounds of it go as they should."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from subfleet.cli.literal import literal
from subfleet.server.methods import METHODS

__all__ = ["listing", "show"]

Row = dict[str, str | list[str]]


def listing() -> dict[str, Row]:
    """Every method as plain data, by the name that configurations give it."""
    return {
        name: {
            "title": kind.INFO.title,
            "paper": kind.INFO.paper,
            "varies": list(kind.INFO.varies),
            "runtimes": list(kind.INFO.runtimes),
            "status": kind.INFO.status,
        }
        for name, kind in METHODS.items()
    }


def show(console: Console, verdicts: Mapping[str, str] | None = None) -> None:
    """Print a table, with a column for the checks where there were any."""
    table = Table(title="Methods", title_justify="left", title_style="bold", show_lines=True)
    for title in ("name", "varies", "runtimes", "status", "paper", *(("check",) if verdicts is not None else ())):
        table.add_column(title, overflow="fold")
    for name, kind in METHODS.items():
        info = kind.INFO
        cells = [name, ", ".join(info.varies) or "nothing", ", ".join(info.runtimes), info.status, info.paper]
        table.add_row(*map(literal, (*cells, *((verdicts[name],) if verdicts is not None else ()))))
    console.print(table)
