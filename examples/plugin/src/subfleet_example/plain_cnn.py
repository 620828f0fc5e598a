"""Settings of plain convolutional networks; read without PyTorch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from subfleet.protocol.errors import ConfigError

if TYPE_CHECKING:
    from subfleet.elastic.families.blueprint import Blueprint

__all__ = ["PlainCnn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCnn:
    """A few convolutions of one width, of which subnets keep a part; each but the first can be left out.

    Attributes:
        input_shape: of images, (channels, height, width).
        class_count: 2 or more.
        width: channels of every convolution, 1 or more.
        blocks: how many convolutions there are, 1 or more.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "plain_cnn"
    norm: ClassVar[Literal["none"]] = "none"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: tuple[int, ...]
    class_count: int
    width: int = 16
    blocks: int = 3

    def __post_init__(self) -> None:
        if len(self.input_shape) != 3 or min(*self.input_shape, self.width, self.blocks) < 1 or self.class_count < 2:
            raise ConfigError(f"{self} must have images as inputs, a width, blocks, and 2 classes or more")

    @property
    def depths(self) -> tuple[int, ...]:
        """One section, whose first block is always kept."""
        return (self.blocks,)

    def blueprint(self) -> "Blueprint":
        """See `subfleet.elastic.network.Family`."""
        from subfleet_example.plain_cnn_network import plain_cnn

        return plain_cnn(self)
