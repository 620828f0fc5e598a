"""Checks a task's sizes against the device's disk and link before anything is fetched. Pure.

A server may be mistaken or hostile: its sizes are compared with what the device has, not with its own claims alone.
"""

from collections.abc import Set
from dataclasses import dataclass

from subfleet.agent.events import Weighed
from subfleet.protocol.disk import needed_bytes
from subfleet.protocol.messages import RefusalReason
from subfleet.protocol.readings import LEAST_LINK_BPS, Reading
from subfleet.protocol.task import Task, Train
from subfleet.protocol.update_codecs import Uncompressed

HEADER_BYTES = 1024 * 1024
"""A container may exceed the budgeted size of its weights by this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """Why a task is refused before it is fetched.

    Attributes:
        available_bytes: for "disk", what may be written.
    """

    reason: RefusalReason
    detail: str
    available_bytes: int | None = None


def find_objection(task: Task, weighed: Weighed, reading: Reading | None, left_s: float) -> Objection | None:
    """Find the reason to refuse a task before it is fetched; None if it fits.

    Args:
        task: as it was announced.
        weighed: the state of the disk.
        reading: the last one of the device; None before the first.
        left_s: seconds until the deadline of the task.
    """
    fetched_bytes, required_bytes = _count_fetched_bytes(task, weighed.lacking), needed_bytes(task, weighed.lacking)
    if required_bytes > weighed.room_bytes:
        detail = (
            f"the task takes {required_bytes} bytes of disk ({fetched_bytes} still to be fetched), but only "
            f"{weighed.room_bytes} bytes are available"
        )
        return Objection(reason="disk", detail=detail, available_bytes=weighed.room_bytes)
    detail = _check_budget(task) or _check_link(fetched_bytes, reading, left_s)
    return Objection(reason="link", detail=detail) if detail else None


def _count_fetched_bytes(task: Task, lacking: Set[str]) -> int:
    return sum(blob.size_bytes for blob in task.blobs if blob.sha256 in lacking)


def _check_budget(task: Task) -> str:
    """Check weights and update against the budget; programs are fetched once and do not count."""
    down, up = task.budget.downlink_bytes, task.budget.uplink_bytes
    largest_bytes = max((blob.size_bytes for blob in task.weights), default=0)
    if down is not None and largest_bytes > down + HEADER_BYTES:
        return f"the weights have {largest_bytes} bytes, but the device's downlink budget is {down} bytes"
    whole = isinstance(task.work, Train) and isinstance(task.work.update_codec, Uncompressed)
    if whole and up is not None and largest_bytes > up + HEADER_BYTES:
        return f"the update has {largest_bytes} bytes, but the device's uplink budget is {up} bytes"
    return ""


def _check_link(fetched_bytes: int, reading: Reading | None, left_s: float) -> str:
    if reading is None or reading.downlink_bps is None:
        return ""
    rate_bps = max(reading.downlink_bps, LEAST_LINK_BPS)
    takes_s = 8 * fetched_bytes / rate_bps
    if takes_s <= left_s:
        return ""
    return (
        f"fetching {fetched_bytes} bytes takes {takes_s:.0f} s at {rate_bps:.0f} bit/s, but the task "
        f"ends in {left_s:.0f} s"
    )
