"""The check of methods accepts a correct method, and reports the fault of a wrong one."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from matrices import mostly_long
from torch import Tensor

from subfleet.elastic.accumulator import Accumulator
from subfleet.elastic.model_state import ModelState
from subfleet.emulation import method_checks
from subfleet.emulation.method_checks import check_method, check_methods, find_accepted_norms
from subfleet.export.pool import ExportPool
from subfleet.export.requests import AnyRequest, TrainRequest
from subfleet.link.traffic import Traffic
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.aggregator import AggregationContext, keep_aggregate
from subfleet.methods.assigner import Assignment, AssignmentContext, assign_largest
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.roles import Roles
from subfleet.methods.techniques import NormPolicy
from subfleet.methods.tier_search import TierSearch
from subfleet.protocol.errors import ConfigError
from subfleet.search.supernets import EvolutionSettings
from subfleet.testing.rounds import with_steps

pytestmark = [pytest.mark.slow, pytest.mark.export]

METHOD = HeteroFL()


def _replace_steps(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Replace these steps of HeteroFL."""
    original = HeteroFL.roles

    def roles(self: HeteroFL) -> Roles:
        return with_steps(original(self), **changes)

    monkeypatch.setattr(HeteroFL, "roles", roles)


NORMS = ("averaged", "bank", "recalibrated", "calibrated")


def test_a_method_is_checked_with_every_policy_of_norms(monkeypatch: pytest.MonkeyPatch, exports: ExportPool) -> None:
    def verdict(method: AnyMethod, _: ExportPool, norms: NormPolicy) -> str:
        return f"{method.TYPE} with {norms}"

    monkeypatch.setattr(method_checks, "check_method", verdict)
    verdicts = list(check_methods(exports, {"fedavg": FedAvg}))
    assert verdicts == [("fedavg", norms, f"fedavg with {norms}") for norms in NORMS]


@pytest.mark.parametrize("norms", mostly_long(NORMS, "calibrated"))
def test_a_method_that_works_is_ok(norms: NormPolicy, exports: ExportPool) -> None:
    """Other tests check two more policies, "averaged" and "bank"."""
    assert check_method(FedAvg(), exports, norms) == "ok"


@pytest.mark.long
@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        (4, "the supernet was trained, but never searched"),
        (3, "the search found ['t1', 't2'], but no client trained any of them"),
    ],
)
def test_a_search_without_a_result_is_reported(rounds: int, message: str, exports: ExportPool) -> None:
    search = TierSearch(evolution=EvolutionSettings(evaluations=2, population=2, offspring=1))
    assert check_method(FedorAS(supernet_rounds=rounds, tiers=2, search=search), exports) == message


def test_a_check_runs_on_every_runtime_of_the_method(monkeypatch: pytest.MonkeyPatch, exports: ExportPool) -> None:
    targets, submit = set[str](), ExportPool.submit

    def record(self: ExportPool, request: AnyRequest, **options: Any) -> "Future[Path]":
        if isinstance(request, TrainRequest):
            targets.add(request.target)
        return submit(self, request, **options)

    monkeypatch.setattr(ExportPool, "submit", record)
    assert check_method(METHOD, exports) == "ok"
    assert targets == set(METHOD.INFO.runtimes)


def test_the_checks_cover_the_policies_of_norms_that_a_method_accepts() -> None:
    accepted = {name: find_accepted_norms(kind()) for name, kind in METHODS.items()}
    uncovered = {name: set(get_args(NormPolicy)) - set(norms) for name, norms in accepted.items()}
    assert {name: norms for name, norms in uncovered.items() if norms} == {
        "fedoras": {"calibrated"},
        "fjord": {"calibrated"},
        "dynamic_selection": {"bank"},
    }


def test_a_change_of_an_untrained_element_in_a_copy_is_reported(
    monkeypatch: pytest.MonkeyPatch, exports: ExportPool
) -> None:
    def change_last(context: AggregationContext) -> ModelState:
        """Change the last channel of each size's norms, which few sizes hold, a little."""
        return replace(
            context.after, copies={key: _change_last_channel(norms) for key, norms in context.after.copies.items()}
        )

    _replace_steps(monkeypatch, after_round=change_last)
    monkeypatch.setattr(method_checks, "keep_aggregate", change_last)
    assert check_method(METHOD, exports, "bank").endswith("changed where no client trained it")
    _replace_steps(monkeypatch, after_round=keep_aggregate)
    assert check_method(METHOD, exports, "bank") == "ok"


def _change_last_channel(norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([tensor[:-1], tensor[-1:] + 1e-4]) for name, tensor in norms.items()}


def test_a_zeroed_untrained_element_is_reported(monkeypatch: pytest.MonkeyPatch, exports: ExportPool) -> None:
    finish = Accumulator.finish

    def zero_untrained(self: Accumulator) -> dict[str, Tensor]:
        held = self.find_held()
        return {name: torch.where(held[name], tensor, 0.0) for name, tensor in finish(self).items()}

    monkeypatch.setattr(Accumulator, "finish", zero_untrained)
    assert check_method(METHOD, exports) == "tensor 'stem.weight' changed where no client trained it"


@pytest.mark.parametrize("norms", mostly_long(["averaged", "recalibrated"], "averaged"))
def test_a_loss_that_does_not_fall_is_reported(
    norms: NormPolicy, monkeypatch: pytest.MonkeyPatch, exports: ExportPool
) -> None:
    """A decrease that is only due to running statistics does not count."""
    _replace_steps(monkeypatch, for_round=lambda settings, _: replace(settings, learning_rate=0.0))
    verdict = check_method(METHOD, exports, norms)
    before, after = verdict.removeprefix("the loss does not fall: ").split(" before round 1 and ")
    number, words = after.split(" ", 1)
    assert words == "after round 3"
    # The loss before is the lower of two ways to set the statistics.
    assert number == before if norms == "averaged" else float(number) >= float(before)


def _assign_last(context: AssignmentContext) -> Assignment:
    return Assignment(candidate=context.candidates[-1])


def _skip_one(context: AssignmentContext) -> Assignment:
    return Assignment(candidate=None) if context.draw.client_id == "client2" else assign_largest(context)


@pytest.mark.parametrize(
    ("assign", "message"),
    [
        (_assign_last, "client client0 exceeded its budget"),
        (_skip_one, "client client2 did not take part: skipped"),
    ],
)
def test_a_wrong_assignment_is_reported(
    assign: Callable[[AssignmentContext], Assignment],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    exports: ExportPool,
) -> None:
    _replace_steps(monkeypatch, assign=assign)
    assert check_method(METHOD, exports).startswith(message)


def test_bytes_that_are_not_counted_are_reported(monkeypatch: pytest.MonkeyPatch, exports: ExportPool) -> None:
    count = Traffic.count

    def count_sent(self: Traffic, client_id: str, direction: Any, size_bytes: int) -> None:
        if direction == "sent":
            count(self, client_id, direction, size_bytes)

    monkeypatch.setattr(Traffic, "count", count_sent)
    verdict = check_method(METHOD, exports)
    assert verdict.startswith("client client0 moved ")
    assert verdict.endswith(" and 0 bytes, less than its weights")


def test_the_error_of_a_method_is_reported(monkeypatch: pytest.MonkeyPatch, exports: ExportPool) -> None:
    _replace_steps(monkeypatch, space=lambda network, rates: ())
    assert check_method(METHOD, exports).startswith("the method's space of submodels is empty")

    def raise_error(context: AssignmentContext) -> Assignment:
        raise ConfigError("nothing can be chosen")

    _replace_steps(monkeypatch, space=lambda network, rates: (network.full_architecture(),), assign=raise_error)
    assert check_method(METHOD, exports) == "nothing can be chosen"
