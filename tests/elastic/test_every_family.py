"""Our families by the contract that families of other packages are tried by."""

import pytest
from elastic.elastic_cases import CONFIGS, DENSE, objective_of
from elastic.path_cases import PATHS
from elastic.token_cases import BERT, CLASSIFIER, DECODER, LSTM, VIT
from matrices import mostly_long

from subfleet.elastic.families import FAMILIES
from subfleet.elastic.network import Family
from subfleet.testing import FamilyContract

pytestmark = [pytest.mark.slow, pytest.mark.export]

EVERY: tuple[Family, ...] = (*CONFIGS, *DENSE.values(), VIT, BERT, CLASSIFIER, DECODER, LSTM, *PATHS)


def test_every_family_of_ours_is_tried() -> None:
    assert {family.TYPE for family in EVERY} == set(FAMILIES)


class TestEveryFamily(FamilyContract):
    """All of them, with every kind of norm."""

    @pytest.fixture(params=EVERY, ids=lambda family: f"{family.TYPE} {family.norm}", autouse=True)
    def _one(self, request: pytest.FixtureRequest) -> None:
        self.family = request.param
        self.objective = objective_of(self.family)

    @pytest.mark.parametrize("target", mostly_long(["onnx", "executorch"], "onnx"))
    def test_a_small_submodels_program_is_written_and_verified(self, target: str) -> None:
        """On ExecuTorch `test_family_programs.py` trains a submodel of each kind of family."""
        super().test_a_small_submodels_program_is_written_and_verified(target)
