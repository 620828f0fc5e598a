"""The fleets of the FedorAS runs: devices of each speed have the budget of their tier."""

from pathlib import Path

import pytest

from subfleet.device_profiles import load_profile
from subfleet.elastic.building import network_of
from subfleet.lab import load_all
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.tier_search import list_network_tiers
from subfleet.search.candidates import limit_forward_macs
from subfleet.search.supernets import find_tier

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/fedoras"


@pytest.mark.parametrize("name", ["cifar10", "speech", "shakespeare"])
def test_each_speed_reaches_the_bound_of_its_tier(name: str) -> None:
    run = load_all(FOLDER / f"{name}.toml")[0]
    assert isinstance(run.method, FedorAS)
    tiers = list_network_tiers(network_of(run.model), run.method.tiers)
    for number, speed in enumerate(("slow", "middle", "fast"), start=1):
        pace = load_profile(str(FOLDER / f"{speed}.toml")).macs_per_s
        budget = limit_forward_macs(pace, run.batch_s, run.training.batch_size)
        assert budget is not None
        tier = find_tier(tiers, budget)
        assert (tier.number, budget >= tier.high_macs) == (number, True)
        assert run.training_s == 0, "with it, a device with many samples would have less"
    assert run.rounds == run.method.supernet_rounds + run.method.tiers * run.method.tuning_rounds
