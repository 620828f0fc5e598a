"""The shipped resource logs, by name."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from subfleet.device_profiles.logs import ResourceLog, read_log
from subfleet.protocol.errors import FileError
from subfleet.protocol.suggestion import suggest

LOGS: Mapping[str, str] = MappingProxyType(
    {
        name: f"{name}.csv"
        for name in ("android_phone", "jetson_orin_nano", "laptop", "raspberry_pi_4", "raspberry_pi_zero_2_w")
    }
)
"""Name to file in the package's `data/logs` folder; each has the name of its profile."""


def find_demo_log(name: str) -> Path:
    """Find the file of a shipped log.

    Raises:
        FileError: there is no such log.
    """
    if name not in LOGS:
        raise FileError(f"the resource log is {name!r:.80}, but the package has {sorted(LOGS)}; name one of them")
    return Path(str(resources.files("subfleet.device_profiles"))) / "data" / "logs" / LOGS[name]


def load_log(name_or_path: str) -> ResourceLog:
    """Load a shipped log by name, or any log by its path.

    Raises:
        FileError: there is no such log, or it cannot be read.
    """
    if name_or_path in LOGS:
        return read_log(find_demo_log(name_or_path))
    path = Path(name_or_path)
    try:
        missing = not path.exists()
    except OSError as error:
        raise FileError(f"the resource log {name_or_path!r:.200} cannot be read: {error.strerror}") from error
    if missing:
        raise FileError(
            f"the resource log {name_or_path!r} is missing; name a file, or one of {sorted(LOGS)}"
            f"{suggest(name_or_path, LOGS)}"
        )
    return read_log(path)
