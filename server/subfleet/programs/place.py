"""The cache of exported programs between runs."""

import os
from pathlib import Path

from subfleet.export.cache import DEFAULT_LIMIT_BYTES, CacheFolder
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.homes import find_cache_folder


def open_default_cache() -> CacheFolder:
    """$SUBFLEET_CACHE, or the user's cache folder; $SUBFLEET_CACHE_BYTES limits its size.

    Raises:
        ConfigError: the limit is not a whole number of 1 or more.
        FileError: there is no home folder, and no other folder can be used.
    """
    chosen = os.environ.get("SUBFLEET_CACHE")
    limit = os.environ.get("SUBFLEET_CACHE_BYTES") or str(DEFAULT_LIMIT_BYTES)
    if not limit.isascii() or not limit.isdigit() or int(limit) < 1:
        raise ConfigError(f"SUBFLEET_CACHE_BYTES is {limit!r}, but must be a whole number of bytes, 1 or more")
    return CacheFolder(
        path=Path(chosen) if chosen else find_cache_folder() / "subfleet" / "programs", limit_bytes=int(limit)
    )
