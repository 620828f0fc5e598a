"""What `subfleet methods` shows: every method by its default parameters, and whether three rounds go as they should."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from subfleet.cli.literal import literal
from subfleet.methods import METHODS
from subfleet.methods.describing import Setting, status_of

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
            "status": status_of(kind().departures(Setting())),
        }
        for name, kind in METHODS.items()
    }


def show(console: Console, verdicts: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Print a table, with a column for the checks where there were any: what each policy of norms came to."""
    table = Table(title="Methods", title_justify="left", title_style="bold", show_lines=True)
    for title in ("name", "varies", "runtimes", "status", "paper", *(("check",) if verdicts is not None else ())):
        table.add_column(title, overflow="fold")
    for name, kind in METHODS.items():
        info = kind.INFO
        cells = [
            name,
            ", ".join(info.varies) or "nothing",
            ", ".join(info.runtimes),
            status_of(kind().departures(Setting())),
            info.paper,
        ]
        if verdicts is not None:
            cells.append("\n".join(f"{norms}: {said}" for norms, said in verdicts[name].items()))
        table.add_row(*map(literal, cells))
    console.print(table)
