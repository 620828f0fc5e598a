"""Locate the files of a data set: in the folder SUBFLEET_DATA, in the cache, or at their address."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from subfleet.protocol.errors import ConfigError, DataError, FileError, explain_os_errors
from subfleet.protocol.homes import find_cache_folder

__all__ = ["DataFolders", "SourceFile", "find_availability", "find_data_folders", "locate"]

_BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of a data set.

    Attributes:
        paths: possible paths in a data folder; downloads go to the first. Without a checksum this may also be a folder.
        url: official address; "" if there is none and users must provide the file.
        limit_bytes: largest size that is read from the address.
        checksum: "sha256:" or "md5:" and the published digits; "" if none is published, and nothing is checked.

    Raises:
        ValueError: a file with an address has no checksum or no limit, or the address is neither https nor this
            machine.
    """

    paths: tuple[str, ...]
    url: str = ""
    limit_bytes: int = 0
    checksum: str = ""

    def __post_init__(self) -> None:
        if self.url and not (self.checksum and self.limit_bytes > 0):
            raise ValueError(f"{self.url} has no checksum or no limit, but a download needs both")
        if self.url and not self.url.startswith(("https://", "http://127.0.0.1:")):
            raise ValueError(f"the address {self.url} must begin with https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFolders:
    """Folders of data sets.

    Attributes:
        given: the user's folder, searched first and never written to.
        cache: the folder for downloads.
    """

    given: Path | None
    cache: Path


def find_data_folders() -> DataFolders:
    """Read the data folders from the environment: $SUBFLEET_DATA, and the cache in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        ConfigError: SUBFLEET_DATA is not a folder.
        FileError: there is no home folder and no replacement for it.
    """
    given = os.environ.get("SUBFLEET_DATA")
    if given and not Path(given).is_dir():
        raise ConfigError(f"SUBFLEET_DATA is {given!r}, but must name a folder of data sets; correct or unset it")
    return DataFolders(given=Path(given) if given else None, cache=find_cache_folder() / "subfleet" / "data")


def find_availability(file: SourceFile, folders: DataFolders) -> str:
    """Find out where a file would come from: "given", "cached", "download" or "missing"."""
    if folders.given is not None and _find(file, folders.given) is not None:
        return "given"
    if _find(file, folders.cache) is not None:
        return "cached"
    return "download" if file.url else "missing"


def locate(file: SourceFile, folders: DataFolders, announce: Callable[[str], None]) -> Path:
    """Locate a file on this machine, or download it, and verify its checksum.

    Args:
        file: the file.
        folders: folders to look in and to download to.
        announce: called with a message before a download.

    Raises:
        FileError: it is missing and has no address, or cannot be read or written.
        DataError: its checksum is wrong.
        TransportError: its address cannot be reached.
    """
    for folder in (folders.given, folders.cache):
        path = None if folder is None else _find(file, folder)
        if path is not None:
            _check(file, path)
            return path
    target = folders.cache / file.paths[0]
    if not file.url:
        raise FileError(
            f"data file {file.paths[0]!r} is neither in SUBFLEET_DATA nor in {str(folders.cache)!r}, and has no "
            "official address; create it as described in docs/reference/tasks.md and put it there"
        )
    # Imported here to save memory on devices that have their data.
    from subfleet.tasks.download import download

    announce(f"Downloading {file.url} ({file.limit_bytes / 1e6:.1f} MB)")
    download(file.url, target, limit_bytes=file.limit_bytes, checksum=file.checksum)
    return target


def _find(file: SourceFile, folder: Path) -> Path | None:
    return next((folder / path for path in file.paths if (folder / path).exists()), None)


def _check(file: SourceFile, path: Path) -> None:
    if not file.checksum:
        return
    kind, _, digits = file.checksum.partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    explained = explain_os_errors(f"data file {str(path)!r} cannot be read", "check its permissions")
    with explained, path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    if digest.hexdigest() != digits:
        remedy = "remove it to download it again" if file.url else "put the right file there"
        raise DataError(
            f"data file {str(path)!r} has the {kind} checksum {digest.hexdigest()}, but must have {digits}; {remedy}"
        )
