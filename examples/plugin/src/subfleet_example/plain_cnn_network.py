"""The network of a plain CNN."""

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Blueprint, Sizes
from subfleet.elastic.network import Block
from subfleet_example.plain_cnn import PlainCnn

__all__ = ["plain_cnn"]


def plain_cnn(settings: PlainCnn) -> Blueprint:
    """All convolutions share one axis, the stream that they add to; so each but the first can be left out."""
    names = [f"blocks.block{number}" for number in range(1, settings.blocks)]
    return Blueprint(
        axes=(
            Axis(name="width", size=settings.width, kind="channel"),
            Axis(name="class", size=settings.class_count, kind="class", granularity=settings.class_count),
        ),
        blocks=tuple(Block(name=name, section=0) for name in names),
        build=partial(_build, settings),
        # They start at 0, so that every block starts as the identity.
        roles={f"{name}.conv.weight": "residual" for name in names},
    )


def _build(settings: PlainCnn, sizes: Sizes) -> nn.Module:
    width = sizes["width"]
    names = [f"block{number}" for number in range(settings.blocks) if f"blocks.block{number}" in sizes.parts]
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(settings.input_shape[0], width, 3, padding=1),
            blocks=nn.Sequential(OrderedDict((name, Added(width)) for name in names)),
            mean=Mean(),
            head=nn.Linear(width, sizes["class"]),
        )
    )


class Added(nn.Module):
    """Adds the output of a convolution to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, height, width of the image) to the same."""
        added: Tensor = self.conv(nn.functional.relu(x))
        return x + added


class Mean(nn.Module):
    """The mean of a ReLU over an image; every program target supports a plain mean."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, channels)."""
        return nn.functional.relu(x).mean(dim=(2, 3))
