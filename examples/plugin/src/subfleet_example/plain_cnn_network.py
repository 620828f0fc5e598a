"""The network of a plain CNN."""

from collections import OrderedDict

from torch import Tensor, nn

from subfleet_example.plain_cnn import PlainCnn

__all__ = ["plain_cnn"]


def plain_cnn(settings: PlainCnn) -> nn.Module:
    """All convolutions share one axis, the stream that they add to; so each but the first can be left out."""
    width = settings.width
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(settings.input_shape[0], width, 3, padding=1),
            blocks=nn.Sequential(*(Added(width) for _ in range(settings.blocks))),
            mean=Mean(),
            head=nn.Linear(width, settings.class_count),
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
