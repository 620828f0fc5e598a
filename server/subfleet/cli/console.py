"""Shows the progress of a run: as tables on a terminal, else as plain lines."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import ClientRow, Progress, RoundRecord, RunObserver
from subfleet.protocol.text import make_printable
from subfleet.reporting.texts import CLIENT_COLUMNS, Column, describe_participation

LEAST_WIDTH = 80
"""Width in characters of the narrowest terminal that tables are shown on."""
_MOST_CHARACTERS = 24  # width of a column of text before it is wrapped in favour of numbers
_GAP = 2
_MINUTE_S = 60


def to_text(text: str, style: str = "") -> Text:
    """Text for rich without markup, links or emoji codes: names of devices are shown as they are."""
    return Text(make_printable(text), style=style)


def show_table(
    console: Console,
    titles: Sequence[str],
    rows: Iterable[Iterable[str | Text]],
    *,
    title: str = "",
    left: Collection[str] = (),
    unwrapped: Collection[str] = (),
) -> None:
    """Print a table; with a title it has borders, and without one it has none.

    Args:
        console: prints it.
        titles: of the columns.
        rows: a cell for each column.
        title: of the table.
        left: titles of the columns that are aligned to the left; the others are aligned to the right.
        unwrapped: titles of the columns that are never wrapped.
    """
    if title:
        table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    else:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in titles:
        justify: JustifyMethod = "left" if name in left else "right"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in unwrapped)
    for row in rows:
        table.add_row(*(to_text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(table)


class Tables:
    """Tables for a terminal. If it is too narrow for all columns, the least important ones are left out."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._in_progress = False

    def say(self, text: str) -> None:
        """Show one sentence."""
        self.clear()
        self._console.print(to_text(text))

    def progressed(self, progress: Progress) -> None:
        """Show the progress of the round in a line that the next output replaces."""
        self.clear()
        self._in_progress = True
        self._console.print(to_text(format_progress(progress)), style="dim", end="", no_wrap=True, overflow="ellipsis")

    def clear(self) -> None:
        """Remove the progress line."""
        if not self._in_progress:
            return
        self._in_progress = False
        self._console.control(Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2)))

    def round_finished(self, record: RoundRecord) -> None:
        """Show a table with one row per device."""
        self.clear()
        columns = _select_columns(record.clients, self._console.width)
        # Printed apart, because rich wraps a table's own title at the width of the table.
        self._console.print(to_text(_format_title(record), "bold"))
        if record.left_out:
            self._console.print(to_text(describe_participation(record)))
        table = Table(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False)
        for column in columns:
            head = Text("\n").join(to_text(word) for word in column.title.split())
            justify: JustifyMethod = "left" if column.words else "right"
            table.add_column(head, justify=justify, no_wrap=not column.words, overflow="fold", vertical="top")
        for row in record.clients:
            table.add_row(
                *(to_text(column.cell(row)) for column in columns),
                style=None if row.status == "aggregated" else "yellow",
            )
        self._console.print(table)


def _select_columns(rows: Sequence[ClientRow], width: int) -> tuple[Column, ...]:
    """The most important columns that fit the width, in table order; a wider screen shows a superset."""
    shown: list[Column] = []
    left = width + _GAP
    for column in sorted(CLIENT_COLUMNS, key=lambda column: column.rank):
        left -= _measure_width(column, rows) + _GAP
        if left < 0 < column.rank:
            break
        shown.append(column)
    return tuple(column for column in CLIENT_COLUMNS if column in shown)


def _measure_width(column: Column, rows: Sequence[ClientRow]) -> int:
    cells = max((cell_len(make_printable(column.cell(row))) for row in rows), default=0)
    head = max(map(cell_len, column.title.split()))  # one line per word
    return max(head, min(cells, _MOST_CHARACTERS) if column.words else cells)


class PlainLines:
    """One line per round and device, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._round = 0

    def say(self, text: str) -> None:
        """Show one sentence."""
        self._console.print(to_text(text), soft_wrap=True)

    def progressed(self, progress: Progress) -> None:
        """Show a line at the start of a round."""
        if progress.round != self._round:
            self._round = progress.round
            self.say(format_progress(progress))

    def round_finished(self, record: RoundRecord) -> None:
        """Show a line for the round and one for each device."""
        self.say(_format_title(record))
        if record.left_out:
            self.say(f"  {describe_participation(record)}")
        for row in record.clients:
            self.say("  " + "  ".join(f"{column.title}={column.cell(row)}" for column in CLIENT_COLUMNS))


@contextmanager
def open_display(*, json: bool) -> Iterator[RunObserver]:
    """A context with what shows runs on standard output; its progress line is removed at the end.

    It shows nothing if one JSON object is printed, tables on a terminal of 80 characters or more, else lines.
    """
    console = Console(file=sys.stdout)
    if json:
        yield Unobserved()
    elif console.is_terminal and console.width >= LEAST_WIDTH:
        tables = Tables(console)
        try:
            yield tables
        finally:
            tables.clear()
    else:
        yield PlainLines(console)


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show the progress of a long command on standard error: on a terminal in one line, else a line for each step."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(to_text(f"{title}: {text}"), soft_wrap=True)
        return
    with console.status(title) as status:
        yield lambda text: status.update(to_text(f"{title}: {text}"))


def format_progress(progress: Progress) -> str:
    """The progress of a run as one line."""
    left = "" if progress.left_s is None else f", {_format_duration(progress.left_s)} left"
    away = f"; away: {', '.join(progress.away)}" if progress.away else ""
    return (
        f"round {progress.round} of {progress.round_count}: {progress.answered} of {progress.devices} devices have "
        f"answered{left}{away}"
    )


def _format_duration(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"about {max(1, round(seconds))} s"
    hours, minutes = divmod(round(seconds / _MINUTE_S), 60)
    return f"about {hours} h {minutes} min" if hours else f"about {minutes} min"


def _format_title(record: RoundRecord) -> str:
    logs = "" if record.log_time_s is None else f", logs read at {record.log_time_s:g} s"
    what = ", norms measured" if record.calibrated else ""
    submodels = len({row.architecture_id for row in record.aggregated})
    took = "" if record.seconds is None else f", {record.seconds:.1f} s"
    different = f"{submodels} different submodel{'s' * (submodels != 1)}"
    return f"round {record.round}: {record.quality or 'no model'}, {different}{took}{logs}{what}"
