"""Fixtures of the tests of the edge client."""

import pytest

from subfleet.device.trials import TrialResult
from subfleet.edge_client import doctor


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial of doctor succeeds without a child process; other tests cover the trials."""
    monkeypatch.setattr(doctor, "try_packages", lambda names: {name: TrialResult(text="9.9") for name in names})
    monkeypatch.setattr(doctor, "try_runtime", lambda name, provider: TrialResult(text=f"{name} for {provider}"))
