"""A virtual fleet with devices that measure running statistics on their data with their training programs."""

from dataclasses import replace

import pytest
import torch
from emulation.batch_cases import LARGE_BYTES, MODEL, NESTED, client, experiment

from subfleet.arrays import decode_arrays
from subfleet.elastic.building import network_of
from subfleet.elastic.running_statistics import measure_moments, pool_statistics
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.methods import AnyMethod
from subfleet.tasks import Dataset, iter_batches
from subfleet.testing.submodels import have_same_bits

pytestmark = [pytest.mark.slow, pytest.mark.export]

NETWORK = network_of(replace(MODEL, norm="batch"))
HALF_BYTES = 2_070_000
"""Half of the model fits."""


def fleet(norms: str, method: AnyMethod | None = None) -> GatheredRun:
    base = experiment(model=NETWORK.config, norms=norms, rounds=1, method=method or NESTED)
    budgets = zip(("ada", "bob", "cyd"), (HALF_BYTES, LARGE_BYTES, LARGE_BYTES), strict=True)
    return replace(base, devices=tuple(client(name, index, free) for index, (name, free) in enumerate(budgets)))


def model_of(result: BatchResult) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in decode_arrays(result.model).items()}


def batches(gathered: GatheredRun, name: str, data: Dataset) -> list[torch.Tensor]:
    """The batches in the order of the client's trainer in round 2."""
    settings = gathered.run.training
    seed = gathered.run.seed
    order = iter_batches(len(data), settings.batch_size, seed=seed, round_number=2, client_id=name, epoch=0)
    return [torch.from_numpy(data.inputs[indices[mask > 0]]) for indices, mask in order]


def test_calibration_sets_the_statistics_of_all_devices_data_and_keeps_the_weights(exports: ExportPool) -> None:
    gathered = fleet("calibrated")
    before = model_of(run_batch(fleet("averaged"), exports))
    result = run_batch(gathered, exports)
    assert [record.calibrated for record in result.rounds] == [False, True]
    last = {row.client_id: row for row in result.rounds[-1].clients}
    assert {name: (row.architecture, row.status) for name, row in last.items()} == {
        "ada": ("w1/2 d1", "aggregated"),
        "bob": ("w1 d1", "aggregated"),
        "cyd": ("w1 d1", "aggregated"),
    }
    assert last["bob"].bytes_down < result.rounds[0].clients[1].bytes_down, "the program was cached"
    assert last["bob"].bytes_up < result.rounds[0].clients[1].bytes_up / 2, "sums are small"
    after = model_of(result)
    trained = {name: result.trained[name][2].architecture for name in last}
    measured = [
        (
            architecture,
            measure_moments(NETWORK, architecture, before, batches(gathered, device.client_id, device.data)),
        )
        for device in gathered.devices
        for architecture in [trained[device.client_id]]
    ]
    expected = pool_statistics(NETWORK, before, measured)
    assert set(expected) == {name for name, decl in NETWORK.tensors.items() if decl.role in ("mean", "variance")}
    for name, tensor in expected.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-5)
        assert not torch.equal(before[name], tensor)
    assert have_same_bits(*({name: state[name] for name in state if name not in expected} for state in (before, after)))
