"""What Subfleet asks of everything of its kind, asked of ours."""

from subfleet.testing import DatasetContract, FamilyContract, MethodContract
from subfleet.testing.rounds import ask, terms_with
from subfleet_example.plain_cnn import PlainCnn
from subfleet_example.steady import Steady


class TestSteady(MethodContract):
    method = Steady()

    def test_a_size_grows_by_one_step_a_round(self) -> None:
        terms = terms_with(self.method, self.model)
        sizes = [one.spec for one in terms.candidates]
        first = terms.roles.assigner.assign(ask(terms, "a")).candidate
        assert first is not None
        assert first.spec == sizes[1]
        second = terms.roles.assigner.assign(ask(terms, "a", round_number=2, previous=first.spec)).candidate
        assert second is not None
        assert second.spec == sizes[2]


class TestPlainCnn(FamilyContract):
    family = PlainCnn(input_shape=(2, 6, 5), class_count=3, width=4, blocks=3)


class TestRidges(DatasetContract):
    dataset = "ridges"
