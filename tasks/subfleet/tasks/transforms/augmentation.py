"""Images (samples, channels, height, width): normalisation, random crops and flips.

Random numbers are drawn once per epoch, a row for each sample of the data set, from (seed, round, client, epoch) alone.
A sample is therefore augmented the same way in every batch or part of one, and when a training is replayed.
"""

import numpy as np
import numpy.typing as npt

from subfleet.protocol.training import AugmentationSettings
from subfleet.tasks.batches import sample_random

Floats = npt.NDArray[np.float32]

_ROW, _COLUMN, _FLIP = range(3)


def crop_randomly(images: Floats, draws: Floats, *, padding: int) -> Floats:
    """Crop each image at a random position after padding it with zeros.

    Args:
        images: the images; the result has their shape.
        draws: (samples, 2), in [0, 1): vertical and horizontal position of the crop.
        padding: width of the padding; every offset from 0 to twice this is equally likely.
    """
    starts = (draws * (2 * padding + 1)).astype(np.int64)
    result = np.zeros_like(images)
    # One at a time, because padded copies of all would be larger than the batch.
    for image, cut, (down, across) in zip(images, result, (starts - padding).tolist(), strict=True):
        (to_rows, rows), (to_columns, columns) = (
            _find_overlap(down, image.shape[1]),
            _find_overlap(across, image.shape[2]),
        )
        cut[:, to_rows, to_columns] = image[:, rows, columns]
    return result


def _find_overlap(offset: int, size: int) -> tuple[slice, slice]:
    """The part of a window at an offset that lies inside the image, and the part of the image that it shows."""
    shown = max(size - abs(offset), 0)
    return slice(max(-offset, 0), max(-offset, 0) + shown), slice(max(offset, 0), max(offset, 0) + shown)


def flip_horizontally(images: Floats, draws: Floats) -> Floats:
    """Mirror the images with a draw (samples,), in [0, 1), below one half."""
    result: Floats = np.where((draws < 0.5)[:, None, None, None], images[..., ::-1], images)
    return result


def draw_augmentation(count: int, *, seed: int, round_number: int, client_id: str, epoch: int) -> Floats:
    """Draw the random numbers of an epoch: a row for each of a client's `count` samples."""
    return sample_random(count, 3, seed=seed, round_number=round_number, client_id=client_id, epoch=epoch)


def augment(images: Floats, draws: Floats, settings: AugmentationSettings) -> Floats:
    """Augment a copy of a batch of images.

    Args:
        images: (samples, channels, height, width).
        draws: the rows of these samples.
        settings: whether images are cropped, mirrored, or both.
    """
    if settings.crops:
        images = crop_randomly(images, draws[:, (_ROW, _COLUMN)], padding=settings.padding)
    return flip_horizontally(images, draws[:, _FLIP]) if settings.flips else images
