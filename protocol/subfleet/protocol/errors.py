"""The error tree: one class for each decision of a caller.

SubfleetError                 every error that we raise on purpose; carries the exit code of its process
├── ConfigError               the configuration is wrong: correct it
│   └── InvalidError          values of a record are out of bounds, or contradict each other
├── FileError                 a file or folder is missing, unreadable or unwritable
│   └── NoRoomError           a folder would exceed its limit: ask for less
├── DataError                 training data cannot be used
├── TransportError            the broker refuses the client, or is not trusted: correct what the message names
│   └── UnreachableError      the broker cannot be reached: wait for it, or check the address
├── TakenError                another process holds the lock: choose another name, or stop that process
├── PortError                 a network address is in use: choose another
├── ProtocolError             bytes that are not a valid message: drop them
│   └── TooLargeError         bytes refused by their announced size, before anything was allocated
├── ExportError               a program cannot be written, or differs from PyTorch
├── TrainingError             a program failed while it trained
│   ├── DivergedError         a loss or weight is not finite
│   ├── LoadError             a runtime cannot load a program: give it another
│   └── MemoryLimitError      training was stopped before the memory limit
├── MissingExtraError         a package is not installed: names the extra to install
├── UnsupportedSystemError    the operating system is not supported
├── BrokenError               a package is installed, but does not load or work here
└── RunError                  a run cannot go on
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from subfleet.protocol.exit_codes import ExitCode

__all__ = [
    "BrokenError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "ExportError",
    "FileError",
    "InvalidError",
    "LoadError",
    "MemoryLimitError",
    "MissingExtraError",
    "NoRoomError",
    "PortError",
    "Problem",
    "ProtocolError",
    "RunError",
    "SubfleetError",
    "TakenError",
    "TooLargeError",
    "TrainingError",
    "TransportError",
    "UnreachableError",
    "UnsupportedSystemError",
    "explain_os_errors",
    "make_install_command",
]


class SubfleetError(Exception):
    """Base of every deliberate error. Its text is one sentence: what is wrong, what would be right, what to do."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class ConfigError(SubfleetError):
    """A configuration value is wrong."""

    exit_code = ExitCode.CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem of a record.

    Attributes:
        text: what is wrong.
        keys: path from the record to the value.
        is_sentence: whether the text is a sentence; else it is a clause that follows the name of the value.
    """

    text: str
    keys: tuple[str | int, ...] = ()
    is_sentence: bool = False

    def prefix(self, key: str | int) -> "Problem":
        """Prefix the path with a key of the containing record or list."""
        return replace(self, keys=(key, *self.keys))

    def sentence(self, where: str = "") -> str:
        """Describe the problem as a sentence; `where` is the path of the record."""
        steps = (f"[{key}]" if isinstance(key, int) else f".{key:.80}" for key in self.keys)
        path = f"{where}{''.join(steps)}".removeprefix(".")
        if self.is_sentence:
            return f"{path}: {self.text}" if path else self.text
        return f"{path or 'it'} {self.text}"


class InvalidError(ConfigError, ValueError):
    """Values of a record are out of bounds, or contradict each other."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.sentence() for problem in problems))
        self.problems = tuple(problems)

    @classmethod
    def of(cls, error: Exception) -> "InvalidError":
        """The error itself, or one with the text of another error as its problem."""
        return error if isinstance(error, cls) else cls([Problem(text=str(error), is_sentence=True)])


class FileError(SubfleetError):
    """A file or folder is missing, unreadable or unwritable."""

    exit_code = ExitCode.FILE


@contextmanager
def explain_os_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turn an OSError into a FileError: what the problem is, the reason that the system gives, and a remedy."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{problem} ({error.strerror or error}); {remedy}") from error


class NoRoomError(FileError):
    """A folder would exceed its limit; nothing was written."""


class DataError(SubfleetError):
    """Training data cannot be used."""

    exit_code = ExitCode.DATA


class TransportError(SubfleetError):
    """The broker cannot be reached, or refuses the client."""

    exit_code = ExitCode.TRANSPORT


class UnreachableError(TransportError):
    """The broker cannot be reached; another attempt may succeed."""


class PortError(SubfleetError):
    """A network address is in use or not permitted."""

    exit_code = ExitCode.PORT


class TakenError(SubfleetError):
    """Another process was first to serve the fleet, or to use the device's id."""

    exit_code = ExitCode.TAKEN


class ProtocolError(SubfleetError):
    """Bytes that are not a valid message, container or chunk."""

    exit_code = ExitCode.PROTOCOL


class TooLargeError(ProtocolError):
    """An announced size is above its limit; nothing was allocated for it."""


class ExportError(SubfleetError):
    """A program cannot be written, or does not match PyTorch."""

    exit_code = ExitCode.EXPORT


class TrainingError(SubfleetError):
    """A training program failed on the device."""

    exit_code = ExitCode.TRAINING


class LoadError(TrainingError):
    """A runtime refuses to load a program permanently: an operator is missing, or the program is too new."""


class DivergedError(TrainingError):
    """Training ended with a loss or weight that is not finite, as it would again on the same data."""


class MemoryLimitError(TrainingError):
    """Training was stopped because its memory would have passed the limit.

    Attributes:
        needed_bytes: growth of the process when it was stopped.
        limit_bytes: the growth that was allowed.
    """

    def __init__(self, *, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"training needed {needed_bytes} bytes, but its limit is {limit_bytes} bytes; a smaller submodel is needed"
        )
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


def make_install_command(extra: str, package: str = "") -> str:
    """Make the command that installs an extra, to be shown if one of its packages is missing."""
    # A board such as a Jetson has its own build of ONNX Runtime, for its GPU and for NumPy 1 or 2. Installing the extra
    # "edge" would overwrite it.
    if extra == "edge" and package == "numpy":
        own = ", or 'numpy>=1.26,<2' beside a board's own build of ONNX Runtime that was made for NumPy 1"
    elif extra == "edge":
        own = ", or 'subfleet[edge-bare]' beside a board's own build of ONNX Runtime"
    else:
        own = ""
    return f"run: pip install 'subfleet[{extra}]'{own}"


class MissingExtraError(SubfleetError):
    """A package that this command needs is not installed.

    Args:
        package: its name.
        extra: the extra of this distribution that installs it.
        remedy: what to do instead of installing the extra.
    """

    exit_code = ExitCode.MISSING_EXTRA

    def __init__(self, package: str, extra: str, *, remedy: str = "") -> None:
        super().__init__(f"the package {package!r} is not installed; {remedy or make_install_command(extra, package)}")


class BrokenError(SubfleetError):
    """A package is installed, but cannot be loaded here, or does not work."""

    exit_code = ExitCode.MISSING_EXTRA


class UnsupportedSystemError(SubfleetError):
    """Windows is unsupported: it lacks locks, limits and signals."""

    exit_code = ExitCode.SYSTEM

    def __init__(self) -> None:
        super().__init__("Subfleet does not support Windows; use WSL 2")


class RunError(SubfleetError):
    """A run cannot go on."""

    exit_code = ExitCode.RUN
