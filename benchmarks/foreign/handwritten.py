"""Networks that users usually write by hand."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from foreign.network import ForeignNetwork
from subfleet.export.steps import SampleSpec

__all__ = ["HANDWRITTEN"]

_CLASS_COUNT = 10
_VOCABULARY = 96


def _build_double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Halves and doubles the resolution twice, with skip connections (Ronneberger et al. 2015); returns an image."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.down1, self.down2, self.bottom = (
            _build_double_convolution(3, width),
            _build_double_convolution(width, 2 * width),
            _build_double_convolution(2 * width, 4 * width),
        )
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge2, self.merge1 = (
            _build_double_convolution(4 * width, 2 * width),
            _build_double_convolution(2 * width, width),
        )
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """(batch, channels, rows, columns) to an image."""
        first = self.down1(image)
        second = self.down2(self.pool(first))
        hidden = self.up2(self.bottom(self.pool(second)))
        hidden = self.up1(self.merge2(torch.cat([hidden, second], dim=1)))
        output: Tensor = self.head(self.merge1(torch.cat([hidden, first], dim=1)))
        return output


class CausalBlock(nn.Module):
    """Two causal dilated convolutions with a residual (Bai et al. 2018, figure 1b)."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.cut = 2 * dilation
        self.first = weight_norm(nn.Conv1d(inputs, outputs, 3, padding=self.cut, dilation=dilation))
        self.second = weight_norm(nn.Conv1d(outputs, outputs, 3, padding=self.cut, dilation=dilation))
        self.dropout = nn.Dropout(0.1)
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, steps) to (batch, channels, steps)."""
        hidden = self.dropout(torch.relu(self.first(x)[:, :, : -self.cut].contiguous()))
        hidden = self.dropout(torch.relu(self.second(hidden)[:, :, : -self.cut].contiguous()))
        return torch.relu(hidden + (x if self.shortcut is None else self.shortcut(x)))


class TemporalNetwork(nn.Module):
    """Classifies a series by its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(CausalBlock(3, 24, 1), CausalBlock(24, 24, 2), CausalBlock(24, 24, 4))
        self.head = nn.Linear(24, _CLASS_COUNT)

    def forward(self, series: Tensor) -> Tensor:
        """(batch, channels, steps) to (batch, classes)."""
        logits: Tensor = self.head(self.blocks(series)[:, :, -1])
        return logits


class Tagger(nn.Module):
    """Tags each token with a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, 32, padding_idx=0)
        self.dropout = nn.Dropout(0.2)
        self.gru = nn.GRU(32, 32, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(64, _CLASS_COUNT)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) to (batch, tokens, classes)."""
        states, _ = self.gru(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.head(states)
        return logits


class Autoencoder(nn.Module):
    """Encodes an image as a few numbers and decodes it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 24),
        )
        self.decoder = nn.Sequential(
            nn.Linear(24, 32 * 7 * 7),
            nn.Unflatten(1, (32, 7, 7)),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, image: Tensor) -> Tensor:
        """(batch, channels, rows, columns) to an image."""
        output: Tensor = self.decoder(self.encoder(image))
        return output


HANDWRITTEN = (
    ForeignNetwork(
        name="U-Net",
        origin="written here",
        build=UNet,
        sample=SampleSpec(shape=(3, 32, 32)),
        objective="mean_squared_error",
        class_count=0,
    ),
    ForeignNetwork(
        name="TCN with weight norm", origin="written here", build=TemporalNetwork, sample=SampleSpec(shape=(3, 64))
    ),
    ForeignNetwork(
        name="GRU tagger",
        origin="written here",
        build=Tagger,
        sample=SampleSpec(shape=(20,), dtype="I64", limit=_VOCABULARY),
        objective="next_token",
    ),
    ForeignNetwork(
        name="autoencoder",
        origin="written here",
        build=Autoencoder,
        sample=SampleSpec(shape=(1, 28, 28)),
        objective="mean_squared_error",
        class_count=0,
    ),
)
