"""The games, in plain PyTorch and NumPy alone, so that every environment can import them.

A fleet of members with images of its own; in each round some train a convolutional network for five steps of plain SGD,
and the server takes the mean of their weights. "tutorial" has images of CIFAR's size in batches of 32, "small" images
of MNIST's size in batches of 10, where a step takes less time than the calls around it.
"""

import time
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS, LEARNING_RATE, CLASSES = 5, 0.05, 10


@dataclass(frozen=True, kw_only=True)
class Game:
    """The network, how many members there are, how many train in a round, and for how many rounds."""

    network: str = "tutorial"
    members: int = 100
    taking_part: int = 20
    rounds: int = 5

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width of a sample."""
        return (3, 32, 32) if self.network == "tutorial" else (1, 28, 28)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return 32 if self.network == "tutorial" else 10

    def describe(self) -> dict[str, Any]:
        """The game as plain data."""
        return asdict(self)

    def build(self) -> nn.Module:
        """The network with its first weights, the same every time."""
        torch.manual_seed(0)  # noqa: TID251 - modules draw their weights from the global generator
        return TutorialCnn() if self.network == "tutorial" else SmallCnn()

    def draw_samples(self, member: int, count: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The images and labels of a member: noise with a bright square whose place tells the class."""
        generator, noise = np.random.default_rng(member), _draw_noise(self.image)
        labels = generator.integers(0, CLASSES, count or self.batch * STEPS)
        images = noise[generator.integers(0, len(noise), len(labels))]
        for image, label in zip(images, labels, strict=True):
            image[:, 2 * label : 2 * label + 6, 2 * label : 2 * label + 6] += 1.0
        return images, labels

    def train(self, network: nn.Module, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
        """One epoch of five steps; returns the last loss."""
        loss = torch.zeros(())
        optimiser = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
        inputs, targets = torch.from_numpy(images), torch.from_numpy(labels)
        for start in range(0, len(labels), self.batch):
            part = slice(start, start + self.batch)
            optimiser.zero_grad()
            loss = functional.cross_entropy(network(inputs[part]), targets[part])
            loss.backward()
            optimiser.step()
        return float(loss.detach())


class TutorialCnn(nn.Module):
    """The network of PyTorch's beginners' tutorial, which Flower's quickstart trains, too: 62,006 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, 32, 32) to (batch, 10)."""
        features = functional.max_pool2d(torch.relu(self.conv1(images)), 2)
        features = functional.max_pool2d(torch.relu(self.conv2(features)), 2).flatten(1)
        logits: Tensor = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(features)))))
        return logits


class SmallCnn(nn.Module):
    """Two narrow convolutions: 9,098 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(784, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 28, 28) to (batch, 10)."""
        features = functional.max_pool2d(torch.relu(self.conv1(images)), 2)
        features = functional.max_pool2d(torch.relu(self.conv2(features)), 2).flatten(1)
        logits: Tensor = self.head(features)
        return logits


@cache
def _draw_noise(image: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Drawn once in a process, since the samples of a member must cost little beside its training."""
    return np.random.default_rng(0).normal(0.0, 0.3, (512, *image)).astype(np.float32)


def play_eagerly(game: Game) -> list[float]:
    """The plainest loop: CPU seconds of each round."""
    torch.set_num_threads(1)
    network, samples = game.build(), [game.draw_samples(member) for member in range(game.members)]
    generator, spent_s = np.random.default_rng(1), list[float]()
    for _ in range(game.rounds):
        started_s = time.process_time()
        state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for member in generator.choice(game.members, game.taking_part, replace=False):
            network.load_state_dict(state)
            game.train(network, *samples[member])
            for name, tensor in network.state_dict().items():
                total[name] += tensor
        network.load_state_dict({name: tensor / game.taking_part for name, tensor in total.items()})
        spent_s.append(time.process_time() - started_s)
    return spent_s
