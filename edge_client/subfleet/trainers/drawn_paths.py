"""The paths that a device draws through the links of a subspace, one for each batch, and what it tells of them."""

from collections.abc import Sequence

from subfleet.protocol.chains import Link
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.paths import OperatorExamples, PathSettings
from subfleet.tasks import StepOrigin, path_random
from subfleet.tasks.path_drawing import PathDrawer, PathPlace
from subfleet.trainers.program_layout import Path, places_of

__all__ = ["DrawnPaths"]


class DrawnPaths:
    """Draws paths that have room, and counts the examples that go through each operator.

    Args:
        subspace: its links, with all operators: what is told of.
        drawable: the same with those alone that may be drawn.
        settings: how paths are drawn; None where there is one path, that of a plain program.
        left_bytes: what the operators of a path may keep together.

    Raises:
        ProtocolError: every path that has room takes more multiplications than the settings allow.
    """

    def __init__(
        self, subspace: Sequence[Link], drawable: Sequence[Link], settings: PathSettings | None, left_bytes: int
    ) -> None:
        self._links = tuple(drawable)
        self._places = {(place.link, place.operator.name): place for place in places_of(drawable)}
        self._counts = {link.name: {one.name: 0 for one in link.operators} for link in subspace if link.open}
        self._draws = None if settings is None else _draws(drawable, settings, left_bytes)

    def draw(self, origin: StepOrigin) -> Path:
        """The path of a batch."""
        if self._draws is None:
            return tuple(self._places.values())
        operators = self._draws.draw(path_random(origin))
        return tuple(self._places[link.name, name] for link, name in zip(self._links, operators, strict=True))

    def count(self, path: Path, examples: int) -> None:
        """Add the real samples of a batch, or of a part of one."""
        for place in path:
            if place.link in self._counts:
                self._counts[place.link][place.operator.name] += examples

    @property
    def examples(self) -> OperatorExamples:
        """What went through all operators of the subspace, in the order of its links."""
        return tuple((choice, tuple(counts.items())) for choice, counts in self._counts.items())


def _draws(drawable: Sequence[Link], settings: PathSettings, left_bytes: int) -> PathDrawer:
    places = [
        PathPlace(
            name=link.name,
            operators=tuple(one.name for one in link.operators),
            costs=tuple((one.forward_macs, one.kept_bytes) for one in link.operators),
        )
        for link in drawable
    ]
    try:
        return PathDrawer(places, (settings.forward_macs, left_bytes), settings.sampler)
    except ConfigError as error:
        least_macs = sum(min(one.forward_macs for one in link.operators) for link in drawable)
        raise ProtocolError(
            f"a path may take {settings.forward_macs} multiplications and keep {left_bytes} bytes, but none of the "
            f"task's subspace does: the cheapest takes {least_macs} multiplications; allow more"
        ) from error
