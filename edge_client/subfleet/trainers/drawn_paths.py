"""Draws paths through a subspace, one for each batch, and counts their examples."""

from collections.abc import Sequence

from subfleet.protocol.chains import Link
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.paths import OperatorExamples, PathSettings
from subfleet.tasks import StepOrigin, path_random
from subfleet.tasks.path_drawing import PathDrawer, PathPlace
from subfleet.trainers.program_layout import Path, list_stages

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
        self._stages = {(stage.link, stage.operator.name): stage for stage in list_stages(drawable)}
        self._counts = {link.name: {one.name: 0 for one in link.operators} for link in subspace if link.open}
        self._make_draws = None if settings is None else _make_draws(drawable, settings, left_bytes)

    def draw(self, origin: StepOrigin) -> Path:
        """Draw the path of a batch."""
        if self._make_draws is None:
            return tuple(self._stages.values())
        operators = self._make_draws.draw(path_random(origin))
        return tuple(self._stages[link.name, name] for link, name in zip(self._links, operators, strict=True))

    def count(self, path: Path, examples: int) -> None:
        """Add the real samples of a batch, or of a part of one."""
        for stage in path:
            if stage.link in self._counts:
                self._counts[stage.link][stage.operator.name] += examples

    @property
    def examples(self) -> OperatorExamples:
        """Examples per operator of the subspace, in the order of its links."""
        return tuple((choice, tuple(counts.items())) for choice, counts in self._counts.items())


def _make_draws(drawable: Sequence[Link], settings: PathSettings, left_bytes: int) -> PathDrawer:
    stages = [
        PathPlace(
            name=link.name,
            operators=tuple(one.name for one in link.operators),
            costs=tuple((one.forward_macs, one.kept_bytes) for one in link.operators),
        )
        for link in drawable
    ]
    try:
        return PathDrawer(stages, (settings.forward_macs, left_bytes), settings.sampler)
    except ConfigError as error:
        least_macs = sum(min(one.forward_macs for one in link.operators) for link in drawable)
        raise ProtocolError(
            f"a path may take {settings.forward_macs} multiplications and keep {left_bytes} bytes, but none of the "
            f"task's subspace does: the cheapest takes {least_macs} multiplications; allow more"
        ) from error
