"""Fixtures of the tests of the edge client."""

from pathlib import Path

import pytest
from edge_client.worker_rig import make_workplace

from subfleet.device.trials import TrialResult
from subfleet.edge_client import doctor
from subfleet.edge_client.worker_messages import Workplace


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial of doctor succeeds without a child process; other tests cover the trials."""
    monkeypatch.setattr(doctor, "try_packages", lambda names: {name: TrialResult(text="9.9") for name in names})
    monkeypatch.setattr(doctor, "try_runtime", lambda name, provider: TrialResult(text=f"{name} for {provider}"))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    return make_workplace(tmp_path, monkeypatch)
