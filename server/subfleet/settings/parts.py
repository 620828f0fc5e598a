"""What of a run's settings takes part in its outcome: the fingerprint by which a run is taken up again."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from subfleet.protocol.schema import to_plain

__all__ = ["NO_PART", "parts_of"]

NO_PART: Mapping[str, bool] = MappingProxyType({"no_part": True})
"""Metadata of a field that takes no part in what a run comes to: it may be another one when a run is taken up again."""


def parts_of(settings: Any) -> Any:
    """Plain settings with everything that takes part in the outcome, and nothing else."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        kept = [field.name for field in dataclasses.fields(settings) if "no_part" not in field.metadata]
        plain: dict[str, Any] = to_plain(settings)
        tags = {key: value for key, value in plain.items() if not hasattr(settings, key) or key == "type"}
        return tags | {name: parts_of(getattr(settings, name)) for name in kept if name in plain}
    if isinstance(settings, (tuple, list)):
        return [parts_of(one) for one in settings]
    return to_plain(settings)
