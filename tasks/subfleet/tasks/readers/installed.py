"""Data sets that come with the package."""

from collections.abc import Sequence
from pathlib import Path

from subfleet.tasks.hold_out import hold_out
from subfleet.tasks.named_dataset import TrainTest
from subfleet.tasks.samples import digits

__all__ = ["read_digits"]

_TEST_FRACTION = 0.2
_SPLIT_SEED = 3


def read_digits(paths: Sequence[Path]) -> TrainTest:
    """The digits; a fifth of each class, always the same one, is the test part. There are no files."""
    dataset = digits()
    train, test = hold_out(dataset.classes(), fraction=_TEST_FRACTION, seed=_SPLIT_SEED)
    return TrainTest(train=dataset.take(train), test=dataset.take(test))
