"""One file from its official address, with limits and a checksum: it is there as a whole and right, or not at all."""

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
"""How long the other side may be silent."""
_BLOCK_BYTES = 2**20


def download(url: str, target: Path, *, limit_bytes: int, checksum: str, timeout_s: float = TIMEOUT_S) -> None:
    """Fetch a file. It is written aside and gets its name once its checksum is right.

    Args:
        url: of the file.
        target: its path here; folders above it are made.
        limit_bytes: a longer answer is refused, before it is read where it tells its length.
        checksum: "sha256:" or "md5:" and the digits.
        timeout_s: how long the other side may be silent.

    Raises:
        TransportError: the address cannot be reached, or the answer breaks off.
        DataError: the answer is too long, or its checksum is wrong.
        FileError: the file cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: two processes that load the same file at once do not disturb each other.
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
            raise DataError(f"what {url} sent has the checksum {digits}, but must have {checksum}; it was not kept")
        partial.replace(target)
    except urllib.error.URLError as error:
        raise TransportError(
            f"{url} cannot be reached ({error.reason}); try again, or put the file into SUBFLEET_DATA"
        ) from error
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise TransportError(f"the answer of {url} broke off ({error}); try again") from error
    except OSError as error:
        raise FileError(f"data file {str(target)!r} cannot be written ({error.strerror}); check free space") from error
    finally:
        partial.unlink(missing_ok=True)


def _fetch(url: str, file: IO[bytes], *, limit_bytes: int, kind: str, timeout_s: float) -> str:
    digest = hashlib.new(kind, usedforsecurity=False)
    # The address stands in our own table; `SourceFile` allows https and this machine only.
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310
        told = answer.headers.get("Content-Length", "")
        if told.isdigit() and int(told) > limit_bytes:
            raise DataError(f"{url} offers {told} bytes, but its file has {limit_bytes} at most; it was not read")
        count = 0
        while block := answer.read(_BLOCK_BYTES):
            count += len(block)
            if count > limit_bytes:
                raise DataError(f"{url} sent more than the {limit_bytes} bytes of its file; it was not kept")
            digest.update(block)
            file.write(block)
        if told.isdigit() and count < int(told):
            raise TransportError(f"the answer of {url} broke off after {count} of {told} bytes; try again")
    return digest.hexdigest()
