"""The most memory that a run lets its devices give to training."""

from pathlib import Path

import pytest
from server.coordinator_cases import context_of, profile, telemetry

from subfleet.protocol.errors import ConfigError
from subfleet.rounds.offers import build_client
from subfleet.rounds.state import RunState
from subfleet.settings.fleet import MemoryLimits
from subfleet.settings.reading import read_run

OFFERED_BYTES = 1_000_000_000


@pytest.mark.parametrize(
    ("limits", "budget_bytes"),
    [
        (MemoryLimits(), OFFERED_BYTES),
        (MemoryLimits(every_device="300M"), 300_000_000),
        (MemoryLimits(every_device="2G"), OFFERED_BYTES),
        (MemoryLimits(every_device="300M", devices={"fake": "500M"}), 500_000_000),
        (MemoryLimits(every_device="300M", devices={"other": "500M"}, clients={"bob": "1M"}), 300_000_000),
        (MemoryLimits(every_device="300M", devices={"fake": "500M"}, clients={"ada": "200Mi"}), 200 * 2**20),
    ],
)
def test_the_closest_limit_bounds_what_a_device_offers(limits: MemoryLimits, budget_bytes: int) -> None:
    context = context_of(memory_limits=limits)
    client = build_client(context, RunState(), profile("ada"), telemetry(context, "ada", memory_bytes=OFFERED_BYTES))
    assert client.offer.budget is not None
    assert (client.offer.budget.memory_bytes, client.offer.memory_budget_bytes) == (budget_bytes, budget_bytes)
    assert client.offer.memory_free_bytes == OFFERED_BYTES


def test_a_run_is_resumed_only_with_the_same_limits() -> None:
    plain, limited = context_of().config, context_of(memory_limits=MemoryLimits(every_device="1G")).config
    assert plain.fingerprint() != limited.fingerprint()


FILE = """
name = "digits"
data.test = "digits:test"

[model]
family = "mlp"
input_shape = [1, 8, 8]
class_count = 10
widths = [8]
depths = [1]

[memory_limits]
every_device = "1G"
devices = { raspberry_pi_4 = "300M" }
clients = { "pi-7" = "150Mi" }
"""


def test_a_file_sets_the_limits(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE, encoding="utf-8")
    limits = read_run(path).memory_limits
    assert limits == MemoryLimits(every_device="1G", devices={"raspberry_pi_4": "300M"}, clients={"pi-7": "150Mi"})
    path.write_text(FILE.replace("300M", "300MB").replace("1G", "all"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_run(path)
    assert "memory_limits.every_device is 'all', but must be a size such as 300M" in str(caught.value)
    assert "memory_limits.devices.raspberry_pi_4 is '300MB', but must be" in str(caught.value)
