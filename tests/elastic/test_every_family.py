"""Our families by the contract that families of other packages are tried by."""

import pytest
from elastic.elastic_cases import CONFIGS
from elastic.path_cases import PATHS
from elastic.token_cases import BERT, CLASSIFIER, DECODER, LSTM, VIT

from subfleet.elastic.families import FAMILIES
from subfleet.elastic.network import Family
from subfleet.protocol.training import ObjectiveSettings
from subfleet.testing import FamilyContract

pytestmark = [pytest.mark.slow, pytest.mark.export]

EVERY: tuple[Family, ...] = (*CONFIGS, VIT, BERT, CLASSIFIER, DECODER, LSTM, *PATHS)
PER_TOKEN = ("decoder", "lstm", "bert", "choice_rnn")


def test_every_family_of_ours_is_tried() -> None:
    assert {family.TYPE for family in EVERY} == set(FAMILIES)


class TestEveryFamily(FamilyContract):
    """All of them, with every kind of norm."""

    @pytest.fixture(params=EVERY, ids=lambda family: f"{family.TYPE} {family.norm}", autouse=True)
    def _one(self, request: pytest.FixtureRequest) -> None:
        self.family = request.param
        if self.family.TYPE in PER_TOKEN:
            self.objective = ObjectiveSettings(name="next_token")
