"""A network of one's own: two branches side by side, a residual block, attention, and a layer that is used twice."""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Adds two convolutions to its input; submodels may leave it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return images + self.second(torch.relu(self.norm(self.first(images))))


class MyNet(nn.Module):
    """Classifies small images.

    Args:
        width: channels of each branch; a multiple of 4.
        classes: number of classes.
    """

    def __init__(self, width: int = 24, classes: int = 10) -> None:
        super().__init__()
        self.near = nn.Conv2d(1, width, 1)
        self.far = nn.Conv2d(1, width, 5, padding=2)
        self.norm = nn.BatchNorm2d(2 * width)
        self.block = Residual(2 * width)
        self.pool = nn.MaxPool2d(2)
        self.shared = nn.Linear(2 * width, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        branches = torch.cat([self.near(images), self.far(images)], dim=1)
        features = self.pool(self.block(torch.relu(self.norm(branches))))
        tokens = self.shared(features.flatten(2).transpose(1, 2))
        attended, _ = self.attention(tokens, tokens, tokens)
        tokens = torch.relu(self.shared(tokens + attended))
        return self.head(tokens.mean(dim=1))
