"""Networks that can be resized, and whose blocks can be copied, without settings of a family."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Resizable(Protocol):
    """The settings of a network that describe its axes and blocks one by one."""

    @property
    def hindrance(self) -> str:
        """Why it cannot grow block by block, such as "has no residual blocks"; empty if it can."""

    def with_sizes(self, sizes: Mapping[str, int]) -> Any:
        """The settings with other sizes of axes, by name."""

    def with_copy(self, block: str) -> tuple[Any, str]:
        """The settings with a copy of a skippable block right after it, and the name of the copy."""
