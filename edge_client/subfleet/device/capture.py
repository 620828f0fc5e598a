"""`subfleet-edge capture`: records what this device has to give, as a resource log that can be replayed anywhere."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from subfleet.device.meters import Meter
from subfleet.device_profiles.logs import LogRow, encode_header, encode_row
from subfleet.protocol.errors import FileError


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Options of a recording.

    Attributes:
        path: of the log; an existing file is not overwritten.
        duration_s: how long; None until stopped.
        step_s: seconds between two rows, above 0.
    """

    path: Path
    duration_s: float | None = None
    step_s: float = 5.0


def capture(
    options: CaptureOptions,
    meter: Meter,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Record rows, each written at once, so that no end of the recording loses one; returns their number.

    Raises:
        FileError: the file exists already or cannot be written.
    """
    header = encode_header(
        device=platform.node() or "device",
        source=f"recorded on this device by subfleet-edge capture ({platform.system()} {platform.machine()})",
        licence="whoever recorded it decides",
    )
    started_s = clock()
    rows = 0
    t_s = -0.001
    try:
        with options.path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(header)
            while options.duration_s is None or rows * options.step_s <= options.duration_s:
                # Rows are due at whole steps from the start, so that slow readings do not add up.
                sleep(max(started_s + rows * options.step_s - clock(), 0.0))
                _, reading = meter.read(None)
                # Milliseconds do; a row that was late may share its own with the next one, but times must grow.
                t_s = max(round(clock() - started_s, 3), round(t_s + 0.001, 3))
                file.write(encode_row(LogRow(t_s=t_s, reading=reading)))
                file.flush()
                rows += 1
    except FileExistsError as error:
        raise FileError(f"the file {str(options.path)!r} already exists; choose another one with --out") from error
    except OSError as error:
        raise FileError(f"the file {str(options.path)!r} cannot be written: {error.strerror}") from error
    return rows
