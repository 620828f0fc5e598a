"""Our families fulfil the contract for families."""

import pytest
from elastic.elastic_cases import CONFIGS, DENSE, objective_of
from elastic.path_cases import PATHS
from elastic.recorded_cases import record_case
from elastic.token_cases import BERT, CLASSIFIER, DECODER, LSTM, VIT

from subfleet.elastic.families import FAMILIES
from subfleet.elastic.network import Family
from subfleet.testing import FamilyContract

pytestmark = [pytest.mark.slow, pytest.mark.export]

RECORDED = ("branches", "residual", "tokens", "dense", "shuffled")
"""Modules that are recorded when a test needs them."""
EVERY: tuple[Family | str, ...] = (
    *CONFIGS, *DENSE.values(), VIT, BERT, CLASSIFIER, DECODER, LSTM, *PATHS, *RECORDED,
)  # fmt: skip


def _name(family: Family | str) -> str:
    return f"recorded {family}" if isinstance(family, str) else f"{family.TYPE} {family.norm}"


PROGRAMS = [
    pytest.param(
        family,
        target,
        marks=() if target == "onnx" and family in (*DENSE.values(), *PATHS) else pytest.mark.long,
        id=f"{_name(family)}-{target}",
    )
    for target in ("onnx", "executorch")
    for family in EVERY
]


def test_every_family_of_ours_is_tried() -> None:
    assert {family.TYPE for family in EVERY if not isinstance(family, str)} | {"recorded"} == set(FAMILIES)


class TestEveryFamily(FamilyContract):
    """All families, with every kind of norm."""

    @pytest.fixture(params=EVERY, ids=_name, autouse=True)
    def _choose_family(self, request: pytest.FixtureRequest) -> None:
        self.family = record_case(request.param) if isinstance(request.param, str) else request.param
        self.objective = objective_of(self.family)

    @pytest.mark.parametrize(("_choose_family", "target"), PROGRAMS, indirect=["_choose_family"])
    def test_a_small_submodels_program_is_written_and_verified(self, target: str) -> None:
        """Submodels of the other families train in `test_family_programs.py` and `test_token_family_programs.py`."""
        super().test_a_small_submodels_program_is_written_and_verified(target)
