"""`subfleet-edge join --held-out` describes the held-out data when a device joins."""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from subfleet.agent.states import AgentSettings
from subfleet.edge_client import joining
from subfleet.edge_client.device_options import DeviceOptions
from subfleet.edge_client.joining import JoinOptions
from subfleet.protocol.errors import ConfigError
from subfleet.tasks import read_dataset
from subfleet.transport.address import BrokerOptions

NOBODY = "mqtt://127.0.0.1:1"


@pytest.mark.slow
@pytest.mark.parametrize(("held_out_count", "larger"), [(4, "data"), (60, "held out")])
def test_join_tells_how_many_samples_are_held_out_and_counts_the_larger_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held_out_count: int, larger: str
) -> None:
    captured: dict[str, Any] = {}

    def begin(settings: AgentSettings, *_: object) -> NoReturn:
        captured["settings"] = settings
        raise ConfigError("far enough")

    data, held_out = (str(tmp_path / name) for name in ("data.npz", "held_out.npz"))
    for path, count in ((data, 6), (held_out, held_out_count)):
        np.savez(path, x=np.zeros((count, 1, 2, 2), np.float32), y=np.arange(count) % 3)
    monkeypatch.setattr(joining, "EdgeSession", begin)
    options = JoinOptions(
        broker=BrokerOptions(url=NOBODY), data=data, held_out=held_out, device=DeviceOptions(state=tmp_path / "s")
    )
    with pytest.raises(ConfigError, match="far enough"):
        joining.join(options)
    settings = captured["settings"]
    assert (settings.profile.sample_count, settings.profile.held_out_count) == (6, held_out_count)
    sizes = {
        "data": read_dataset(data).summary().data_bytes,
        "held out": read_dataset(held_out).summary().data_bytes,
    }
    assert settings.data_bytes == sizes[larger] == max(sizes.values())
