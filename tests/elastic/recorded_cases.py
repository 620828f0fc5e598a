"""Modules as people write them, which are recorded."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.recording.loading import record_network


class Branches(nn.Module):
    """Two branches that are added, a shared layer, and attention over the places of an image."""

    def __init__(self, width: int = 12, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.left = nn.Conv2d(width, width, 3, padding=1)
        self.right = nn.Conv2d(width, width, 1)
        self.shared = nn.Linear(width, width)
        self.mix = nn.TransformerEncoderLayer(width, 3, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        features = torch.relu(self.left(features)) + torch.sigmoid(self.right(features))
        tokens = self.shared(features.flatten(2).transpose(1, 2))
        tokens = self.shared(torch.relu(self.mix(tokens)))
        logits: Tensor = self.head(tokens.mean(1))
        return logits


class Residual(nn.Module):
    """A block that adds to its input."""

    def __init__(self, width: int, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 2 * width, 3, padding=1, groups=groups)
        self.norm = nn.BatchNorm2d(2 * width)
        self.last = nn.Conv2d(2 * width, width, 1)

    def forward(self, images: Tensor) -> Tensor:
        added: Tensor = self.last(torch.relu(self.norm(self.conv(images))))
        return images + added


class Added(nn.Module):
    """Adds a layer to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        added: Tensor = self.layer(inputs)
        return inputs + added


class Changed(nn.Module):
    """Adds to its input, and then changes the sum: no block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.added, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        changed: Tensor = self.last(inputs + self.added(inputs))
        return changed


class Attention(nn.Module):
    """Attention by hand, with fused queries, keys and values, a class token and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 8, 16))
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, sequence: Tensor) -> Tensor:
        stream = torch.cat([self.token.expand(len(sequence), -1, -1), self.embed(sequence)], 1) + self.positions
        queries, keys, values = self.qkv(stream).view(len(sequence), 8, 3, 4, 4).permute(2, 0, 3, 1, 4)
        weights = (queries @ keys.transpose(-2, -1)).softmax(-1)
        stream = stream + self.out((weights @ values).transpose(1, 2).reshape(len(sequence), 8, 16))
        logits: Tensor = self.head(stream[:, 0])
        return logits


class Gated(nn.Module):
    """Halves of a layer's outputs multiplied, groups normalised, and an upsampled image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.gates = nn.Conv2d(16, 24, 1)
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.last = weight_norm(nn.Conv2d(8, 4, 1))

    def forward(self, images: Tensor) -> Tensor:
        value, gate = self.gates(functional.gelu(self.norm(self.first(images)))).chunk(2, dim=1)
        logits: Tensor = self.last(self.up(value * torch.sigmoid(gate)))
        return logits


class Tokens(nn.Module):
    """An embedding, a GRU and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.gru = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.gru(self.embed(tokens))[0][:, -1])
        return logits


class Joined(nn.Module):
    """Outputs of two layers side by side, and a buffer of constants."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 8)
        self.hidden = nn.Linear(12, 10)
        self.head = nn.Linear(10, 3)
        self.register_buffer("scale", torch.full((1,), float("inf")), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        both = torch.cat([self.left(inputs), self.right(inputs)], -1).clamp(max=self.scale)
        logits: Tensor = self.head(torch.relu(self.hidden(torch.relu(both))))
        return logits


class Parts(nn.Module):
    """Parts of a layer's outputs, read by slices and by `narrow`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.left, self.right = nn.Linear(6, 9), nn.Linear(8, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        added = self.left(hidden[:, 3:9]) + self.right(hidden.narrow(1, 4, 8))
        logits: Tensor = self.head(torch.tanh(added))
        return logits


class Dense(nn.Module):
    """Layers that read the outputs of all layers before them, and a classifier that reads all places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (6, 10, 14))
        self.convs = nn.ModuleList(nn.Conv2d(width, 4, 3, padding=1, bias=False) for width in (6, 10, 14))
        self.head = nn.Linear(18 * 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = [self.stem(images)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(torch.relu(norm(torch.cat(features, 1)))))
        logits: Tensor = self.head(functional.max_pool2d(torch.cat(features, 1), 2).flatten(1))
        return logits


class Shuffled(nn.Module):
    """Splits the channels in halves, applies a layer to one half, and shuffles the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 12, 1)
        self.layers = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(12, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        for layer in self.layers:
            left, right = features.chunk(2, dim=1)
            joined = torch.cat([left, torch.relu(layer(right))], 1)
            batch, _, height, width = joined.shape
            features = joined.view(batch, 2, 6, height, width).transpose(1, 2).reshape(batch, 12, height, width)
        logits: Tensor = self.head(features)
        return logits


class Windows(nn.Module):
    """Attention inside windows, with a table of biases for each head, and layers that slide over other dimensions."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(2, 12, 2, stride=2)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.biases = nn.Parameter(torch.randn(7, 3))
        self.register_buffer("index", torch.randint(7, (4, 4)))
        self.mix, self.slide = nn.Conv1d(2, 1, 1), nn.Conv1d(1, 1, 3, padding=1)
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        windows = self.embed(images).flatten(2).transpose(1, 2).unflatten(1, (2, 4))
        parts = self.qkv(windows).unflatten(-1, (3, 3, 4)).permute(3, 0, 4, 1, 2, 5)
        biases = self.biases[self.index].permute(2, 0, 1)[:, None]
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=biases)
        tokens = windows + self.out(attended.permute(0, 2, 3, 1, 4).flatten(3))
        summary = self.mix(tokens.mean(2)).squeeze(1)
        logits: Tensor = self.head(summary) + self.slide(self.head(summary)[:, None])[:, 0]
        return logits


class Biased(nn.Module):
    """Attention with a bias for each head and pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(6, 12) for _ in range(3))
        self.biases = nn.Parameter(torch.randn(1, 3, 5, 5))
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        queries, keys, values = (
            own(tokens).unflatten(-1, (3, 4)).transpose(1, 2) for own in (self.queries, self.keys, self.values)
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=torch.tanh(self.biases))
        logits: Tensor = self.head(attended.transpose(1, 2).flatten(2))
        return logits


class Swapped(nn.Module):
    """Parts of unequal sizes that are joined in another order, and a pyramid of pooled places."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 4, 1), nn.Conv2d(2, 6, 1)
        self.mix = nn.Conv2d(10, 10, 1)
        self.last = nn.Conv2d(10, 7, 1)
        self.head = nn.Linear(7 * 5, 3)

    def forward(self, images: Tensor) -> Tensor:
        first, second = self.mix(torch.cat([self.left(images), self.right(images)], 1)).split([4, 6], 1)
        features = torch.relu(self.last(torch.relu(torch.cat([second, first], 1))))
        pooled = [functional.adaptive_max_pool2d(features, size).flatten(1) for size in (1, 2)]
        logits: Tensor = self.head(torch.cat(pooled, 1))
        return logits


class Tied(nn.Module):
    """An output layer with the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


class Limited(nn.Module):
    """Limits that are saved, and infinite at first."""

    most: Tensor
    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("most", torch.tensor(float("inf")))
        self.register_buffer("index", torch.tensor([2, 0, 1, 3]))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.first(inputs[:, self.index])).clamp(max=self.most))
        return logits


class Exits(nn.Module):
    """Returns results by name: with an auxiliary one in training, some of them computed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(4, 6), nn.Linear(6, 2)
        self.auxiliary = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.first(inputs))
        hidden.view(-1, 2, 3)[:, 1].mul_(2.0)
        results = {"logits": self.head(hidden)}
        if self.training:
            results["auxiliary"] = self.auxiliary(hidden)
        return results


class Standardised(nn.Module):
    """Convolutions whose filters are normalised, with a norm of each sample's places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            weight = layer.weight
            flat = functional.batch_norm(weight.reshape(1, len(weight), -1), None, None, training=True)
            images = torch.relu(functional.conv2d(images, flat.reshape_as(weight), layer.bias, padding=1))
        logits: Tensor = self.head(images.mean((2, 3)))
        return logits


class Recurrent(nn.Module):
    """An LSTM over symbols, and a layer that reads its states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(7, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 7)

    def forward(self, symbols: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embed(symbols))[0])
        return logits


class Compared(nn.Module):
    """Symbols and places are rows of tables, by products with a one where each stands."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn((11, 8), generator=torch.Generator().manual_seed(0)))
        self.places = nn.Parameter(torch.randn((2, 5, 8), generator=torch.Generator().manual_seed(1)))
        self.hidden = nn.Linear(8, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, symbols: Tensor) -> Tensor:
        rows = functional.one_hot(symbols, 11).float() @ self.table
        numbers = torch.arange(5).expand(len(symbols), 2, -1)
        rows = rows + (functional.one_hot(numbers, 5).float() @ self.places).sum(1)
        logits: Tensor = self.head(torch.relu(self.hidden(rows)).mean(1))
        return logits


MODULES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = MappingProxyType(
    {
        "branches": (Branches, (2, 6, 6), 0),
        "residual": (
            lambda: nn.Sequential(
                nn.Conv2d(1, 8, 3), Residual(8), Residual(8, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                nn.Linear(8, 3),
            ),
            (1, 6, 6),
            0,
        ),
        "attention": (Attention, (7, 6), 0),
        "gated": (Gated, (3, 8, 8), 0),
        "tokens": (Tokens, (9,), 11),
        "joined": (Joined, (6,), 0),
        "parts": (Parts, (6,), 0),
        "dense": (Dense, (2, 4, 4), 0),
        "shuffled": (Shuffled, (2, 4, 4), 0),
        "biased": (Biased, (5, 6), 0),
        "swapped": (Swapped, (2, 4, 4), 0),
        "tied": (Tied, (6,), 11),
        "limited": (Limited, (4,), 0),
        "standardised": (Standardised, (2, 4, 4), 0),
        "windows": (Windows, (2, 4, 8), 0),
        "recurrent": (Recurrent, (5,), 7),
        "compared": (Compared, (5,), 11),
    }
)  # fmt: skip
"""A function that makes a module, the shape of its samples, and the number of symbols."""


@cache
def record_case(name: str) -> Recorded:
    """The record of one of these modules."""
    make, shape, symbols = MODULES[name]
    return record_network(make(), shape, symbols=symbols)
