"""Reads TOML, with one kind of error."""

import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str) -> dict[str, Any]:
    """Read TOML.

    Raises:
        ValueError: the text is not TOML, is nested too deeply, or has an integer with thousands of digits.
    """
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("its lists or tables are nested too deeply") from error
    return table
