"""Read members of archives into memory, without unpacking to paths; sizes are checked before memory is allocated."""

import gzip
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from subfleet.protocol.errors import DataError


def read_gzip(path: Path, *, limit_bytes: int) -> bytes:
    """Read the content of a gzip file.

    Raises:
        DataError: the content exceeds the limit.
    """
    with gzip.open(path, "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise DataError(f"it contains more than {limit_bytes} bytes, the limit for a file of its kind")
    return content


def read_tar(path: Path, selects: Callable[[str], bool], *, limit_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Read the selected plain files of a gzipped tar archive, as pairs of name and content; links are skipped.

    Args:
        path: path of the archive.
        selects: whether to read the file with a name, given without a leading "./".
        limit_bytes: limit for each selected file.

    Raises:
        DataError: a selected file exceeds the limit.
    """
    # A stream passes through an archive of gigabytes once; gzip only unpacks what is read.
    with gzip.open(path, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if not member.isreg() or not selects(name):
                continue
            _check_size(name, member.size, limit_bytes)
            part = archive.extractfile(member)
            content = b"" if part is None else part.read()
            if len(content) != member.size:
                raise DataError(f"its member {name!r} ends after {len(content)} of {member.size} bytes")
            yield name, content


def read_members(path: Path, selects: Callable[[str], bool], *, limit_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Read the selected files of a zip archive or a folder, as pairs of relative name (with slashes) and content.

    Raises:
        DataError: a selected file exceeds the limit.
    """
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        for name in filter(selects, names):
            _check_size(name, (path / name).stat().st_size, limit_bytes)
            yield name, (path / name).read_bytes()
        return
    with zipfile.ZipFile(path) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            if info.is_dir() or not selects(info.filename):
                continue
            _check_size(info.filename, info.file_size, limit_bytes)
            with archive.open(info) as file:
                yield info.filename, file.read(limit_bytes)


def check_zip(path: Path, *, limit_bytes: int) -> None:
    """Check that the content of a zip archive (such as `.npz`) is within a limit.

    Raises:
        DataError: it exceeds the limit.
    """
    with zipfile.ZipFile(path) as archive:
        _check_size("content", sum(info.file_size for info in archive.infolist()), limit_bytes)


def _check_size(name: str, size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise DataError(f"its {name!r} has {size_bytes} bytes, but a file of its kind may have at most {limit_bytes}")
