"""Devices for the tests of elastic networks: the CPU, and a GPU if there is one."""

from typing import cast

import pytest
import torch

_DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device of this machine. Without a GPU, tests for one are left out rather than skipped."""
    return torch.device(cast("str", request.param))
