"""The descriptions of runs that come with the package, by name."""

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

__all__ = ["CONFIGURATIONS", "shipped_text"]

CONFIGURATIONS: Mapping[str, str] = MappingProxyType({"fleet": "fleet.toml"})
"""The shipped configurations: name to file in the package's `data` folder."""


def shipped_text(name: str) -> str:
    """The text of a shipped configuration.

    Raises:
        KeyError: there is none of that name.
    """
    return (resources.files("subfleet.settings") / "data" / CONFIGURATIONS[name]).read_text(encoding="utf-8")
