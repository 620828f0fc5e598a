"""Settings of plain convolutional networks; read without PyTorch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from subfleet.protocol.bounds import Length, Range, checked

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PlainCnn"]

Count = Annotated[int, Range(least=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PlainCnn:
    """Convolutions of one width. Submodels keep a part of it, and can leave out each convolution but the first.

    Attributes:
        input_shape: of images, (channels, height, width).
        class_count: 2 or more.
        width: channels of every convolution, 1 or more.
        blocks: how many convolutions follow the first, 1 or more.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "plain_cnn"
    norm: ClassVar[Literal["none"]] = "none"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: Annotated[tuple[Count, ...], Length(least=3, most=3)]
    class_count: Annotated[int, Range(least=2)]
    width: Count = 16
    blocks: Count = 3

    def module(self) -> "nn.Module":
        """See `subfleet.elastic.network.Family`."""
        from subfleet_example.plain_cnn_network import plain_cnn

        return plain_cnn(self)
