"""Download a file with a size limit and a checksum; it appears complete and verified, or not at all."""

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from subfleet.protocol.errors import DataError, FileError, TransportError

TIMEOUT_S = 30.0
"""Longest silence of the server."""
_BLOCK_BYTES = 2**20


def download(url: str, target: Path, *, limit_bytes: int, checksum: str, timeout_s: float = TIMEOUT_S) -> None:
    """Download a file to a temporary file and rename it after its checksum was verified.

    Args:
        url: address of the file.
        target: local path; missing parent folders are created.
        limit_bytes: largest accepted size; a larger response is refused, before it is read if it announces its length.
        checksum: "sha256:" or "md5:" and the digits.
        timeout_s: longest silence of the server.

    Raises:
        TransportError: the address cannot be reached, or the response breaks off.
        DataError: the response is too long, or its checksum is wrong.
        FileError: the file cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A unique name, so that two processes can download the same file at once.
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    except OSError as error:
        raise FileError(f"data folder {str(target.parent)!r} cannot be written ({error.strerror})") from error
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            digits = _fetch(url, file, limit_bytes=limit_bytes, kind=checksum.partition(":")[0], timeout_s=timeout_s)
            file.flush()
            os.fsync(file.fileno())
        if digits != checksum.partition(":")[2]:
            raise DataError(
                f"the file from {url} has the checksum {digits}, but must have {checksum}; it was discarded"
            )
        partial.replace(target)
    except urllib.error.URLError as error:
        raise TransportError(
            f"{url} cannot be reached ({error.reason}); try again, or put the file into SUBFLEET_DATA"
        ) from error
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise TransportError(f"the response of {url} broke off ({error}); try again") from error
    except OSError as error:
        raise FileError(f"data file {str(target)!r} cannot be written ({error.strerror}); check free space") from error
    finally:
        partial.unlink(missing_ok=True)


def _fetch(url: str, file: IO[bytes], *, limit_bytes: int, kind: str, timeout_s: float) -> str:
    digest = hashlib.new(kind, usedforsecurity=False)
    # The address is in our own table; `SourceFile` only allows https and this machine.
    with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and int(length) > limit_bytes:
            raise DataError(f"{url} offers {length} bytes, but its file has at most {limit_bytes}; it was not read")
        count = 0
        while block := response.read(_BLOCK_BYTES):
            count += len(block)
            if count > limit_bytes:
                raise DataError(f"{url} sent more than the {limit_bytes} bytes of its file; it was discarded")
            digest.update(block)
            file.write(block)
        if length.isdigit() and count < int(length):
            raise TransportError(f"the response of {url} broke off after {count} of {length} bytes; try again")
    return digest.hexdigest()
