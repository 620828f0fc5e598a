"""Shows a run while it goes on: tables on a terminal, plain lines anywhere else."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from subfleet.cli.literal import literal
from subfleet.journal.records import ClientRow, Progress, RoundRecord
from subfleet.protocol.text import make_printable
from subfleet.reporting.columns import CLIENT_COLUMNS, Column, participation_text

__all__ = ["Display", "PlainLines", "SilentDisplay", "Tables", "display_for", "progress", "progress_text"]

LEAST_WIDTH = 80
"""Characters of the narrowest terminal that a table fits on."""
_MOST_CHARACTERS = 24  # of words before they go over several lines, while numbers want room
_GAP = 2
_MINUTE_S = 60


class Display(Protocol):
    """What shows a run. It is a run observer of the server, and may want to hear of its progress, too."""

    def say(self, text: str) -> None:
        """Show one sentence."""
        ...

    def round_finished(self, record: RoundRecord) -> None:
        """Show a round: one row per device, and the accuracy."""
        ...

    def ended(self) -> None:
        """Take away what was shown for the moment: the run goes on no more, however it came to that."""
        ...


class Tables:
    """Rich tables, for a terminal. Columns that find no room are left out, the least important first."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._in_progress = False

    def say(self, text: str) -> None:
        """Show one sentence."""
        self._clear()
        self._console.print(literal(text))

    def progressed(self, progress: Progress) -> None:
        """Show how far the round is on a line that the next thing to show takes the place of."""
        self._clear()
        self._in_progress = True
        self._console.print(literal(progress_text(progress)), style="dim", end="", no_wrap=True, overflow="ellipsis")

    def ended(self) -> None:
        """Take the line of progress away."""
        self._clear()

    def _clear(self) -> None:
        if not self._in_progress:
            return
        self._in_progress = False
        self._console.control(Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2)))

    def round_finished(self, record: RoundRecord) -> None:
        """Show a table with one row per device."""
        self._clear()
        columns = _that_fit(record.clients, self._console.width)
        # A title of the table's own would be broken at the table's width, which may be less than the screen's.
        self._console.print(literal(_title(record), "bold"))
        if record.left_out:
            self._console.print(literal(participation_text(record)))
        table = Table(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False)
        for column in columns:
            head = Text("\n").join(literal(word) for word in column.title.split())
            justify: JustifyMethod = "left" if column.words else "right"
            table.add_column(head, justify=justify, no_wrap=not column.words, overflow="fold", vertical="top")
        for row in record.clients:
            table.add_row(
                *(literal(column.cell(row)) for column in columns),
                style=None if row.status == "aggregated" else "yellow",
            )
        self._console.print(table)


def _that_fit(rows: Sequence[ClientRow], width: int) -> tuple[Column, ...]:
    """The columns for a screen of this width, in their own order: whatever is shown is shown on a wider one too."""
    shown: list[Column] = []
    left = width + _GAP
    for column in sorted(CLIENT_COLUMNS, key=lambda column: column.rank):
        left -= _natural_width(column, rows) + _GAP
        if left < 0 < column.rank:
            break
        shown.append(column)
    return tuple(column for column in CLIENT_COLUMNS if column in shown)


def _natural_width(column: Column, rows: Sequence[ClientRow]) -> int:
    cells = max((cell_len(make_printable(column.cell(row))) for row in rows), default=0)
    head = max(map(cell_len, column.title.split()))  # a line for each word
    return max(head, min(cells, _MOST_CHARACTERS) if column.words else cells)


class PlainLines:
    """One line per device and round, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._round = 0

    def say(self, text: str) -> None:
        """Show one sentence."""
        self._line(text)

    def progressed(self, progress: Progress) -> None:
        """Show a line where a round begins."""
        if progress.round != self._round:
            self._round = progress.round
            self._line(progress_text(progress))

    def round_finished(self, record: RoundRecord) -> None:
        """Show a line for the round and one for each device."""
        self._line(_title(record))
        if record.left_out:
            self._line(f"  {participation_text(record)}")
        for row in record.clients:
            self._line("  " + "  ".join(f"{column.title}={column.cell(row)}" for column in CLIENT_COLUMNS))

    def ended(self) -> None:
        """Lines stay."""

    def _line(self, text: str) -> None:
        self._console.print(literal(text), soft_wrap=True)


class SilentDisplay:
    """Shows nothing: the command prints one JSON object at its end."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def round_finished(self, record: RoundRecord) -> None:
        """Show nothing."""

    def ended(self) -> None:
        """Nothing was shown."""


def display_for(*, json: bool) -> Display:
    """The display for this output: nothing for JSON, tables for a terminal of 80 characters or more, else lines."""
    if json:
        return SilentDisplay()
    console = Console(file=sys.stdout)
    return Tables(console) if console.is_terminal and console.width >= LEAST_WIDTH else PlainLines(console)


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error how a long command goes on: one changing line on a terminal, else a line each time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(literal(f"{title}: {text}"), soft_wrap=True)
        return
    with console.status(title) as status:
        yield lambda text: status.update(literal(f"{title}: {text}"))


def progress_text(progress: Progress) -> str:
    """How far a run is, in a line."""
    left = "" if progress.left_s is None else f", {_duration(progress.left_s)} left"
    away = f"; away: {', '.join(progress.away)}" if progress.away else ""
    return (
        f"round {progress.round} of {progress.round_count}: {progress.answered} of {progress.devices} devices have "
        f"answered{left}{away}"
    )


def _duration(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"about {max(1, round(seconds))} s"
    hours, minutes = divmod(round(seconds / _MINUTE_S), 60)
    return f"about {hours} h {minutes} min" if hours else f"about {minutes} min"


def _title(record: RoundRecord) -> str:
    logs = "" if record.log_time_s is None else f", logs read at {record.log_time_s:g} s"
    what = ", norms measured" if record.calibrated else ""
    submodels = len({row.architecture_id for row in record.aggregated})
    took = "" if record.seconds is None else f", {record.seconds:.1f} s"
    return (
        f"round {record.round}: {record.told}, {submodels} different submodel{'s' * (submodels != 1)}{took}{logs}{what}"
    )
