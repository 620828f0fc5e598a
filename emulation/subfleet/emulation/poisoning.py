"""Attacks of emulated clients: how they poison their data and falsify their updates.

See `subfleet.settings.fleet` for the attacks and their sources.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from subfleet.protocol.errors import ConfigError, DataError
from subfleet.settings.fleet import Attack, LabelShuffling
from subfleet.tasks.dataset import Dataset

TRIGGER_SIDE = 3
"""Side in pixels of the trigger, a square in the lower right corner of an image."""

Value = TypeVar("Value", Tensor, npt.NDArray[np.float32])


def poison_dataset(attack: Attack, dataset: Dataset) -> Dataset:
    """The data on which an attacker trains its malicious change."""
    if isinstance(attack, LabelShuffling):
        return shuffle_labels(dataset, attack.seed)
    return add_trigger(dataset, attack.target, attack.fraction, attack.seed)


def build_change(attack: Attack, honest: Mapping[str, Value], malicious: Mapping[str, Value]) -> dict[str, Value]:
    """The change that an attacker sends. A backdoor does not use the honest change."""
    if isinstance(attack, LabelShuffling):
        return boost_change(honest, malicious, attack.strength)
    return scale_to_replace(malicious, attack.weight, attack.total_weight)


def boost_change(honest: Mapping[str, Value], malicious: Mapping[str, Value], strength: float) -> dict[str, Value]:
    """Add a malicious change to an honest one: honest + strength * malicious (FedFA, equation 1).

    Args:
        honest: the change by training on the client's data, by tensor.
        malicious: the change by training on shuffled labels.
        strength: lambda in the paper, which uses 1 and 20; 0 gives exactly the honest change.
    """
    if strength == 0:
        return dict(honest)
    return {name: value + strength * malicious[name] for name, value in honest.items()}


def scale_to_replace(change: Mapping[str, Value], weight: float, total_weight: float) -> dict[str, Value]:
    """Scale a change so that the mean becomes the attacker's model if all other clients change almost nothing.

    The change is divided by the attacker's fraction of the total weight (Bagdasaryan et al. 2020, equation 3).

    Args:
        change: from the shared model to the attacker's.
        weight: of the attacker in the mean, above 0.
        total_weight: of all clients, the attacker included.

    Raises:
        ConfigError: `weight` is not above 0, or above `total_weight`.
    """
    if not 0 < weight <= total_weight:
        raise ConfigError(f"the attacker's weight is {weight}, but must be above 0 and at most {total_weight}")
    return {name: value * (total_weight / weight) for name, value in change.items()}


def shuffle_labels(dataset: Dataset, seed: int) -> Dataset:
    """Permute the labels of the samples; every label occurs as often as before."""
    return replace(dataset, labels=dataset.labels[_draw_order(len(dataset), seed)])


def add_trigger(dataset: Dataset, target: int, fraction: float, seed: int) -> Dataset:
    """Add the trigger to some images, and label them with the attacker's target class.

    The trigger is a square in the lower right corner, as bright as the brightest pixel of all images.

    Args:
        dataset: images of shape (samples, channels, height, width) with one class each.
        target: the class that the attacker wants for images with a trigger.
        fraction: of the images that get the trigger, 0 to 1.
        seed: of the selection of images.

    Raises:
        ConfigError: the fraction is out of range, or the target is negative.
        DataError: the inputs are not images of at least 3 x 3 pixels, or the labels are not classes.
    """
    if not 0 <= fraction <= 1 or target < 0:
        raise ConfigError(
            f"trigger target is {target} and fraction {fraction}, but both must be at least 0, and fraction at most 1"
        )
    selected = _draw_order(len(dataset), seed)[: round(fraction * len(dataset))]
    inputs, labels = dataset.inputs.copy(), dataset.classes().copy()
    if inputs.ndim != 4 or inputs.dtype != np.float32 or min(inputs.shape[2:]) < TRIGGER_SIDE:
        raise DataError(
            f"inputs are {inputs.dtype} of shape {inputs.shape}, but a trigger needs float32 images (samples, "
            f"channels, height, width) of {TRIGGER_SIDE} pixels or more"
        )
    inputs[selected, :, -TRIGGER_SIDE:, -TRIGGER_SIDE:] = inputs.max()
    labels[selected] = target
    return replace(dataset, inputs=inputs, labels=labels)


def _draw_order(count: int, seed: int) -> npt.NDArray[np.int64]:
    """A random order, from raw output, because NumPy may change the draws of `Generator.permutation`."""
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable").astype(np.int64)
