"""The state folder of a run and its lock."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subfleet.protocol.disks import lock
from subfleet.protocol.errors import FileError, explain_os_errors

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """The subfolders of a server's state folder."""

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
        """Create the folders.

        Raises:
            FileError: they cannot be created.
        """
        with explain_os_errors(f"state folder {self.folder} cannot be created", "choose another one"):
            for place in (self.blobs, self.checkpoints, self.models):
                place.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the lock ends with the process, however it ends.

        Raises:
            FileError: another server holds it, or it cannot be written.
        """
        with contextlib.ExitStack() as held:
            try:
                file = held.enter_context((self.folder / "lock").open("w"))
                if not lock(file, wait=False):
                    _LOG.warning(
                        "the file system of %s has no locks; do not start another server of this name", self.folder
                    )
            except BlockingIOError:
                raise FileError(
                    f"state folder {self.folder} is in use by another server; stop that one, or choose another name"
                ) from None
            except OSError as error:
                raise FileError(
                    f"state folder {self.folder} cannot be written: {error.strerror}; repair it, or choose another"
                ) from error
            yield
