"""Clients that attack: what they do to their data and to what they send. They exist in emulated fleets only.

What an attack is, and where it comes from, is said in `subfleet.settings.attacks`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from subfleet.protocol.errors import ConfigError, DataError
from subfleet.settings.attacks import Attack, LabelShuffling
from subfleet.tasks.dataset import Dataset, Inputs

TRIGGER_SIDE = 3
"""Pixels of the square in the lower right corner of an image that is the trigger."""

Value = TypeVar("Value", Tensor, npt.NDArray[np.float32])


def poison_dataset(attack: Attack, dataset: Dataset) -> Dataset:
    """What an attacker's malicious change is trained on."""
    if isinstance(attack, LabelShuffling):
        return shuffle_labels(dataset, attack.seed)
    return add_trigger(dataset, attack.target, attack.fraction, attack.seed)


def build_change(attack: Attack, honest: Mapping[str, Value], malicious: Mapping[str, Value]) -> dict[str, Value]:
    """The change that an attacker sends; what it would have been honestly plays no part in a backdoor."""
    if isinstance(attack, LabelShuffling):
        return boost_change(honest, malicious, attack.strength)
    return scale_to_replace(malicious, attack.weight, attack.total_weight)


def boost_change(honest: Mapping[str, Value], malicious: Mapping[str, Value], strength: float) -> dict[str, Value]:
    """An honest change with a malicious one on top: honest + strength * malicious (FedFA, equation 1).

    Args:
        honest: what training on the client's data changed, by tensor.
        malicious: what training on shuffled labels, or on images with a trigger, changed.
        strength: the paper's lambda: 0 is the honest change to the bit; the paper takes 1 and 20.
    """
    if strength == 0:
        return dict(honest)
    return {name: value + strength * malicious[name] for name, value in honest.items()}


def scale_to_replace(change: Mapping[str, Value], weight: float, total_weight: float) -> dict[str, Value]:
    """The change that puts the attacker's model in place of the shared one, if all others change next to nothing.

    Bagdasaryan et al. 2020, equation 3: the change divided by the attacker's fraction of the mean.

    Args:
        change: from the shared model to the attacker's.
        weight: of the attacker in the mean, above 0.
        total_weight: of all clients, the attacker included.

    Raises:
        ConfigError: the weights are no share.
    """
    if not 0 < weight <= total_weight:
        raise ConfigError(f"an attacker weighs {weight} of {total_weight}, but must weigh more than 0 and at most all")
    return {name: value * (total_weight / weight) for name, value in change.items()}


def shuffle_labels(dataset: Dataset, seed: int) -> Dataset:
    """The same samples with each other's labels; every label occurs as often as before."""
    return replace(dataset, labels=dataset.labels[_order(len(dataset), seed)])


def add_trigger(dataset: Dataset, target: int, fraction: float, seed: int) -> Dataset:
    """A data set in which some images carry the trigger and the attacker's class.

    The trigger is a square in the lower right corner, as bright as the brightest pixel of all.

    Args:
        dataset: images (samples, channels, height, width) with one class each.
        target: the class that the attacker wants for images with a trigger.
        fraction: fraction of the images that get it, 0 to 1.
        seed: of the choice.

    Raises:
        ConfigError: the fraction is out of range, or the target is negative.
        DataError: the inputs are no images that are large enough, or the labels no classes.
    """
    if not 0 <= fraction <= 1 or target < 0:
        raise ConfigError(
            f"the trigger has target {target} and fraction {fraction}, but they must be a class and a share from 0 to 1"
        )
    chosen = _order(len(dataset), seed)[: round(fraction * len(dataset))]
    inputs, labels = dataset.inputs.copy(), dataset.classes().copy()
    _stamp(inputs, chosen)
    labels[chosen] = target
    return replace(dataset, inputs=inputs, labels=labels)


def _stamp(images: Inputs, chosen: npt.NDArray[np.int64]) -> None:
    if images.ndim != 4 or images.dtype != np.float32 or min(images.shape[2:]) < TRIGGER_SIDE:
        raise DataError(
            f"inputs are {images.dtype} of shape {images.shape}, but a trigger needs float32 images (samples, "
            f"channels, height, width) of {TRIGGER_SIDE} pixels or more"
        )
    images[chosen, :, -TRIGGER_SIDE:, -TRIGGER_SIDE:] = images.max()


def _order(count: int, seed: int) -> npt.NDArray[np.int64]:
    """A random order: a sort of raw output, as NumPy may change what a generator's permutation draws."""
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable").astype(np.int64)
