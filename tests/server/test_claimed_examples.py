"""A client's claims of the examples that went through each operator are checked against its task (O5)."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from server.coordinator_cases import CLIENTS, context_of, prepared, profile, replies, task, telemetry, update
from server.fake_device import CLASSES

from subfleet.methods.fedoras import FedorAS
from subfleet.protocol.messages import Presence
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.coordinator import step
from subfleet.rounds.outliers import ChangeSize
from subfleet.rounds.signals import Reply, RequestDone
from subfleet.rounds.state import RunState
from subfleet.rounds.work import CheckRequest
from subfleet.settings.samples import DataSettings
from subfleet.testing.rounds import SUPERNET

CONTEXT = context_of(
    method=FedorAS(supernet_rounds=1, tiers=2, subspace=0.6),
    model=replace(SUPERNET, class_count=CLASSES),
    data=DataSettings(test="unused", validation_samples=5),
    training=TrainingSettings(batch_size=4, epochs=2),
    rounds=3,
)
EPOCHS, SAMPLES = 2, 10
Spoil = Callable[[OperatorExamples], OperatorExamples]


def training() -> RunState:
    state = RunState()
    for name in CLIENTS:
        state, _ = step(CONTEXT, state, Presence(client_id=name, session_id=f"{name}-1", online=True), 1.0)
        state, _ = step(CONTEXT, state, replace(profile(name), input_shape=SUPERNET.input_shape), 1.0)
    for name in CLIENTS:
        state, _ = step(CONTEXT, state, telemetry(CONTEXT, name), 2.0)
    for name in CLIENTS:
        state, _ = step(CONTEXT, state, prepared(CONTEXT, state, name), 2.0)
    return state


STATE = training()
OPERATORS = CONTEXT.network.operators_of(task(STATE, "ada").architecture)
LACKING = next(
    (choice, operator)
    for choice, own in CONTEXT.network.choices.items()
    for operator in own.operators
    if operator not in OPERATORS[choice]
)
EXAMPLES: OperatorExamples = tuple((choice, ((own[0], EPOCHS * SAMPLES),)) for choice, own in OPERATORS.items())


def answer_to(examples: OperatorExamples) -> tuple[list[str], str]:
    answer = replace(update(CONTEXT, STATE, "ada"), operator_examples=examples)
    _, actions = step(CONTEXT, STATE, RequestDone(request=CheckRequest(update=answer), result=ChangeSize()), 3.0)
    return replies(actions), " ".join(action.ack.reason for action in actions if isinstance(action, Reply))


def test_true_counts_are_accepted_however_they_are_spread() -> None:
    assert answer_to(EXAMPLES) == (["accepted"], "")
    choice, own = next((choice, own) for choice, own in OPERATORS.items() if len(own) > 1)
    spread = tuple((name, ((own[0], 7), (own[1], 13)) if name == choice else counts) for name, counts in EXAMPLES)
    assert answer_to(spread)[0] == ["accepted"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda examples: (), "must be for exactly the choices of the supernet"),
        (lambda examples: (*examples, ("section9.block0", (("conv", 20),))), "exactly the choices of the supernet"),
        (
            lambda examples: ((examples[0][0], (("unknown", 20),)), *examples[1:]),
            "for operators outside the client's subspace",
        ),
        (
            lambda examples: ((examples[0][0], ((examples[0][1][0][0], 10**6),)), *examples[1:]),
            "1000000 examples went through choice",
        ),
        (
            lambda examples: ((examples[0][0], ((examples[0][1][0][0], 19),)), *examples[1:]),
            "19 examples went through choice",
        ),
        (
            lambda examples: tuple(
                (name, ((LACKING[1], 20),) if name == LACKING[0] else counts) for name, counts in examples
            ),
            "for operators outside the client's subspace",
        ),
    ],
)
def test_impossible_counts_are_refused(spoil: Spoil, words: str) -> None:
    verdicts, reason = answer_to(spoil(EXAMPLES))
    assert verdicts == ["refused"]
    assert words in reason


def test_a_single_network_reports_no_operators() -> None:
    context = context_of()
    state = RunState()
    for name in CLIENTS:
        state, _ = step(context, state, Presence(client_id=name, session_id=f"{name}-1", online=True), 1.0)
        state, _ = step(context, state, profile(name), 1.0)
    for name in CLIENTS:
        state, _ = step(context, state, telemetry(context, name), 2.0)
    for name in CLIENTS:
        state, _ = step(context, state, prepared(context, state, name), 2.0)
    answer = replace(update(context, state, "ada"), operator_examples=EXAMPLES)
    _, actions = step(context, state, RequestDone(request=CheckRequest(update=answer), result=ChangeSize()), 3.0)
    assert replies(actions) == ["refused"]
