"""Mismatched data: reported or refused before training, from the input statistics of the devices."""

import re
from dataclasses import replace
from typing import Any

import pytest
from server.coordinator_cases import CLIENTS, context_of, measuring, profile, telemetry
from server.fake_device import SHAPE

from subfleet.agent.states import AgentSettings
from subfleet.elastic.families.records.recurrent import Lstm
from subfleet.protocol.input_statistics import InputStatistics
from subfleet.protocol.messages import Profile
from subfleet.protocol.training import ObjectiveSettings, TrainingSettings
from subfleet.protocol.transform import DataTransform
from subfleet.rounds.announcing import build_round_info
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import step
from subfleet.rounds.offers import find_samples_problem, find_scale_warning
from subfleet.rounds.signals import Event
from subfleet.rounds.state import RunState
from subfleet.serving.narration import compare_peers, describe_step
from subfleet.settings.rules import find_transform_problem
from subfleet.settings.samples import DataCheck, DataSettings

SHARES = InputStatistics(kind="numbers", minimum=0.0, maximum=1.0, mean=0.3, deviation=0.31)
BYTES = InputStatistics(kind="numbers", minimum=0.0, maximum=255.0, mean=73.0, deviation=79.0)
STANDARD = InputStatistics(kind="numbers", minimum=-0.8, maximum=1.9, mean=0.0, deviation=1.0)
TEST = "server.server_rig:evaluation"


def context_with(check: DataCheck = "warn", evaluation: InputStatistics | None = SHARES) -> RunContext:
    context = context_of(data=DataSettings(test=TEST, check=check), rounds=1)
    return replace(context, evaluation_inputs=evaluation)


def profile_with(name: str, inputs: InputStatistics | None = SHARES, **changes: Any) -> Profile:
    return replace(profile(name), inputs=inputs, **changes)


def measure_round(context: RunContext, odd: InputStatistics | None) -> tuple[RunState, list[str]]:
    """Return the state after every client has reported its data, and the messages; "bob" is the odd one."""
    state, messages = measuring(context), list[str]()
    events: list[Event] = [profile_with(name, odd if name == "bob" else SHARES) for name in CLIENTS]
    events += [telemetry(context, name) for name in CLIENTS]
    for event in events:
        before = state
        state, _ = step(context, state, event, 2.0)
        messages += describe_step(context, before, state)
    return state, messages


@pytest.mark.parametrize("odd", [BYTES, STANDARD])
def test_a_device_on_another_scale_is_reported_and_takes_part(odd: InputStatistics) -> None:
    state, messages = measure_round(context_with(), odd)
    warning = next(text for text in messages if text.startswith("client bob: its inputs range from"))
    assert str(odd) in warning
    assert str(SHARES) in warning
    assert not any(name in text for text in messages for name in ("ada: its", "cyd: its"))
    assert {name: client.stage for name, client in state.clients.items()} == dict.fromkeys(CLIENTS, "preparing")
    assert {name for name, client in state.clients.items() if client.offer.data_warning} == {"bob"}


def test_a_device_on_another_scale_is_refused_before_it_is_trained() -> None:
    state, _ = measure_round(context_with("refuse"), BYTES)
    assert {name: client.stage for name, client in state.clients.items()} == {
        "ada": "preparing",
        "bob": "skipped",
        "cyd": "preparing",
    }
    assert "a deviation 255 times as large; scale them alike" in state.clients["bob"].reason


@pytest.mark.parametrize(
    ("check", "evaluation", "inputs"),
    [("off", SHARES, BYTES), ("refuse", None, BYTES), ("refuse", SHARES, None), ("refuse", BYTES, BYTES)],
)
def test_nothing_is_reported_if_the_check_is_off_or_nothing_is_odd(
    check: DataCheck, evaluation: InputStatistics | None, inputs: InputStatistics | None
) -> None:
    assert not find_scale_warning(context_with(check, evaluation), profile_with("ada", inputs))


def test_where_most_devices_differ_the_evaluation_data_are_named() -> None:
    profiles = {name: profile_with(name) for name in CLIENTS}
    (text,) = compare_peers(context_with(evaluation=BYTES), profiles)
    assert text.startswith(f"the evaluation data range from {BYTES}, unlike the inputs of most of the 3 clients")


def test_a_device_that_is_odd_among_all_others_is_named_beside_odd_evaluation_data() -> None:
    profiles = {name: profile_with(name) for name in CLIENTS} | {"dan": profile_with("dan", BYTES)}
    messages = list(compare_peers(context_with(evaluation=BYTES), profiles))
    assert len(messages) == 2
    assert messages[1].startswith("the inputs of dan differ in scale from those of most of the 4 clients")
    assert not list(compare_peers(context_with(), {name: profile_with(name) for name in CLIENTS}))
    assert not list(compare_peers(context_with("off", BYTES), profiles))


TRANSFORM = DataTransform(resize=(3, 2), channels=1)


@pytest.mark.parametrize(
    ("transform", "changes", "problem"),
    [
        (None, {}, ""),
        (None, {"sizes_differ": True}, "its images differ in size, and the run does not resize them; set resize"),
        (TRANSFORM, {"input_shape": (3, 40, 30), "sizes_differ": True}, ""),
        (TRANSFORM, {"input_shape": (6,)}, r"its samples cannot be transformed by .* \(6,\) are not pictures"),
        (None, {"input_shape": (7,)}, "its samples have shape"),
        (
            None,
            {"inputs": InputStatistics(kind="indices", minimum=0, maximum=5, mean=2, deviation=1)},
            "its samples are indices, but the model takes numbers",
        ),
    ],
)
def test_samples_that_no_training_could_read_are_refused_when_a_device_joins(
    transform: DataTransform | None, changes: dict[str, Any], problem: str
) -> None:
    assert SHAPE == (6,)
    config = context_of(data=DataSettings(test=TEST, transform=transform)).config
    message = find_samples_problem(config, replace(profile_with("ada"), **changes))
    assert re.match(problem, message) if problem else message == ""


def test_symbols_beyond_the_vocabulary_are_refused_when_a_device_joins() -> None:
    vocabulary = 40
    model = Lstm(input_shape=(6,), class_count=vocabulary, vocabulary=vocabulary, widths=(8,), depths=(1,))
    training = TrainingSettings(objective=ObjectiveSettings(name="next_token"))
    config = replace(context_of().config, model=model, training=training)

    def find_problem(kind: str, maximum: float) -> str:
        inputs = InputStatistics(kind=kind, minimum=0, maximum=maximum, mean=1, deviation=1)  # type: ignore[arg-type]
        return find_samples_problem(config, profile_with("ada", inputs, input_shape=model.input_shape))

    assert find_problem("indices", vocabulary - 1) == ""
    assert f"go up to {vocabulary}, but the model takes indices below {vocabulary}" in find_problem(
        "indices", vocabulary
    )
    assert find_problem("numbers", 2) == "its samples are numbers, but the model takes indices"


def test_devices_learn_the_size_of_a_transformed_sample() -> None:
    for transform, expected in ((None, 0), (DataTransform(mean=(0.5,), deviation=(1.0,)), 0), (TRANSFORM, 24)):
        context = context_of(data=DataSettings(test=TEST, transform=transform))
        info = build_round_info(context, measuring(context), 1.0)
        assert info is not None
        assert info.sample_bytes == expected


@pytest.mark.parametrize(
    ("transform", "input_shape", "problem"),
    [
        (DataTransform(resize=(40,), crop=(32,)), (3, 32, 32), ""),
        (DataTransform(resize=(40,)), (3, 32, 32), ""),  # the size depends on each picture
        (DataTransform(crop=(8,)), (64,), ""),
        (DataTransform(crop=(8,)), (3, 32, 32), "data.transform makes samples that have shape"),
        (DataTransform(channels=1, resize=(32, 32)), (3, 32, 32), "change resize, crop or channels"),
    ],
)
def test_a_transform_that_makes_no_sample_of_the_model_is_refused_with_the_file(
    transform: DataTransform, input_shape: tuple[int, ...], problem: str
) -> None:
    message = find_transform_problem(transform, input_shape)
    assert problem in message if problem else message == ""


def test_inputs_are_not_scaled_twice() -> None:
    with pytest.raises(ValueError, match=r"standardise and transform\.mean are both set"):
        DataSettings(test=TEST, standardise=True, transform=DataTransform(mean=(0.5,), deviation=(1.0,)))


def test_a_board_with_large_pictures_keeps_its_budget_where_they_are_made_small() -> None:
    context = context_of(data=DataSettings(test=TEST, transform=TRANSFORM))
    info = build_round_info(context, measuring(context), 1.0)
    for streams, expected in ((True, 10 * 32), (False, 10 * 32 + 10**9)):
        settings = AgentSettings(profile=profile("ada"), data_bytes=10**9, streams=streams)
        assert settings.data_bytes_in(info) == expected
        assert settings.data_bytes_in(None) == 10**9
