"""Members of archives, read in memory and never unpacked to paths; each size is checked before memory is taken."""

import gzip
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from subfleet.protocol.errors import DataError


def read_gzip(path: Path, *, limit_bytes: int) -> bytes:
    """What a gzip file holds.

    Raises:
        DataError: it holds more than the limit.
    """
    with gzip.open(path, "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise DataError(f"it holds more than {limit_bytes} bytes, which no file of its kind does")
    return content


def read_tar(path: Path, wanted: Callable[[str], bool], *, limit_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted plain files of a gzipped tar archive, in its order; links are passed over.

    Args:
        path: of the archive.
        wanted: says of a name, without a leading "./", whether it is read.
        limit_bytes: of each wanted file.

    Raises:
        DataError: a wanted file is larger.
    """
    # As a stream, an archive of gigabytes is gone through once; gzip unpacks only as much of it as is asked for.
    with gzip.open(path, "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if not member.isreg() or not wanted(name):
                continue
            _check_size(name, member.size, limit_bytes)
            part = archive.extractfile(member)
            content = b"" if part is None else part.read()
            if len(content) != member.size:
                raise DataError(f"its member {name!r} ends after {len(content)} of {member.size} bytes")
            yield name, content


def read_members(path: Path, wanted: Callable[[str], bool], *, limit_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted files of a zip archive or of a folder, by name; names are relative, with slashes.

    Raises:
        DataError: a wanted file is larger than the limit.
    """
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        for name in filter(wanted, names):
            _check_size(name, (path / name).stat().st_size, limit_bytes)
            yield name, (path / name).read_bytes()
        return
    with zipfile.ZipFile(path) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            if info.is_dir() or not wanted(info.filename):
                continue
            _check_size(info.filename, info.file_size, limit_bytes)
            with archive.open(info) as file:
                yield info.filename, file.read(limit_bytes)


def check_zip(path: Path, *, limit_bytes: int) -> None:
    """See that what a zip archive (such as `.npz`) would unpack to is within a limit.

    Raises:
        DataError: it is more.
    """
    with zipfile.ZipFile(path) as archive:
        _check_size("content", sum(info.file_size for info in archive.infolist()), limit_bytes)


def _check_size(name: str, size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise DataError(f"its {name!r} would take {size_bytes} bytes, but no file of its kind takes over {limit_bytes}")
