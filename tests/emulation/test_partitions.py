"""Partitions: every training sample has one owner, and the same seed gives the same split."""

import numpy as np
import pytest

from subfleet import tasks
from subfleet.emulation.partitions import dirichlet_partition, hold_out
from subfleet.protocol.errors import ConfigError

LABELS = tasks.digits().classes()


def test_hold_out_takes_the_same_share_of_every_class() -> None:
    train, test = hold_out(LABELS, fraction=0.2, seed=3)
    assert sorted([*train, *test]) == list(range(len(LABELS)))
    for label in range(10):
        assert np.sum(LABELS[test] == label) == round(0.2 * np.count_nonzero(np.equal(LABELS, label)))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_hold_out_refuses_a_share_that_leaves_nothing(fraction: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        hold_out(LABELS, fraction=fraction, seed=3)


@pytest.mark.slow
def test_dirichlet_gives_every_sample_one_owner_and_unequal_classes() -> None:
    parts = dirichlet_partition(LABELS, clients=5, alpha=0.5, seed=7)
    assert sorted(index for part in parts for index in part) == list(range(len(LABELS)))
    assert min(len(part) for part in parts) >= 40
    shares = np.array([np.bincount(LABELS[part], minlength=10) / len(part) for part in parts])
    assert np.ptp(shares, axis=0).max() > 0.15, "with alpha 0.5 some class is unequal between clients"


@pytest.mark.slow
def test_dirichlet_is_a_function_of_its_seed() -> None:
    first = dirichlet_partition(LABELS, clients=4, alpha=0.5, seed=1)
    again = dirichlet_partition(LABELS, clients=4, alpha=0.5, seed=1)
    other = dirichlet_partition(LABELS, clients=4, alpha=0.5, seed=2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.slow
def test_dirichlet_says_when_there_are_too_few_samples() -> None:
    with pytest.raises(ConfigError, match="cannot be split"):
        dirichlet_partition(LABELS[:50], clients=10, alpha=0.5, seed=1)
