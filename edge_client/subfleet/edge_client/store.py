"""The agent's folder: what must outlive the process, written as a whole or not at all.

<state>/agent.json          the answers without a receipt, the task in hand, what was done
<state>/blobs/              programs, weights and updates, by content
<state>/work/               what is being trained; emptied at every start
<state>/models/<run>/       the inference models of each run
<state>/lock                held by the one agent that uses the folder
"""

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from subfleet.edge_client.states import Saved
from subfleet.protocol.errors import FileError, ProtocolError
from subfleet.protocol.messages import Task
from subfleet.protocol.schema import canonical_json, from_plain, parse_json, to_plain
from subfleet.transport.blob_store import BlobStore

__all__ = ["AgentStore"]

_LOG = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_STATE_BYTES = 64 * 2**20
_SUFFIXES: Mapping[str, str] = MappingProxyType({"onnx": ".onnx", "executorch": ".pte"})
_RUN_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


class AgentStore:
    """One agent's folder.

    Args:
        folder: made where it is missing.

    Raises:
        FileError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work_folder = folder / "work"
        self._path = folder / "agent.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"the folder {str(folder)!r} cannot be used ({error.strerror}); choose another") from error
        self.blobs = BlobStore(folder / "blobs")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the lock ends with the process, however it ends.

        Raises:
            FileError: another agent holds it.
        """
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FileError(
                    f"the state folder {str(self.folder)!r} is in use by another agent; stop that one, or choose "
                    "another folder with --state and another --id"
                ) from None
            # What a killed training left half written: its task is trained anew.
            shutil.rmtree(self.work_folder, ignore_errors=True)
            self.work_folder.mkdir(exist_ok=True)
            yield

    def load(self) -> Saved:
        """What an earlier process saved; nothing where there was none.

        A file that cannot be read is set aside, so that a device in the field goes on.
        """
        try:
            payload = self._path.read_bytes()
        except FileNotFoundError:
            return Saved()
        except OSError as error:
            raise FileError(f"the state file {str(self._path)!r} cannot be read: {error.strerror}") from error
        try:
            return _parse(payload)
        except ProtocolError as error:
            aside = self._path.with_suffix(".bad")
            _LOG.warning("the state file %s cannot be used (%s); it is set aside as %s", self._path, error, aside.name)
            self._path.replace(aside)
            return Saved()

    def save(self, saved: Saved) -> None:
        """Write what must outlive the process, and return when it is on the disk.

        Raises:
            FileError: it cannot be written.
        """
        try:
            _write_atomically(self._path, canonical_json({"schema": SCHEMA_VERSION, **to_plain(saved)}))
        except OSError as error:
            raise FileError(f"the state file {str(self._path)!r} cannot be written: {error.strerror}") from error

    def place_models(self, task: Task) -> tuple[str, ...]:
        """Copy the fetched models of a deploy task to their folder; returns the paths relative to the state folder.

        Raises:
            FileError: a model is missing or cannot be written.
            ProtocolError: the run's id or a target cannot name a file.
        """
        if _RUN_FOLDER.fullmatch(task.run_id) is None:
            raise ProtocolError(
                f"run id {task.run_id!r:.140} must be letters, digits, '_', '.' and '-' to name a folder"
            )
        folder = self.folder / "models" / task.run_id
        files = []
        for program in task.programs:
            if program.target not in _SUFFIXES:
                raise ProtocolError(f"model target is {program.target!r:.80}, but must be one of {sorted(_SUFFIXES)}")
            path = folder / f"model{_SUFFIXES[program.target]}"
            source = self.blobs.path(program.blob)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _write_atomically(path, source.read_bytes())
            except OSError as error:
                raise FileError(f"the model {str(path)!r} cannot be written: {error.strerror}") from error
            files.append(path.relative_to(self.folder).as_posix())
        return tuple(files)


def _parse(payload: bytes) -> Saved:
    plain = parse_json(payload, max_bytes=MAX_STATE_BYTES)
    schema = plain.pop("schema", None) if isinstance(plain, dict) else None
    if schema != SCHEMA_VERSION:
        raise ProtocolError(f"schema version is {schema!r:.80}, but must be {SCHEMA_VERSION}")
    return from_plain(Saved, plain)


def _write_atomically(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    # The rename itself must survive a power cut, and that is the folder's business.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
