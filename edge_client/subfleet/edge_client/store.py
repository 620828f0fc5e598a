"""The agent's folder: the state that outlives the process, written atomically.

<state>/agent.json          answers without an ack, the current task, finished tasks
<state>/blobs/              programs, weights and updates, by content
<state>/work/               outputs of the current task; emptied at every start
<state>/models/<run>/       the inference models of the last runs
<state>/brokers.json        the chunk size that each broker accepts
<state>/lock                locked by the agent that uses the folder

The whole folder has a size limit. The least recently used programs are removed first. The blobs of the current task,
updates without an ack and placed models are kept, and a task that does not fit beside them is not started.
"""

import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from subfleet.agent.actions import Weigh
from subfleet.agent.events import Weighed
from subfleet.agent.states import Saved
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.disk import needed_bytes
from subfleet.protocol.disks import hash_file, lock, write_atomically
from subfleet.protocol.errors import FileError, ProtocolError, explain_os_errors
from subfleet.protocol.homes import find_state_root
from subfleet.protocol.schema import canonical_json, from_plain, parse_json, to_plain
from subfleet.protocol.task import Task
from subfleet.transport.blob_store import BlobStore

_LOG = logging.getLogger(__name__)

SCHEMA_VERSION = 3
MAX_STATE_BYTES = 64 * 2**20
_STATE_FILE = "agent.json"
FREE_FRACTION = 0.5
"""The largest fraction of the free disk that blobs may take."""
STATE_BYTES = 8192
"""Bytes by which a task may increase the state file."""
_SUFFIXES: Mapping[str, str] = MappingProxyType({"onnx": ".onnx", "executorch": ".pte"})
KEPT_RUNS = 4
"""Number of runs with kept inference models; placing models removes those of older runs."""
_RUN_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


class AgentStore:
    """One agent's folder. A running agent opens it with `open`, which locks it.

    Args:
        folder: created if it is missing; no other process may use it.
        disk_limit_bytes: the limit on all its files; None means no limit. Blobs never take more than half of the free
            disk.
        free_bytes: returns the free bytes on the disk of a folder; None asks the system.

    Raises:
        FileError: the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: Path,
        disk_limit_bytes: int | None = None,
        *,
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        self.folder = folder
        self._disk_limit_bytes = disk_limit_bytes
        self._free_bytes = free_bytes or _free_bytes
        self.work_folder = folder / "work"
        self._path = folder / _STATE_FILE
        self.blob_folder = folder / "blobs"
        self.blobs = BlobStore(self.blob_folder, limit_bytes=self._blob_limit_bytes)

    @classmethod
    @contextmanager
    def open(cls, folder: Path, disk_limit_bytes: int | None = None) -> Iterator["AgentStore"]:
        """Open and lock a folder for this process; the lock ends with the process.

        Nothing in the folder is changed before it is locked: another agent may be using it.

        Raises:
            FileError: another agent has locked it, or it cannot be created or written.
        """
        with _hold_lock(folder):
            store = cls(folder, disk_limit_bytes)
            # Partly written outputs of a killed training, which will be repeated.
            shutil.rmtree(store.work_folder, ignore_errors=True)
            try:
                store.work_folder.mkdir(exist_ok=True)
            except OSError as error:
                raise _make_error(folder, error) from error
            yield store

    def load(self) -> Saved:
        """Load what an earlier process saved, or an empty state.

        An invalid file is renamed, so that a device in the field keeps working. An update without its blob is not
        offered again: its task may be repeated.

        Raises:
            FileError: the file cannot be read or set aside.
        """
        try:
            saved = read_saved(self.folder)
        except ProtocolError as error:
            aside = self._path.with_suffix(".bad")
            _LOG.warning("the state file %s cannot be used (%s); it was renamed to %s", self._path, error, aside.name)
            try:
                self._path.replace(aside)
            except OSError as failure:
                raise _make_error(self.folder, failure) from failure
            return Saved()
        lost = {update.task_id for update in saved.updates if not self.blobs.has(update.blob)}
        return replace(
            saved,
            updates=tuple(update for update in saved.updates if update.task_id not in lost),
            done=tuple(task_id for task_id in saved.done if task_id not in lost),
        )

    def weigh(self, action: Weigh) -> Weighed:
        """Compute the disk space that a task would take, and make room for it if it fits.

        Raises:
            FileError: the disk cannot be read.
        """
        task = action.task
        self.blobs.pin(action.pinned)
        lacking = frozenset(blob.sha256 for blob in task.blobs if not self.blobs.has(blob))
        room_bytes = self.blobs.room_bytes
        required_bytes = needed_bytes(task, lacking)
        if required_bytes <= room_bytes:
            self.blobs.make_room(required_bytes - self.blobs.count_begun_bytes(lacking))
        return Weighed(task_id=task.task_id, lacking=lacking, room_bytes=room_bytes)

    def disk_budget_bytes(self, pinned: Set[str]) -> int:
        """Compute the disk space for a task, beside pinned blobs.

        Raises:
            FileError: the disk cannot be read.
        """
        return max(0, self.blobs.room_beside(pinned) - STATE_BYTES)

    def _blob_limit_bytes(self) -> int:
        try:
            free_bytes = self._free_bytes(self.folder)
            inside = (path for path in self.folder.rglob("*") if self.blob_folder not in path.parents)
            others_bytes = sum(path.stat().st_size for path in inside if path.is_file())
        except OSError as error:
            raise _make_error(self.folder, error) from error
        ours_bytes = self.blobs.allocated_bytes + int(FREE_FRACTION * free_bytes)
        limit_bytes = sys.maxsize if self._disk_limit_bytes is None else self._disk_limit_bytes
        return max(0, min(limit_bytes - others_bytes, ours_bytes))

    def drop_damaged(self, blob: BlobRef) -> None:
        """Remove a damaged blob, so that it is fetched again; worn flash memory damages files.

        Raises:
            FileError: it is damaged and cannot be removed.
        """
        if not self.blobs.has(blob):
            return
        path = self.blobs.path(blob)
        with suppress(OSError):
            if hash_file(path) == blob.sha256:
                return
        _LOG.warning("blob %s was damaged on this disk and is fetched again", blob.sha256[:12])
        with explain_os_errors(f"the damaged blob {str(path)!r} cannot be removed", "remove it, or check the disk"):
            path.unlink(missing_ok=True)

    def save(self, saved: Saved) -> None:
        """Write the state durably to disk.

        Raises:
            FileError: it cannot be written.
        """
        with explain_os_errors(f"the state file {str(self._path)!r} cannot be written", "free some space or repair it"):
            write_atomically(self._path, [canonical_json({"schema": SCHEMA_VERSION, **to_plain(saved)})])

    def place_models(self, task: Task) -> tuple[str, ...]:
        """Copy the fetched models of a deploy task to their folder; returns the paths relative to the state folder.

        The models of older runs are removed; see `KEPT_RUNS`.

        Raises:
            FileError: a model is missing or cannot be written.
            ProtocolError: the run's id or a target cannot name a file.
        """
        files = name_models(task)
        self._prune_models(self.folder / "models" / task.run_id)
        for program, file in zip(task.programs, files, strict=True):
            path, source = self.folder / file, self.blobs.path(program.blob)
            with explain_os_errors(f"the model {str(path)!r} cannot be written", "free some space or repair it"):
                path.parent.mkdir(parents=True, exist_ok=True)
                self.blobs.make_room(program.blob.size_bytes)
                write_atomically(path, [source.read_bytes()])
        return files

    def _prune_models(self, placed: Path) -> None:
        """Remove the models of all but the latest runs; the one that is placed now counts as one.

        A folder's modification time is that of its last renamed file, which is when its models were placed.
        """
        with suppress(OSError):
            folders = [path for path in placed.parent.iterdir() if path != placed and not path.is_symlink()]
            folders = sorted((path for path in folders if path.is_dir()), key=lambda path: path.stat().st_mtime_ns)
            for path in folders[: -(KEPT_RUNS - 1)]:
                shutil.rmtree(path, ignore_errors=True)


def name_models(task: Task) -> tuple[str, ...]:
    """Name the file of each model of a deploy task, relative to the agent's folder.

    Raises:
        ProtocolError: the run's id or a target cannot name a file.
    """
    if _RUN_FOLDER.fullmatch(task.run_id) is None:
        raise ProtocolError(f"run id {task.run_id!r:.140} must be letters, digits, '_', '.' and '-' to name a folder")
    for program in task.programs:
        if program.target not in _SUFFIXES:
            raise ProtocolError(f"model target is {program.target!r:.80}, but must be one of {sorted(_SUFFIXES)}")
    return tuple(f"models/{task.run_id}/model{_SUFFIXES[program.target]}" for program in task.programs)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def find_state_folder(fleet: str, client_id: str) -> Path:
    """Find the agent's default folder; see `find_state_root` for the errors."""
    return find_state_root() / "subfleet" / fleet / client_id


def read_saved(folder: Path) -> Saved:
    """Read what an agent saved in a folder, or an empty state. Changes nothing there.

    Raises:
        FileError: the file cannot be read.
        ProtocolError: it is damaged, or of another version.
    """
    path = folder / _STATE_FILE
    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        return Saved()
    except OSError as error:
        raise FileError(
            f"the state file {str(path)!r} cannot be read ({error.strerror}); make it readable, or remove it"
        ) from error
    plain = parse_json(payload, max_bytes=MAX_STATE_BYTES)
    schema = plain.pop("schema", None) if isinstance(plain, dict) else None
    if schema != SCHEMA_VERSION:
        raise ProtocolError(f"schema version is {schema!r:.80}, but must be {SCHEMA_VERSION}")
    return from_plain(Saved, plain)


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    with _open_lock(folder) as file:
        try:
            if not lock(file, wait=False):
                _LOG.warning("the file system of %s does not support locks; do not start another agent in it", folder)
        except BlockingIOError:
            raise FileError(
                f"the state folder {str(folder)!r} is in use by another agent; stop that one, or choose another folder "
                "with --state and another --id"
            ) from None
        except OSError as error:
            raise _make_error(folder, error) from error
        yield


def _open_lock(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "lock").open("w")
    except OSError as error:
        raise _make_error(folder, error) from error


def _make_error(folder: Path, error: OSError) -> FileError:
    return FileError(
        f"the state folder {str(folder)!r} cannot be used ({error.strerror}); repair it, or choose another with --state"
    )
