"""FedTrans: what a widened cell copies learns different things from then on."""

import pytest
import torch
from emulation.batch_cases import LARGE_BYTES, client, config, part
from safetensors.torch import load
from torch import Tensor

from subfleet.elastic.building import network_of
from subfleet.elastic.lineage import Replicated
from subfleet.elastic.model_state import ModelState, unpack_state
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.methods.fedtrans import FedTrans
from subfleet.methods.growth import Shares
from subfleet.protocol.training import TrainingSettings

pytestmark = pytest.mark.slow

BORN = 4
"""The round after which a second network grows: three falls of the loss, each over one round."""
CHILD = "m1"


def model_after(rounds: int, shares: Shares, exports: ExportPool) -> ModelState:
    """Of one run, whose first rounds are the same to the bit however many follow."""
    method = FedTrans(first="configured", gamma=3, delta=1, beta=1e9, stop_rounds=0, shares=shares)
    run = config(
        method=method,
        rounds=rounds,
        targets=("torch",),
        training=TrainingSettings(local_steps=10, batch_size=8, learning_rate=0.1),
    )
    devices = tuple(client(f"client-{place}", place, LARGE_BYTES, runtime="torch") for place in range(3))
    return unpack_state(load(run_batch(GatheredRun(run=run, devices=devices, evaluation=part(10)), exports).model))


def parted(shares: Shares, exports: ExportPool) -> float:
    """How far copies are from each other after ten rounds, as a fraction of how far they moved."""
    first, last = (model_after(rounds, shares, exports).of(CHILD) for rounds in (BORN, BORN + 10))
    assert first.lineage is not None
    assert isinstance(first.lineage.map, Replicated)
    network, apart, moved = network_of(first.lineage.config), list[Tensor](), list[Tensor]()
    for axis, source in first.lineage.map.sources:
        pairs = [(source.index(one), place) for place, one in enumerate(source) if source.index(one) < place]
        one, other = (torch.tensor(ends) for ends in zip(*pairs, strict=True))
        for name, decl in network.tensors.items():
            if decl.axes[0] == axis:
                then, now = first.shared[name], last.shared[name]
                assert torch.equal(then[one], then[other]), "they begin as copies"
                apart.append((now[one] - now[other]).flatten())
                moved.append((now - then)[other].flatten())
    return float(torch.cat(apart).norm() / torch.cat(moved).norm())


def test_copies_of_drawn_shares_part(exports: ExportPool) -> None:
    assert parted("drawn", exports) >= 0.1


@pytest.mark.long
def test_copies_of_equal_shares_never_part(exports: ExportPool) -> None:
    assert parted("equal", exports) < 1e-3
