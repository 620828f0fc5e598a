"""Our families by the contract that families of other packages are tried by."""

from collections.abc import Mapping

import pytest
from elastic.elastic_cases import CONFIGS
from elastic.path_cases import PATHS
from elastic.token_cases import BERT, CLASSIFIER, DECODER, LSTM, VIT

from subfleet.elastic.families import FAMILIES
from subfleet.elastic.families.records.plain import Fcn
from subfleet.elastic.network import Family, predicted_places
from subfleet.protocol.task_kinds import Objective
from subfleet.protocol.training import ObjectiveSettings
from subfleet.testing import FamilyContract

pytestmark = [pytest.mark.slow, pytest.mark.export]

OBJECTIVES: Mapping[str, Objective] = {"sample": "cross_entropy", "token": "next_token", "pixel": "dense_cross_entropy"}
FCN = Fcn(input_shape=(2, 5, 4), class_count=3, widths=(4, 6), depths=(2, 1), norm="batch", kernels=(3, 5))
PLAIN_FCN = Fcn(input_shape=(1, 4, 4), class_count=2, widths=(4, 3), depths=(2, 1), norm="none")
EVERY: tuple[Family, ...] = (*CONFIGS, FCN, PLAIN_FCN, VIT, BERT, CLASSIFIER, DECODER, LSTM, *PATHS)


def test_every_family_of_ours_is_tried() -> None:
    assert {family.TYPE for family in EVERY} == set(FAMILIES)


class TestEveryFamily(FamilyContract):
    """All of them, with every kind of norm."""

    @pytest.fixture(params=EVERY, ids=lambda family: f"{family.TYPE} {family.norm}", autouse=True)
    def _one(self, request: pytest.FixtureRequest) -> None:
        self.family = request.param
        self.objective = ObjectiveSettings(name=OBJECTIVES[predicted_places(self.family) or "sample"])
