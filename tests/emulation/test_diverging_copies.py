"""FedTrans: the copies of channels in a widened cell diverge in training."""

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
"""The round after which a second network grows: after three decreases of the loss, each over one round."""
CHILD = "m1"


def model_after(rounds: int, shares: Shares, exports: ExportPool) -> ModelState:
    """The model of a run with this many rounds; its first rounds have the same bits for every number of rounds."""
    method = FedTrans(first="configured", gamma=3, delta=1, beta=1e9, stop_rounds=0, shares=shares)
    run = config(
        method=method,
        rounds=rounds,
        targets=("torch",),
        training=TrainingSettings(local_steps=10, batch_size=8, learning_rate=0.1),
    )
    devices = tuple(client(f"client-{index}", index, LARGE_BYTES, runtime="torch") for index in range(3))
    return unpack_state(load(run_batch(GatheredRun(run=run, devices=devices, evaluation=part(10)), exports).model))


def measure_divergence(shares: Shares, exports: ExportPool) -> float:
    """The distance between copies after ten rounds, as a fraction of the distance that they moved."""
    first, last = (model_after(rounds, shares, exports).of(CHILD) for rounds in (BORN, BORN + 10))
    assert first.lineage is not None
    assert isinstance(first.lineage.map, Replicated)
    network, differences, movements = network_of(first.lineage.config), list[Tensor](), list[Tensor]()
    for axis, source in first.lineage.map.sources:
        pairs = [(source.index(origin), index) for index, origin in enumerate(source) if source.index(origin) < index]
        originals, copies = (torch.tensor(indices) for indices in zip(*pairs, strict=True))
        for name, decl in network.tensors.items():
            if decl.axes[0] == axis:
                old, new = first.shared[name], last.shared[name]
                assert torch.equal(old[originals], old[copies]), "they are equal at first"
                differences.append((new[originals] - new[copies]).flatten())
                movements.append((new - old)[copies].flatten())
    return float(torch.cat(differences).norm() / torch.cat(movements).norm())


@pytest.mark.long
def test_copies_with_drawn_fractions_diverge(exports: ExportPool) -> None:
    assert measure_divergence("drawn", exports) >= 0.1


@pytest.mark.long
def test_copies_with_equal_fractions_stay_equal(exports: ExportPool) -> None:
    assert measure_divergence("equal", exports) < 1e-3
