"""What the settings allow to be cut from a recorded network."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from subfleet.elastic.recording.dimensions import Leaf, keep_whole
from subfleet.protocol.bounds import checked
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.limits import Positive

if TYPE_CHECKING:
    from subfleet.elastic.recording.naming import NamedAxis

_REASON = "the settings keep it whole"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Cuts:
    """What may be cut. Patterns have the wildcards of files: "layer4.*".

    Attributes:
        keep: patterns of axes that stay whole.
        blocks: patterns of the blocks that a submodel can leave out.
        granularity: size of the aligned groups of channels that are kept or dropped together, in axes whose size it
            divides.
        min_width: the fewest channels that a submodel keeps of an axis; all of one with fewer.
    """

    keep: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ("*",)
    granularity: Positive = 1
    min_width: Positive = 1

    def keep_axes(self, names: Mapping[Leaf, str]) -> None:
        """Keep axes whole.

        Args:
            names: of all axes that could be cut, by leaf.

        Raises:
            ConfigError: a pattern fits no axis.
        """
        cut = {leaf: name for leaf, name in names.items() if leaf.kind != "class"}
        _check_patterns("keep", self.keep, cut.values())
        for leaf, name in cut.items():
            if _fits(name, self.keep):
                keep_whole((leaf,), _REASON)

    def choose_blocks(self, names: Iterable[str]) -> list[str]:
        """The blocks that can be left out.

        Raises:
            ConfigError: a pattern fits no block.
        """
        every = list(names)
        _check_patterns("blocks", [pattern for pattern in self.blocks if pattern != "*"], every)
        return [name for name in every if _fits(name, self.blocks)]

    def choose_granularity(self, axis: "NamedAxis") -> int:
        """The granularity of an axis."""
        if axis.kind == "kernel":
            return 2
        fits = axis.kind == "channel" and not axis.size % self.granularity and not self.granularity % axis.group_size
        whole = axis.size if axis.kind == "class" else axis.group_size
        return self.granularity if fits else whole

    def choose_least(self, axis: "NamedAxis") -> int:
        """The fewest indices of an axis that a submodel keeps."""
        return min(axis.size, self.min_width) if axis.kind == "channel" else 1


EVERYTHING = Cuts()
"""All axes and blocks."""


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(key: str, patterns: Iterable[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"{key} names {pattern!r:.80}, but the network has {sorted(names)}; name some of these")
