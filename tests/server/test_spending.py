"""What a run has spent by the end of each round."""

from collections.abc import Mapping
from typing import Any

from subfleet.reporting.spending import AXES, list_reached, sum_spent


def trained(joules: float | None, *, macs: int = 7) -> Mapping[str, Any]:
    return {"bytes_down": 10, "bytes_up": 5, "training_macs": macs, "training_joules": joules}


def rounds(*clients: tuple[Mapping[str, Any], ...]) -> list[Mapping[str, Any]]:
    return [{"accuracy": 0.3 * number, "seconds": 2.0, "clients": each} for number, each in enumerate(clients, start=1)]


def test_everything_adds_up_from_round_to_round() -> None:
    spent = list(sum_spent(rounds((trained(1.5), trained(2.0)), (trained(0.5),)), "accuracy"))
    assert [one.joules for one in spent] == [3.5, 4.0]
    assert [(one.rounds, one.seconds, one.bytes, one.macs) for one in spent] == [(1, 2.0, 30, 14), (2, 4.0, 45, 21)]
    last: dict[str, Any] = {axis: getattr(spent[1], axis) for axis in AXES}
    assert list_reached(spent, "accuracy") == [{"value": 0.5, **last}, {"value": 0.6, **last}]


def test_energy_is_unknown_once_a_device_that_trained_does_not_know_its_own() -> None:
    idle = trained(None, macs=0)
    spent = list(sum_spent(rounds((trained(1.0), idle), (trained(None), trained(1.0)), (trained(1.0),)), "accuracy"))
    assert [one.joules for one in spent] == [1.0, None, None]
