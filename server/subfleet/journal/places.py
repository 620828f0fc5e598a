"""The state folder of a run and its lock."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from subfleet.protocol.disks import lock
from subfleet.protocol.errors import FileError, explain_os_errors

_LOG = logging.getLogger(__name__)


class Places:
    """The state folder of a server.

    Attributes:
        folder: of the state.
        blobs: folder of programs, weights and updates, by digest.
        checkpoints: folder of the whole model after each round.
        models: folder of each client's own models for inference.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blobs, self.checkpoints, self.models = folder / "blobs", folder / "checkpoints", folder / "models"

    def make(self) -> None:
        """Create the folders.

        Raises:
            FileError: they cannot be created.
        """
        with explain_os_errors(f"state folder {self.folder} cannot be created", "choose another one"):
            for folder in (self.blobs, self.checkpoints, self.models):
                folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process; the lock ends with the process, however it ends.

        Raises:
            FileError: another server holds it, or it cannot be written.
        """
        with contextlib.ExitStack() as stack:
            with explain_os_errors(f"state folder {self.folder} cannot be written", "repair it, or choose another"):
                file = stack.enter_context((self.folder / "lock").open("w"))
                try:
                    has_locks = lock(file, wait=False)
                except BlockingIOError:
                    raise FileError(
                        f"state folder {self.folder} is in use by another server; stop that one, or choose another name"
                    ) from None
            if not has_locks:
                _LOG.warning(
                    "the file system of %s does not support locks; do not start another server of this name",
                    self.folder,
                )
            yield
