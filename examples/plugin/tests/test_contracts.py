"""Subfleet's contract tests for the plugin's method, family and data set."""

from subfleet.testing import DatasetContract, FamilyContract, MethodContract
from subfleet.testing.rounds import make_assignee, make_context
from subfleet_example.plain_cnn import PlainCnn
from subfleet_example.steady import Steady


class TestSteady(MethodContract):
    method = Steady()

    def test_a_size_grows_by_one_step_a_round(self) -> None:
        context = make_context(self.method, self.model)
        sizes = [candidate.architecture for candidate in context.first.candidates]
        first = context.roles.assigner.assign(make_assignee(context, "a")).candidate
        assert first is not None
        assert first.architecture == sizes[1]
        second = context.roles.assigner.assign(
            make_assignee(context, "a", round_number=2, previous=first.architecture)
        ).candidate
        assert second is not None
        assert second.architecture == sizes[2]


class TestPlainCnn(FamilyContract):
    family = PlainCnn(input_shape=(2, 6, 5), class_count=3, width=4, blocks=3)


class TestRidges(DatasetContract):
    dataset = "ridges"
