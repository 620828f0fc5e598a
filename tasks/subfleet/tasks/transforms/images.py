"""Images (samples, channels, height, width): normalisation, random crops and flips.

What is random is drawn once for an epoch, a row for each sample of the data set, from (seed, round, client, epoch)
alone. So a sample is changed alike in whatever batch, or part of one, it comes, and also when a training is replayed.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subfleet.tasks.batches import sample_random

__all__ = ["ImageAugmentation", "channel_statistics", "horizontal_flip", "normalise", "random_crop"]

Floats = npt.NDArray[np.float32]

_ROW, _COLUMN, _FLIP = range(3)


def channel_statistics(images: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of each channel, (channels,) each."""
    mean = images.mean((0, 2, 3), dtype=np.float64)
    # One channel at a time: a float64 copy of all images would be twice their size.
    deviation = [images[:, channel].std(dtype=np.float64) for channel in range(images.shape[1])]
    return mean.astype(np.float32), np.array(deviation, np.float32)


def normalise(images: Floats, *, mean: npt.ArrayLike, deviation: npt.ArrayLike) -> Floats:
    """Subtract a mean from each channel and divide it by a deviation above 0, (channels,) each."""
    means, deviations = (np.asarray(values, np.float32)[:, None, None] for values in (mean, deviation))
    result: Floats = (images - means) / deviations
    return result


def random_crop(images: Floats, draws: Floats, *, padding: int) -> Floats:
    """Cut each image out of itself with a border of zeros, at a place of its own.

    Args:
        images: of which each is cut; the result has their shape.
        draws: (samples, 2), in [0, 1): where the cut begins, down and across.
        padding: width of the border; every offset from 0 to twice of it is equally likely.
    """
    border = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    padded = np.pad(images, border)
    starts = (draws * (2 * padding + 1)).astype(np.int64)
    rows = starts[:, 0, None] + np.arange(images.shape[2])
    columns = starts[:, 1, None] + np.arange(images.shape[3])
    samples = np.arange(len(images))
    # (samples, height, width, channels): the slice between index arrays comes last.
    cut = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(np.moveaxis(cut, 3, 1))


def horizontal_flip(images: Floats, draws: Floats) -> Floats:
    """Mirror the images, left to right, whose draw (samples,) in [0, 1) is below a half."""
    result: Floats = np.where((draws < 0.5)[:, None, None, None], images[..., ::-1], images)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAugmentation:
    """How training images are changed at random.

    Attributes:
        padding: width of the border of random crops; 0 crops nothing.
        flip: whether images are mirrored, each with probability 1/2.
    """

    padding: int = 0
    flip: bool = False

    def draws(self, count: int, *, seed: int, round_number: int, client_id: str, epoch: int) -> Floats:
        """What an epoch draws: a row for each of a client's `count` samples."""
        return sample_random(count, 3, seed=seed, round_number=round_number, client_id=client_id, epoch=epoch)

    def apply(self, images: Floats, draws: Floats) -> Floats:
        """Change a batch; `draws` are the rows of its samples."""
        if self.padding:
            images = random_crop(images, draws[:, (_ROW, _COLUMN)], padding=self.padding)
        return horizontal_flip(images, draws[:, _FLIP]) if self.flip else images
