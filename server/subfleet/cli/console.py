"""Shows a run while it goes on: tables on a terminal, plain lines anywhere else."""

import sys
from typing import Protocol

from rich.console import Console
from rich.table import Table

from subfleet.server.records import RoundRecord
from subfleet.server.report import CLIENT_COLUMNS, client_cells

__all__ = ["Display", "PlainLines", "SilentDisplay", "Tables", "display_for"]


class Display(Protocol):
    """What shows a run. It is a run observer of the server."""

    def say(self, text: str) -> None:
        """Show one sentence."""
        ...

    def round_finished(self, record: RoundRecord) -> None:
        """Show a round: one row per device, and the accuracy."""
        ...


class Tables:
    """Rich tables, for a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Show one sentence."""
        self._console.print(text, highlight=False, markup=False)

    def round_finished(self, record: RoundRecord) -> None:
        """Show a table with one row per device."""
        table = Table(title=_title(record), title_justify="left", title_style="bold")
        for place, column in enumerate(CLIENT_COLUMNS):
            words = column in ("device", "runtime", "subnet", "state")
            table.add_column(column, justify="left" if words else "right", no_wrap=place > 0)
        for row in record.clients:
            table.add_row(*client_cells(row), style=None if row.status == "folded" else "yellow")
        self._console.print(table)


class PlainLines:
    """One line per device and round, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Show one sentence."""
        self._line(text)

    def round_finished(self, record: RoundRecord) -> None:
        """Show a line for the round and one for each device."""
        self._line(_title(record))
        for row in record.clients:
            pairs = zip(CLIENT_COLUMNS, client_cells(row), strict=True)
            self._line("  " + "  ".join(f"{column}={cell}" for column, cell in pairs))

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class SilentDisplay:
    """Shows nothing: the command prints one JSON object at its end."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def round_finished(self, record: RoundRecord) -> None:
        """Show nothing."""


def display_for(*, json: bool) -> Display:
    """The display for this output: nothing for JSON, tables for a wide terminal, else plain lines."""
    if json:
        return SilentDisplay()
    console = Console(file=sys.stdout)
    return Tables(console) if console.is_terminal and console.width >= 100 else PlainLines(console)


def _title(record: RoundRecord) -> str:
    logs = "" if record.log_time_s is None else f", logs read at {record.log_time_s:g} s"
    what = ", norms measured" if record.calibrated else ""
    subnets = len({row.spec_id for row in record.clients if row.status == "folded"})
    return (
        f"round {record.round}: accuracy {record.accuracy:.4f}, {subnets} different subnets, "
        f"{record.seconds:.1f} s{logs}{what}"
    )
