"""Numbers of settings that no file can hold, as a file's reader refuses them, but Python code can."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["check_finite"]


def check_finite(settings: Any) -> None:
    """Refuse settings with a number that is not finite.

    Raises:
        ValueError: there is one; the text names it.
    """
    for where, number in _infinite_numbers(settings):
        raise ValueError(f"{where} is {number}, but must be a finite number")


def _infinite_numbers(settings: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in settings that are not finite, each with the keys that lead to it, dotted as in TOML."""
    if isinstance(settings, float):
        if not math.isfinite(settings):
            yield where, settings
    elif dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        for field in dataclasses.fields(settings):
            yield from _infinite_numbers(getattr(settings, field.name), f"{where}.{field.name}".lstrip("."))
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _infinite_numbers(value, f"{where}.{key}")
    elif isinstance(settings, (tuple, list)):
        for place, value in enumerate(settings):
            yield from _infinite_numbers(value, f"{where}[{place}]")
