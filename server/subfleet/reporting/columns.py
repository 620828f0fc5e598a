"""The columns of tables with a row for each client, in reports and on screens."""

from collections.abc import Callable
from dataclasses import dataclass

from subfleet.journal.records import ClientRow, RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table with a row per client.

    Attributes:
        title: of the column.
        cell: the text of a row.
        rank: columns with the highest rank are left out first on narrow screens; 0 is always shown.
        words: whether it is text, which is aligned to the left and wrapped; else it is a number.
    """

    title: str
    cell: Callable[[ClientRow], str]
    rank: int
    words: bool = False


def _format_megabytes(size_bytes: int | None) -> str:
    """Megabytes are 10^6 bytes."""
    return "-" if size_bytes is None else f"{size_bytes / 1e6:.1f}"


def _format_slower_link(row: ClientRow) -> str:
    """Kilobytes that may be moved in the slower direction."""
    known = [size for size in (row.downlink_budget_bytes, row.uplink_budget_bytes) if size is not None]
    return f"{min(known) / 1000:.0f}" if known else "-"


def _format_seconds(row: ClientRow) -> str:
    return "-" if row.seconds is None else f"{row.seconds:.2f}"


def _format_loss(row: ClientRow) -> str:
    return "-" if row.loss is None else f"{row.loss:.3f}"


def _show_if_trained(text: Callable[[ClientRow], str]) -> Callable[[ClientRow], str]:
    return lambda row: text(row) if row.status == "aggregated" else "-"


def _describe_state(row: ClientRow) -> str:
    """The status of the client, why its weight was lowered, and why its update is an outlier."""
    reported = f"reported: {row.outlier}" if row.outlier and row.status == "aggregated" and row.scale == 1 else ""
    return "; ".join(text for text in (row.status, row.lowered, reported) if text)


CLIENT_COLUMNS: tuple[Column, ...] = (
    Column(title="device", cell=lambda row: row.client_id, rank=0, words=True),
    Column(title="profile", cell=lambda row: row.device, rank=12, words=True),
    Column(title="runtime", cell=lambda row: row.runtime or "-", rank=7, words=True),
    Column(title="free MB", cell=lambda row: _format_megabytes(row.memory_free_bytes), rank=8),
    Column(title="budget MB", cell=lambda row: _format_megabytes(row.budget_bytes), rank=2),
    Column(title="link kB", cell=_format_slower_link, rank=3),
    Column(title="submodel", cell=lambda row: row.architecture or "-", rank=0, words=True),
    Column(title="limit", cell=lambda row: row.limit or "-", rank=0, words=True),
    Column(title="planned MB", cell=lambda row: _format_megabytes(row.planned_peak_bytes), rank=1),
    Column(title="measured MB", cell=_show_if_trained(lambda row: _format_megabytes(row.measured_peak_bytes)), rank=4),
    Column(title="kB down", cell=lambda row: f"{row.bytes_down / 1000:.1f}", rank=9),
    Column(title="kB up", cell=lambda row: f"{row.bytes_up / 1000:.1f}", rank=10),
    Column(title="seconds", cell=_show_if_trained(_format_seconds), rank=6),
    Column(title="loss", cell=_show_if_trained(_format_loss), rank=5),
    Column(title="share", cell=_show_if_trained(lambda row: f"{row.share:.0%}"), rank=11),
    Column(title="state", cell=_describe_state, rank=0, words=True),
)


def describe_participation(record: RoundRecord) -> str:
    """How many devices took part in a round, and why the others did not."""
    text = f"{len(record.aggregated)} of {len(record.due)} devices took part"
    return f"{text} ({record.left_out})" if record.left_out else text
