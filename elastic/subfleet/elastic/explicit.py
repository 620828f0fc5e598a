"""Settings that list the axes, blocks and tensors of a network themselves, such as those of a recorded module."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ExplicitFamily(Protocol):
    """The settings of a network that list all its parts."""

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the tensors that training does not change."""

    @property
    def awaited(self) -> tuple[str, ...]:
        """Names of the frozen tensors whose values must be given, because they are not in the settings."""

    @property
    def hindrance(self) -> str:
        """Why the network cannot grow block by block, such as "has no residual blocks"; empty if it can."""

    def with_sizes(self, sizes: Mapping[str, int]) -> Any:
        """The settings with other sizes of axes, by name."""

    def with_copy(self, block: str) -> tuple[Any, str]:
        """The settings with a copy of a skippable block right after it, and the name of the copy."""

    def united_with(self, others: Sequence[Any]) -> Any:
        """The settings of the smallest network that has this one and others as submodels.

        Raises:
            ConfigError: there is none.
        """
