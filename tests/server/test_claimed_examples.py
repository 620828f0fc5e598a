"""What a client claims of the examples that went through operators is believed as far as it was trained (O5)."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from server.coordinator_cases import CLIENTS, prepared, profile, replies, task, telemetry, terms_of, update
from server.fake_device import CLASSES

from subfleet.methods.fedoras import FedorAS
from subfleet.protocol.messages import Presence
from subfleet.protocol.paths import OperatorExamples
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.actions import Reply
from subfleet.rounds.coordinator import step
from subfleet.rounds.events import Done
from subfleet.rounds.state import RunState
from subfleet.rounds.suspicion import ChangeSize
from subfleet.rounds.work import CheckRequest
from subfleet.settings.samples import DataSettings
from subfleet.testing.rounds import SUPERNET

TERMS = terms_of(
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
        state, _ = step(TERMS, state, Presence(client_id=name, session_id=f"{name}-1", online=True), 1.0)
        state, _ = step(TERMS, state, replace(profile(name), input_shape=SUPERNET.input_shape), 1.0)
    for name in CLIENTS:
        state, _ = step(TERMS, state, telemetry(TERMS, name), 2.0)
    for name in CLIENTS:
        state, _ = step(TERMS, state, prepared(TERMS, state, name), 2.0)
    return state


STATE = training()
KEPT = TERMS.network.operators_of(task(STATE, "ada").spec)
LACKED = next(
    (choice, one) for choice, own in TERMS.network.choices.items() for one in own.operators if one not in KEPT[choice]
)
TOLD: OperatorExamples = tuple((choice, ((own[0], EPOCHS * SAMPLES),)) for choice, own in KEPT.items())


def said(examples: OperatorExamples) -> tuple[list[str], str]:
    told = replace(update(TERMS, STATE, "ada"), operator_examples=examples)
    _, actions = step(TERMS, STATE, Done(request=CheckRequest(update=told), result=ChangeSize()), 3.0)
    return replies(actions), " ".join(one.receipt.reason for one in actions if isinstance(one, Reply))


def test_what_was_trained_is_accepted_however_it_was_spread() -> None:
    assert said(TOLD) == (["accepted"], "")
    choice, own = next((choice, own) for choice, own in KEPT.items() if len(own) > 1)
    spread = tuple((name, ((own[0], 7), (own[1], 13)) if name == choice else counts) for name, counts in TOLD)
    assert said(spread)[0] == ["accepted"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda told: (), "examples are not told for every choice of the supernet"),
        (lambda told: (*told, ("section9.block0", (("conv", 20),))), "and for no other"),
        (lambda told: ((told[0][0], (("unknown", 20),)), *told[1:]), "of operators that its subspace lacks"),
        (lambda told: ((told[0][0], ((told[0][1][0][0], 10**6),)), *told[1:]), "1000000 examples went through choice"),
        (lambda told: ((told[0][0], ((told[0][1][0][0], 19),)), *told[1:]), "19 examples went through choice"),
        (
            lambda told: tuple((name, ((LACKED[1], 20),) if name == LACKED[0] else own) for name, own in told),
            "of operators that its subspace lacks",
        ),
    ],
)
def test_what_cannot_be_is_refused(spoil: Spoil, words: str) -> None:
    verdicts, reason = said(spoil(TOLD))
    assert verdicts == ["refused"]
    assert words in reason


def test_one_network_has_no_operators_to_tell_of() -> None:
    terms = terms_of()
    state = RunState()
    for name in CLIENTS:
        state, _ = step(terms, state, Presence(client_id=name, session_id=f"{name}-1", online=True), 1.0)
        state, _ = step(terms, state, profile(name), 1.0)
    for name in CLIENTS:
        state, _ = step(terms, state, telemetry(terms, name), 2.0)
    for name in CLIENTS:
        state, _ = step(terms, state, prepared(terms, state, name), 2.0)
    told = replace(update(terms, state, "ada"), operator_examples=TOLD)
    _, actions = step(terms, state, Done(request=CheckRequest(update=told), result=ChangeSize()), 3.0)
    assert replies(actions) == ["refused"]
