"""Devices that the tests of elastic networks run on: the CPU, and a GPU where there is one."""

from typing import cast

import pytest
import torch

_DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device of this machine; without a GPU there is no test for one, rather than one that is skipped."""
    return torch.device(cast("str", request.param))
