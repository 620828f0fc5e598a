"""The state folder of a run: where a server keeps things, and for whom it is."""

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subfleet.protocol.errors import FileError

__all__ = ["Places"]


@dataclass(frozen=True, slots=True)
class Places:
    """Where a server keeps things in its state folder."""

    folder: Path

    @property
    def blobs(self) -> Path:
        """Programs, weights and updates, by digest."""
        return self.folder / "blobs"

    @property
    def checkpoints(self) -> Path:
        """The whole model after each round."""
        return self.folder / "checkpoints"

    @property
    def models(self) -> Path:
        """Each client's own models for inference."""
        return self.folder / "models"

    def make(self) -> None:
        """Make the folders.

        Raises:
            FileError: they cannot be made.
        """
        try:
            for place in (self.blobs, self.checkpoints, self.models):
                place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"state folder {self.folder} cannot be made: {error.strerror}; choose another one"
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the lock ends with the process, however it ends.

        Raises:
            FileError: another server holds it.
        """
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FileError(
                    f"state folder {self.folder} is in use by another server; stop that one, or choose another name"
                ) from None
            yield
