"""The contracts fail for methods, families and data sets that break a promise."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import Network
from subfleet.methods.aggregator import AggregationContext, Aggregator, ClientUpdate, Replacement
from subfleet.methods.assigner import Assigner, Assignment, AssignmentContext, Draw
from subfleet.methods.describing import MethodInfo
from subfleet.methods.roles import Roles
from subfleet.protocol.submodel import Architecture
from subfleet.tasks import Dataset
from subfleet.tasks.named_dataset import NamedDataset, TrainTest
from subfleet.testing import DatasetContract, FamilyContract, MethodContract

CALLS: list[int] = []


def _assign_any_size(context: AssignmentContext) -> Assignment:
    return Assignment(candidate=context.candidates[-1])


def _assign_by_chance(context: AssignmentContext) -> Assignment:
    fitting = [candidate for candidate in context.candidates if context.allows(candidate)]
    return Assignment(candidate=random.choice(fitting) if fitting else None)


def _assign_by_call_count(context: AssignmentContext) -> Assignment:
    CALLS.append(1)
    fitting = [candidate for candidate in context.candidates if context.allows(candidate)]
    return Assignment(candidate=fitting[len(CALLS) % len(fitting)] if fitting else None)


def _place_wider(network: Network, size: Architecture, draw: Draw) -> Architecture:
    return network.full_architecture()


def _decay(context: AggregationContext) -> ModelState:
    return context.after.map_tensors(lambda tensors: {name: 0.9 * tensor for name, tensor in tensors.items()})


def _replace_everywhere(
    network: Network, state: Mapping[str, Tensor], trained: Sequence[ClientUpdate]
) -> list[Replacement]:
    full = network.full_architecture()
    return [
        Replacement(architecture=full, change={name: torch.ones(shape) for name, shape in network.shapes(full).items()})
        for _ in trained
    ]


ROLES: dict[str, Roles] = {
    "sound": Roles(),
    "any size": Roles(assigner=Assigner(assign=_assign_any_size)),
    "by chance": Roles(assigner=Assigner(assign=_assign_by_chance)),
    "by memory": Roles(assigner=Assigner(assign=_assign_by_call_count)),
    "wider": Roles(assigner=Assigner(place=_place_wider)),
    "decayed": Roles(aggregator=Aggregator(after_round=_decay)),
    "everywhere": Roles(aggregator=Aggregator(transform=_replace_everywhere)),
    "bad departures": Roles(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    TYPE: ClassVar[str] = "tried"
    INFO: ClassVar[MethodInfo] = MethodInfo(
        title="Tried", paper="a test", departures={"Wrong.": lambda method, setting: method.kind == "bad departures"}
    )
    kind: str = "sound"

    def roles(self) -> Roles:
        return ROLES[self.kind]


def method_contract(kind: str) -> MethodContract:
    contract = MethodContract()
    contract.method = Tried(kind=kind)
    return contract


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        ("any size", MethodContract.test_assigned_submodels_fit_the_budget),
        ("by chance", MethodContract.test_roles_are_pure),
        ("by memory", MethodContract.test_roles_are_pure),
        ("wider", MethodContract.test_placed_submodels_keep_their_size),
        ("bad departures", MethodContract.test_departures_are_sentences),
    ],
)
def test_a_method_that_breaks_a_promise_fails(kind: str, test: Callable[[MethodContract], None]) -> None:
    test(method_contract("sound"))
    with pytest.raises(AssertionError):
        test(method_contract(kind))


@pytest.mark.slow
def test_a_method_that_moves_untrained_elements_fails(tmp_path: Path) -> None:
    method_contract("sound").test_a_round_with_learning_rate_0_changes_nothing(tmp_path)
    with pytest.raises(AssertionError):
        method_contract("decayed").test_a_round_with_learning_rate_0_changes_nothing(tmp_path)


@pytest.mark.slow
def test_a_method_that_moves_elements_without_a_holder_fails(tmp_path: Path) -> None:
    method_contract("sound").test_elements_that_no_client_has_keep_their_bits(tmp_path)
    with pytest.raises(AssertionError, match="changed where no client has it"):
        method_contract("everywhere").test_elements_that_no_client_has_keep_their_bits(tmp_path)


class _Logarithms(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def _make_mlp(class_count: int, *ends: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, class_count), *ends)


BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "sound": _make_mlp,
    "more classes": lambda class_count: _make_mlp(class_count + 2),
    "infinite": lambda class_count: _make_mlp(class_count, nn.ReLU(), _Logarithms()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Little:
    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "little"
    norm: ClassVar[Literal["none"]] = "none"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: tuple[int, ...] = (3,)
    class_count: int = 2
    kind: str = "sound"
    note: float = field(default=0.0, compare=False)

    def module(self) -> nn.Module:
        return BUILDERS[self.kind](self.class_count)


def family_contract(kind: str) -> FamilyContract:
    contract = FamilyContract()
    contract.family = Little(kind=kind)
    return contract


def test_a_family_that_keeps_its_promises_passes() -> None:
    for test in (
        FamilyContract.test_it_is_a_record_that_survives_json,
        FamilyContract.test_the_declaration_has_the_shapes_of_the_whole_module,
        FamilyContract.test_every_submodels_module_has_exactly_the_shapes_of_its_maps,
        FamilyContract.test_extract_after_scatter_is_the_identity,
        FamilyContract.test_first_weights_are_those_of_the_seed,
    ):
        test(family_contract("sound"))


@pytest.mark.parametrize(("kind", "reason"), [("more classes", "outputs have shape"), ("infinite", "not finite")])
def test_a_family_with_wrong_outputs_fails(kind: str, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        family_contract(kind).test_every_submodels_module_has_exactly_the_shapes_of_its_maps()


@pytest.mark.slow
def test_a_family_whose_settings_load_torch_fails() -> None:
    with pytest.raises(AssertionError, match="torch"):
        family_contract("sound").test_reading_its_settings_loads_no_torch()


def _read(generator: np.random.Generator, shape: tuple[int, ...], classes: int) -> TrainTest:
    def part() -> Dataset:
        inputs = generator.random((12, *shape), np.float32)
        return Dataset(inputs=inputs, labels=np.arange(12) % classes)

    return TrainTest(train=part(), test=part())


def data_contract(**changes: Any) -> DatasetContract:
    def read(paths: object) -> TrainTest:
        return _read(np.random.default_rng(0), (2,), 3)

    task = NamedDataset(
        name="drawn", summary="drawn numbers", files=(), read=read, input_shape=(2,), class_count=3,
        objective="cross_entropy", licence="none", source="Drawn here.",
    )  # fmt: skip
    contract = DatasetContract()
    contract.dataset = replace(task, **changes)
    return contract


def test_a_data_set_that_contradicts_its_description_fails() -> None:
    sound = data_contract()
    sound.test_it_says_what_it_is()
    sound.test_both_parts_are_what_it_says()
    sound.test_it_is_the_same_every_time()
    with pytest.raises(AssertionError, match="licence"):
        data_contract(licence="").test_it_says_what_it_is()
    with pytest.raises(AssertionError, match="letters, digits and underscores"):
        data_contract(name="drawn numbers").test_it_says_what_it_is()
    with pytest.raises(AssertionError, match="owners"):
        data_contract(owner="writer").test_both_parts_are_what_it_says()
    generator = np.random.default_rng(0)
    with pytest.raises(AssertionError, match="second time"):
        data_contract(read=lambda paths: _read(generator, (2,), 3)).test_it_is_the_same_every_time()
