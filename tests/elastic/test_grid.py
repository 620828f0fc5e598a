"""The limit of changes follows from the largest magnitude of the weights."""

import math

import pytest
import torch

from subfleet.elastic.grid import limit_exponent
from subfleet.protocol.errors import ConfigError


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_magnitude_counts(sign: float) -> None:
    assert limit_exponent("w", sign * torch.tensor([0.0, 0.5, -0.25])) == 20
    assert limit_exponent("w", sign * torch.tensor([0.0, 100.0, -0.25])) == 27


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_model_must_be_finite(wrong: float) -> None:
    with pytest.raises(ConfigError, match="must be finite floats"):
        limit_exponent("w", torch.tensor([0.0, wrong, 1.0]))
