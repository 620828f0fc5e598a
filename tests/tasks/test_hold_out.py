"""A held-out part has the same share of every class."""

import numpy as np
import pytest

from subfleet.protocol.errors import ConfigError
from subfleet.tasks import hold_out

LABELS = np.random.default_rng(0).integers(0, 10, 500)


def test_hold_out_takes_the_same_share_of_every_class() -> None:
    train, test = hold_out(LABELS, fraction=0.2, seed=3)
    assert sorted([*train, *test]) == list(range(len(LABELS)))
    for label in range(10):
        assert np.sum(LABELS[test] == label) == round(0.2 * np.count_nonzero(np.equal(LABELS, label)))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_hold_out_refuses_a_share_that_leaves_nothing(fraction: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        hold_out(LABELS, fraction=fraction, seed=3)
