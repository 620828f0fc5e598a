"""Images (samples, channels, height, width): normalisation, random crops and flips.

What is random is drawn once for an epoch, a row for each sample of the data set, from (seed, round, client, epoch)
alone. So a sample is changed alike in whatever batch, or part of one, it comes, and also when a training is replayed.
"""

import numpy as np
import numpy.typing as npt

from subfleet.protocol.training import AugmentationSettings
from subfleet.tasks.batches import sample_random

Floats = npt.NDArray[np.float32]

_ROW, _COLUMN, _FLIP = range(3)


def crop_randomly(images: Floats, draws: Floats, *, padding: int) -> Floats:
    """Cut each image out of itself with a border of zeros, at a place of its own.

    Args:
        images: of which each is cut; the result has their shape.
        draws: (samples, 2), in [0, 1): where the cut begins, down and across.
        padding: width of the border; every offset from 0 to twice of it is equally likely.
    """
    starts = (draws * (2 * padding + 1)).astype(np.int64)
    result = np.zeros_like(images)
    # One at a time: bordered copies of all would be larger than the batch.
    for image, cut, (down, across) in zip(images, result, (starts - padding).tolist(), strict=True):
        (to_rows, rows), (to_columns, columns) = (
            _find_overlap(down, image.shape[1]),
            _find_overlap(across, image.shape[2]),
        )
        cut[:, to_rows, to_columns] = image[:, rows, columns]
    return result


def _find_overlap(offset: int, size: int) -> tuple[slice, slice]:
    """Where a window that begins at an offset shows what it was cut from, and which part of that it shows."""
    shown = max(size - abs(offset), 0)
    return slice(max(-offset, 0), max(-offset, 0) + shown), slice(max(offset, 0), max(offset, 0) + shown)


def flip_horizontally(images: Floats, draws: Floats) -> Floats:
    """Mirror the images, left to right, whose draw (samples,) in [0, 1) is below a half."""
    result: Floats = np.where((draws < 0.5)[:, None, None, None], images[..., ::-1], images)
    return result


def draw_augmentation(count: int, *, seed: int, round_number: int, client_id: str, epoch: int) -> Floats:
    """What an epoch draws: a row for each of a client's `count` samples, whatever it is used for."""
    return sample_random(count, 3, seed=seed, round_number=round_number, client_id=client_id, epoch=epoch)


def augment(images: Floats, draws: Floats, settings: AugmentationSettings) -> Floats:
    """Change a batch of images, which stay as they are.

    Args:
        images: (samples, channels, height, width).
        draws: the rows of these samples.
        settings: whether they are cut, mirrored, or both.
    """
    if settings.crops:
        images = crop_randomly(images, draws[:, (_ROW, _COLUMN)], padding=settings.padding)
    return flip_horizontally(images, draws[:, _FLIP]) if settings.flips else images
