"""The fields in which devices describe themselves are short enough for a server to keep for every device."""

import dataclasses
import json
import typing
from typing import Any

import pytest

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.bounds import Length
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.limits import MAX_NAME_CHARACTERS
from subfleet.protocol.messages import Message, Presence, Profile, Telemetry, Update, decode, encode
from subfleet.protocol.readings import LogLow, Reading
from subfleet.protocol.submodel import Architecture

NUMBERS = (int, float, bool, int | None, float | None)
PRESENCE = Presence(client_id="pi", session_id="s", online=True)
PROFILE = Profile(
    client_id="pi",
    session_id="s",
    device="d",
    runtimes=("onnx",),
    sample_count=1,
    class_counts=(1,),
    input_shape=(1,),
    memory_total_bytes=1,
    memory_fraction=0.5,
)
TELEMETRY = Telemetry(
    client_id="pi",
    session_id="s",
    run_id="r",
    round=1,
    log_time_s=None,
    reading=Reading(),
    memory_budget_bytes=1,
)


def limits(message: Message) -> dict[str, int]:
    """The maximum length of each text, list and mapping, by field."""
    hints = typing.get_type_hints(type(message), include_extras=True)
    lengths = {}
    for field in dataclasses.fields(message):
        parts = (hints[field.name], *typing.get_args(hints[field.name]))  # also those of optional fields
        bounds = [bound for part in parts for bound in getattr(part, "__metadata__", ())]
        for bound in bounds:
            if isinstance(bound, Length):
                assert bound.most is not None
                lengths[field.name] = bound.most
    return lengths


CASES = [(message, name, most) for message in (PRESENCE, PROFILE, TELEMETRY) for name, most in limits(message).items()]


def _value_of_length(kind: Any, length: int) -> object:
    if kind is str or type(None) in typing.get_args(kind):
        return "x" * length
    if typing.get_origin(kind) is dict:
        return {f"k{number}": "v" for number in range(length)}
    (item, *_) = typing.get_args(kind)
    return [{str: "x", int: 1}.get(item, [1])] * length


def _encode_with(message: Message, name: str, value: object) -> bytes:
    return json.dumps({**json.loads(encode(message)), name: value}).encode()


@pytest.mark.slow
@pytest.mark.parametrize(("message", "name", "most"), CASES, ids=lambda value: getattr(value, "KIND", value))
def test_a_field_may_be_as_long_as_its_limit_and_no_longer(message: Message, name: str, most: int) -> None:
    kind = typing.get_type_hints(type(message))[name]
    assert len(getattr(decode(_encode_with(message, name, _value_of_length(kind, most))), name)) == most
    with pytest.raises(ProtocolError, match=f"{name} has {most + 1} .*, but must have at most {most}"):
        decode(_encode_with(message, name, _value_of_length(kind, most + 1)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("runtimes", ["x" * (MAX_NAME_CHARACTERS + 1)]),
        ("operators", ["x" * (MAX_NAME_CHARACTERS + 1)]),
        ("software", {"x" * (MAX_NAME_CHARACTERS + 1): "1"}),
        ("software", {"numpy": "x" * (MAX_NAME_CHARACTERS + 1)}),
    ],
)
def test_a_text_in_a_list_or_a_mapping_is_limited_too(name: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=f"{name} has a text of 257 characters, but must have at most 256"):
        decode(_encode_with(PROFILE, name, value))


def test_the_kind_of_network_is_short() -> None:
    assert Reading(network="x" * 64).network == "x" * 64
    with pytest.raises(ValueError, match="network has 65 characters, but must have at most 64"):
        Reading(network="x" * 65)


def test_a_declared_architecture_is_limited_as_a_whole() -> None:
    blocks = tuple(f"block {number} " + "x" * 100 for number in range(600))
    with pytest.raises(ValueError, match=r"architecture has 6[0-9]{4} bytes, but must have at most 65536"):
        dataclasses.replace(PROFILE, architecture=Architecture(blocks=blocks))


def test_every_text_list_and_mapping_of_these_messages_has_a_limit() -> None:
    # These have their own rules.
    bounded = {"client_id", "architecture", "reading", "log_low", "class_names", "packing_width", "inputs"}
    assert set(typing.get_type_hints(LogLow).values()) <= set(NUMBERS)
    for message in (PRESENCE, PROFILE, TELEMETRY):
        hints = typing.get_type_hints(type(message))
        kinds = {field.name: hints[field.name] for field in dataclasses.fields(message)}
        free = {name for name, kind in kinds.items() if kind not in NUMBERS}
        assert free - bounded == set(limits(message)), message.KIND


def _update(**changes: object) -> bytes:
    update = Update(
        task_id="t",
        run_id="r",
        round=1,
        client_id="pi",
        blob=BlobRef.of(b"change"),
        sample_count=1,
        step_count=1,
        loss=1.0,
        accuracy=0.5,
        measured_peak_bytes=1,
        train_seconds=0.1,
        seconds=0.1,
    )
    return json.dumps({**json.loads(encode(update)), **changes}).encode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": -1e39}, r"loss is -1e\+39, but must be a number of single precision"),
        ({"square_loss": 1e39}, r"square_loss is 1e\+39, but must be a number of single precision, 0 or more"),
    ],
)
def test_a_loss_that_no_program_can_compute_is_refused(changes: dict[str, float], words: str) -> None:
    """Its square, or the sum of two such losses, may overflow."""
    assert isinstance(decode(_update(loss=-3.4e38, square_loss=3.4e38)), Update)
    with pytest.raises(ProtocolError, match=words):
        decode(_update(**changes))
