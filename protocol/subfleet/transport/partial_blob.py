"""A partially received blob, in a file that survives a crash.

The file contains the blob's bytes, followed by one byte for each piece: 1 if the piece was written. Pieces are as large
as the smallest chunk, so that chunk sizes may vary. Content is written before its mark, so after a crash of the process
every mark is right. After a crash of the machine some marks may be wrong; then the digest is wrong, and the whole blob
is fetched again.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from subfleet.protocol.blobs import CHUNK_BYTES, LEAST_CHUNK_BYTES, BlobRef
from subfleet.protocol.disks import sync_folder
from subfleet.protocol.errors import FileError

_BLOCK_BYTES = 1024 * 1024
_WRITTEN = b"\x01"


class PartialBlob:
    """Receives the chunks of one blob in any order; made by `BlobStore.partial`.

    Args:
        path: the file that grows.
        target: path of the complete blob.
        ref: the blob.
        on_commit: called with `ref` after the complete blob is in place.

    Raises:
        FileError: the disk is full or cannot be written.
    """

    def __init__(self, path: Path, target: Path, ref: BlobRef, *, on_commit: Callable[[BlobRef], None]) -> None:
        self._path = path
        self._target = target
        self._ref = ref
        self._on_commit = on_commit
        self._piece_count = _count_pieces(ref.size_bytes)
        try:
            self._marks = self._read_marks()
        except OSError as error:
            raise self._make_error(error) from error

    @property
    def received_offsets(self) -> frozenset[int]:
        """Offsets of the received pieces of LEAST_CHUNK_BYTES."""
        return frozenset(index * LEAST_CHUNK_BYTES for index, mark in enumerate(self._marks) if mark == _WRITTEN[0])

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write one chunk: whole pieces, possibly with the blob's shorter last piece.

        Raises:
            ValueError: the offset or the length is not that of a chunk of this blob.
            FileError: the disk is full or cannot be written.
        """
        end = offset + len(data)
        whole = end == self._ref.size_bytes or (end < self._ref.size_bytes and len(data) % LEAST_CHUNK_BYTES == 0)
        if offset < 0 or offset % LEAST_CHUNK_BYTES or not whole or not 0 < len(data) <= CHUNK_BYTES:
            raise ValueError(
                f"a chunk of {len(data)} bytes at {offset} does not belong to blob {self._ref.sha256[:12]}"
            )
        index, marks = offset // LEAST_CHUNK_BYTES, _WRITTEN * _count_pieces(len(data))
        try:
            with self._path.open("r+b", buffering=0) as file:
                _write_all(file.fileno(), data, offset)
                _write_all(file.fileno(), marks, self._ref.size_bytes + index)
        except OSError as error:
            raise self._make_error(error) from error
        self._marks[index : index + len(marks)] = marks

    def commit(self) -> bool:
        """Check the digest and move the blob to its place; if it is wrong, discard everything and return False.

        Raises:
            FileError: the disk is full or cannot be written.
        """
        try:
            if self._compute_digest() != self._ref.sha256:
                self._discard()
                return False
            with self._path.open("r+b") as file:
                file.truncate(self._ref.size_bytes)
                os.fsync(file.fileno())
            self._path.replace(self._target)
            sync_folder(self._target.parent)
        except OSError as error:
            raise self._make_error(error) from error
        self._on_commit(self._ref)
        return True

    def remove(self) -> None:
        """Delete the received chunks; `write` must not be called after that.

        Raises:
            FileError: it cannot be deleted.
        """
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise self._make_error(error) from error

    def _read_marks(self) -> bytearray:
        length = count_partial_bytes(self._ref)
        # A crash between truncating and moving leaves another length.
        if self._path.exists() and self._path.stat().st_size == length:
            with self._path.open("rb") as file:
                file.seek(self._ref.size_bytes)
                return bytearray(file.read(self._piece_count))
        with self._path.open("wb") as file:
            file.truncate(length)
        return bytearray(self._piece_count)

    def _compute_digest(self) -> str:
        digest, left_bytes = hashlib.sha256(), self._ref.size_bytes
        with self._path.open("rb") as file:
            while left_bytes and (block := file.read(min(left_bytes, _BLOCK_BYTES))):
                digest.update(block)
                left_bytes -= len(block)
        return digest.hexdigest()

    def _discard(self) -> None:
        self._path.unlink(missing_ok=True)
        self._marks = self._read_marks()

    def _make_error(self, error: OSError) -> FileError:
        return FileError(f"blob file {str(self._path)!r} cannot be written ({error.strerror}); free some space")


def count_partial_bytes(ref: BlobRef) -> int:
    """Compute the length of the file: the blob, and a mark for each of its pieces."""
    return ref.size_bytes + _count_pieces(ref.size_bytes)


def _count_pieces(size_bytes: int) -> int:
    return -(-size_bytes // LEAST_CHUNK_BYTES)


def _write_all(number: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(number, view, offset)
        view, offset = view[written:], offset + written
