"""Blobs on disk, named by their SHA-256, complete or partially received.

A blob gets its digest as its file name only after every byte was written, checked and synced, so existing blobs are
complete even after a crash. Only one process may write a folder, from any of its threads.
"""

import errno
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Set
from pathlib import Path

from subfleet.protocol.blobs import BlobRef, ByteRange
from subfleet.protocol.disks import sync_folder
from subfleet.protocol.errors import FileError, NoRoomError, TooLargeError, explain_os_errors
from subfleet.transport.partial_blob import PartialBlob, count_partial_bytes

_LOG = logging.getLogger(__name__)

_BLOCK_BYTES = 1024 * 1024
_DIGEST_LENGTH = 64


class BlobStore:
    """A folder of blobs.

    Args:
        folder: created if it does not exist.
        max_blob_bytes: a larger blob is refused before anything is written.
        limit_bytes: returns the limit on all blobs, complete and partial; the least recently used ones that are not
            pinned are removed to make room. None means no limit: nothing is removed.
        clock_ns: nanoseconds, used to order blobs by their last use.

    Raises:
        FileError: the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: Path,
        max_blob_bytes: int = 2**31,
        *,
        limit_bytes: Callable[[], int] | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._folder = folder
        self._partials = folder / "partial"
        self._max_blob_bytes = max_blob_bytes
        self._limit_bytes = limit_bytes
        self._clock_ns = clock_ns
        self._pinned: frozenset[str] = frozenset()
        with explain_os_errors(f"the folder {str(folder)!r} cannot be used", "choose another"):
            self._partials.mkdir(parents=True, exist_ok=True)
            for left_over in folder.glob("*.tmp"):  # a process crashed while writing
                left_over.unlink(missing_ok=True)

    def add(self, content: bytes | memoryview) -> BlobRef:
        """Store some bytes; does nothing if they are already stored.

        Raises:
            TooLargeError: the content is larger than max_blob_bytes.
            NoRoomError: the content would exceed the limit.
            FileError: the disk is full or cannot be written.
        """
        self._check_size(len(content))
        ref = BlobRef.of(content)
        if not self.has(ref):
            self.make_room(len(content))
            temporary = self._make_temporary()
            try:
                with temporary.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                self._install(temporary, ref)
            except OSError as error:
                raise _make_error(self._folder, error) from error
            finally:
                temporary.unlink(missing_ok=True)
        self._touch(ref)
        return ref

    def add_file(self, path: Path) -> BlobRef:
        """Copy a file into the store.

        Raises:
            TooLargeError: it is larger than max_blob_bytes.
            NoRoomError: it would exceed the limit.
            FileError: it cannot be read, is empty, or the store cannot be written.
        """
        self._prepare_for(path)
        temporary = self._make_temporary()
        try:
            ref = _copy(path, temporary)
            if not self.has(ref):
                self._install(temporary, ref)
        except OSError as error:
            raise _make_error(self._folder, error) from error
        finally:
            temporary.unlink(missing_ok=True)
        self._touch(ref)
        return ref

    def take_file(self, path: Path) -> BlobRef:
        """Move a file into the store; one on another file system is copied, and stays where it is.

        Raises:
            TooLargeError: it is larger than max_blob_bytes.
            NoRoomError: it would exceed the limit.
            FileError: it cannot be read, is empty, or the store cannot be written.
        """
        self._prepare_for(path)
        try:
            ref = _sync(path)
            if not self.has(ref):
                self._install(path, ref)
        except OSError as error:
            if error.errno == errno.EXDEV:
                return self.add_file(path)
            raise _make_error(self._folder, error) from error
        self._touch(ref)
        return ref

    def has(self, ref: BlobRef) -> bool:
        """Whether the blob is complete."""
        try:
            return self._path(ref).stat().st_size == ref.size_bytes
        except OSError:
            return False

    def path(self, ref: BlobRef) -> Path:
        """Return the file of a blob; callers must not write to it.

        Raises:
            FileError: the blob is not in the store.
        """
        if not self.has(ref):
            raise FileError(f"blob {ref.sha256[:12]} is not in {str(self._folder)!r}; fetch it first")
        self._touch(ref)
        return self._path(ref)

    def read_range(self, ref: BlobRef, span: ByteRange) -> bytes:
        """Read some bytes of a blob.

        Raises:
            FileError: the blob is not in the store, cannot be read, or has no such range.
        """
        path = self.path(ref)
        if span.offset + span.length > ref.size_bytes:
            raise FileError(
                f"blob {ref.sha256[:12]} has {ref.size_bytes} bytes, but {span.length} from {span.offset} on "
                "were requested; ask for less"
            )
        with explain_os_errors(f"blob {ref.sha256[:12]} cannot be read", "check the disk"), path.open("rb") as file:
            file.seek(span.offset)
            content = file.read(span.length)
        if len(content) != span.length:
            raise FileError(f"blob {ref.sha256[:12]} became shorter while it was read; fetch it again")
        return content

    def partial(self, ref: BlobRef) -> PartialBlob:
        """Open the partially received blob, also after a crash.

        Raises:
            TooLargeError: the blob is larger than max_blob_bytes.
            NoRoomError: it would exceed the limit.
            FileError: the disk is full or cannot be written.
        """
        self._check_size(ref.size_bytes)
        path = self._partials / f"{ref.sha256}.part"
        begun = _stat(path)
        self.make_room(count_partial_bytes(ref) - (0 if begun is None else begun.st_size), using=ref)
        return PartialBlob(path, self._path(ref), ref, on_commit=self._touch)

    def pin(self, digests: Set[str]) -> None:
        """Pin exactly these blobs: they are never removed to make room."""
        self._pinned = frozenset(digests)

    @property
    def allocated_bytes(self) -> int:
        """Disk space of all blobs; a partial one counts with its received part."""
        return sum(512 * stat.st_blocks for path in self._list_files() if (stat := _stat(path)) is not None)

    @property
    def room_bytes(self) -> int:
        """Disk space that is available if everything unpinned is removed.

        The received part of a pinned blob counts as not yet written.
        """
        return self.room_beside(self._pinned)

    def room_beside(self, digests: Set[str]) -> int:
        """Compute `room_bytes` as if these blobs were pinned."""
        if self._limit_bytes is None:
            return sys.maxsize
        pinned = [stat.st_size for path in self._list_whole() if path.name in digests and (stat := _stat(path))]
        return max(0, self._limit_bytes() - sum(pinned))

    def count_begun_bytes(self, digests: Set[str]) -> int:
        """Count the received bytes of some partial blobs."""
        paths = [self._partials / f"{sha256}.part" for sha256 in digests]
        return sum(stat.st_size for path in paths if (stat := _stat(path)) is not None)

    def make_room(self, more_bytes: int, *, using: BlobRef | None = None) -> None:
        """Remove the least recently used blobs until this many bytes may be written.

        Args:
            more_bytes: the bytes to be written.
            using: a blob that is kept, pinned or not.

        Raises:
            NoRoomError: pinned blobs leave too little room; then nothing is removed.
        """
        if self._limit_bytes is None or more_bytes <= 0:
            return
        limit_bytes = self._limit_bytes()
        pinned = self._pinned if using is None else self._pinned | {using.sha256}
        files = sorted((stat.st_mtime_ns, stat.st_size, path) for path in self._list_files() if (stat := _stat(path)))
        pinned_bytes = sum(size_bytes for _, size_bytes, path in files if path.stem in pinned)
        if pinned_bytes + more_bytes > limit_bytes:
            raise NoRoomError(
                f"{more_bytes} bytes cannot be written to {str(self._folder)!r}: it may hold {limit_bytes} bytes, and "
                f"{pinned_bytes} of them are in use; free some space, or raise the limit"
            )
        total_bytes = sum(size_bytes for _, size_bytes, _ in files)
        for _, size_bytes, path in files:
            if total_bytes + more_bytes <= limit_bytes:
                break
            if path.stem not in pinned:
                path.unlink(missing_ok=True)
                total_bytes -= size_bytes

    @property
    def partials(self) -> frozenset[str]:
        """Digests of the partial blobs."""
        return frozenset(path.stem for path in self._partials.glob("*.part"))

    def prune(self, keep: Set[str]) -> None:
        """Remove every blob, whole or partial, whose digest is not in `keep`."""
        for path in self._list_files():
            if path.stem not in keep:
                path.unlink(missing_ok=True)

    def _prepare_for(self, path: Path) -> None:
        """Make room for the content of a file."""
        with explain_os_errors(f"the file {str(path)!r} cannot be read", "check its path"):
            size_bytes = path.stat().st_size
        if size_bytes == 0:
            raise FileError(f"the file {str(path)!r} is empty, but a blob must have 1 byte or more")
        self._check_size(size_bytes)
        self.make_room(size_bytes)

    def _path(self, ref: BlobRef) -> Path:
        return self._folder / ref.sha256

    def _list_whole(self) -> list[Path]:
        return [path for path in self._folder.glob("*") if len(path.name) == _DIGEST_LENGTH]

    def _list_files(self) -> list[Path]:
        return [*self._list_whole(), *self._partials.glob("*.part")]

    def _make_temporary(self) -> Path:
        try:
            number, name = tempfile.mkstemp(suffix=".tmp", dir=self._folder)
        except OSError as error:
            raise _make_error(self._folder, error) from error
        os.close(number)
        return Path(name)

    def _install(self, temporary: Path, ref: BlobRef) -> None:
        temporary.replace(self._path(ref))
        sync_folder(self._folder)

    def _touch(self, ref: BlobRef) -> None:
        now_ns = self._clock_ns()
        try:
            os.utime(self._path(ref), ns=(now_ns, now_ns))
        except OSError as error:  # another thread pruned it; a later reader gets an error
            _LOG.debug("blob %s cannot be marked as used: %s", ref.sha256[:12], error)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_blob_bytes:
            raise TooLargeError(f"a blob is {size_bytes} bytes; the limit is {self._max_blob_bytes} bytes")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # another thread removed it
        return None


def _copy(source: Path, target: Path) -> BlobRef:
    digest, size_bytes = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("wb") as writer:
        while block := reader.read(_BLOCK_BYTES):
            digest.update(block)
            size_bytes += len(block)
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    return BlobRef(sha256=digest.hexdigest(), size_bytes=size_bytes)


def _sync(path: Path) -> BlobRef:
    """The reference of a file, whose bytes are on disk from now on."""
    digest = hashlib.sha256()
    with path.open("r+b") as file:  # some systems sync only files that may be written
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        os.fsync(file.fileno())
        return BlobRef(sha256=digest.hexdigest(), size_bytes=file.tell())


def _make_error(folder: Path, error: OSError) -> FileError:
    return FileError(f"the folder {str(folder)!r} cannot be written ({error.strerror}); free some space or repair it")
