"""A device that sends its update times 10^6 does not affect the others in a run."""

from dataclasses import replace
from typing import Any

import pytest
from emulation.batch_cases import LARGE_BYTES, client, experiment

from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.settings.fleet import LabelShuffling
from subfleet.settings.sections import OutlierSettings

pytestmark = pytest.mark.slow

ATTACK = LabelShuffling(strength=1e6)


def fleet(*, attacked: bool, honest: int, **changes: Any) -> GatheredRun:
    """Honest clients and perhaps eve; they run the training step from which programs are exported."""
    names = ("ada", "bob", "cyd")[:honest]
    clients = [client(name, index, LARGE_BYTES, runtime="torch") for index, name in enumerate(names)]
    if attacked:
        clients.append(replace(client("eve", 3, LARGE_BYTES, runtime="torch"), attack=ATTACK))
    base = experiment(rounds=3, min_clients=honest, targets=("torch",), **changes)
    return replace(base, devices=tuple(clients))


def statuses(result: BatchResult) -> list[str]:
    return [row.status for record in result.rounds for row in record.clients if row.client_id == "eve"]


@pytest.mark.parametrize("honest", [3, 2])
def test_with_exclusion_a_run_has_the_model_of_the_honest_clients(honest: int, exports: ExportPool) -> None:
    excluding = OutlierSettings(outliers="exclude")
    alone = run_batch(fleet(attacked=False, honest=honest), exports)
    attacked = run_batch(fleet(attacked=True, honest=honest, outliers=excluding), exports)
    assert attacked.model == alone.model
    assert attacked.rounds[-1].accuracy == alone.rounds[-1].accuracy
    assert (alone.rounds[-1].accuracy or 0) > 0.3
    assert [status.split(":")[0] for status in statuses(attacked)] == ["refused", "skipped", "skipped"]


def test_with_scaling_a_run_loses_little_accuracy(exports: ExportPool) -> None:
    """By default, a fleet with an attacker has outlier detection."""
    alone = run_batch(fleet(attacked=False, honest=3), exports)
    attacked = run_batch(fleet(attacked=True, honest=3), exports)
    assert (attacked.rounds[-1].accuracy or 0) >= (alone.rounds[-1].accuracy or 1) - 0.02
    assert set(statuses(attacked)) == {"aggregated"}
    assert attacked.result.method_status.endswith("updates scaled down: eve in 3 (of 3 rounds)")


def test_without_outlier_detection_the_attack_succeeds(exports: ExportPool) -> None:
    """The effect of the attack without outlier detection."""
    off = OutlierSettings(outliers="off")
    spoiled = run_batch(fleet(attacked=True, honest=3, outliers=off), exports)
    assert statuses(spoiled)[0] == "aggregated"
    loss = spoiled.rounds[0].loss
    assert loss is not None
    assert loss > 1000
