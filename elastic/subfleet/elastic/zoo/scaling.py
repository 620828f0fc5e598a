"""HeteroFL's scaler."""

from torch import Tensor, nn

__all__ = ["Scaler"]


class Scaler(nn.Module):
    """While it trains, a subnet divides what it computes by its share of the full width.

    Its activations are then about as large as the full network's, which uses the same weights undivided in evaluation.

    Source: HeteroFL (Diao et al. 2021), section 3.2.

    Args:
        rate: the share, above 0 up to 1; at 1 nothing is divided.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Divide in training; any shape."""
        return x / self.rate if self.training and self.rate != 1 else x

    def extra_repr(self) -> str:
        """What a printed module shows."""
        return f"rate={self.rate}"
