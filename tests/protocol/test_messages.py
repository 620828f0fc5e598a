import dataclasses
import json
import math

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from matrices import examples
from protocol.message_strategies import EVERY_MESSAGE, MESSAGE_STRATEGIES

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.errors import InvalidError, ProtocolError, TooLargeError
from subfleet.protocol.messages import (
    MAX_CONTROL_BYTES,
    MESSAGES,
    SCHEMA_VERSION,
    Ack,
    Claim,
    Message,
    Presence,
    Profile,
    RoundInfo,
    Scores,
    check_client_id,
    decode,
    encode,
    make_message_id,
)
from subfleet.protocol.submodel import Architecture, Prefix

pytestmark = pytest.mark.slow

_QUICK = examples(15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)


_BLOB = BlobRef(sha256="0" * 64, size_bytes=1)
ROUND = RoundInfo(run_id="r", round=1, round_count=1, phase="train", log_time_s=None, deadline_s=1.0)


def _check_decodes_or_refuses(payload: bytes) -> None:
    try:
        message = decode(payload)
    except ProtocolError:
        return
    assert decode(encode(message)) == message


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_every_message_comes_back_as_it_was(kind: str) -> None:
    @_QUICK
    @given(message=MESSAGE_STRATEGIES[kind])
    def round_trip(message: Message) -> None:
        payload = encode(message)
        assert decode(payload) == message
        assert decode(memoryview(payload), expected=kind) == message
        assert encode(decode(payload)) == payload

    round_trip()


@given(payload=st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_protocol_errors(payload: bytes) -> None:
    _check_decodes_or_refuses(payload)


@given(plain=_JSON, kind=st.sampled_from(sorted(MESSAGES)))
def test_arbitrary_json_raises_nothing_but_protocol_errors(plain: object, kind: str) -> None:
    _check_decodes_or_refuses(json.dumps(plain).encode())
    fields = plain if isinstance(plain, dict) else {"client_id": plain}
    _check_decodes_or_refuses(json.dumps({**fields, "schema": SCHEMA_VERSION, "kind": kind}).encode())


@pytest.mark.slow
@examples(50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(message=EVERY_MESSAGE, data=st.data())
def test_a_message_with_one_value_replaced_raises_nothing_but_protocol_errors(
    message: Message, data: st.DataObject
) -> None:
    plain = json.loads(encode(message))
    node = plain
    while True:  # walk down to some value
        key = data.draw(st.sampled_from(sorted(node)) if isinstance(node, dict) else st.integers(0, len(node) - 1))
        if not (isinstance(node[key], (dict, list)) and node[key] and data.draw(st.booleans())):
            break
        node = node[key]
    node[key] = data.draw(_JSON)
    _check_decodes_or_refuses(json.dumps(plain).encode())


@pytest.mark.slow
@examples(50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(message=EVERY_MESSAGE, data=st.data())
def test_a_message_with_bytes_spoilt_raises_nothing_but_protocol_errors(message: Message, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    _check_decodes_or_refuses(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    _check_decodes_or_refuses(bytes(payload))


def test_the_bytes_of_a_message_are_fixed() -> None:
    message = Presence(client_id="pi-4", session_id="s", online=True, message_id="m")
    assert encode(message) == (
        b'{"client_id":"pi-4","kind":"presence","message_id":"m","online":true,"schema":3,"session_id":"s"}'
    )
    claim = Claim(session_id="s", holder="pi-4", since_s=1.5, message_id="m")
    assert encode(claim) == (
        b'{"holder":"pi-4","kind":"claim","message_id":"m","schema":3,"session_id":"s","since_s":1.5}'
    )


def test_the_bytes_of_scores_are_fixed() -> None:
    scores = (CandidateScore(score=-1.5), CandidateScore(score=None, reason="no memory"))
    message = Scores(task_id="t", run_id="r", round=1, client_id="pi", scores=scores, seconds=2.0, message_id="m")
    assert encode(message) == (
        b'{"client_id":"pi","kind":"scores","message_id":"m","round":1,"run_id":"r","schema":3,'
        b'"scores":[{"reason":"","score":-1.5},{"reason":"no memory","score":null}],"seconds":2.0,"task_id":"t"}'
    )


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([], "scores is empty, but must have 1 or more"),
        ([{"score": 1.0}] * 17, "scores has 17 items, but must have at most 16"),
        ([{"score": None}], "one of the two must be set"),
        ([{"score": 1.0, "reason": "why not"}], "one of the two must be set"),
        ([{"score": math.nan}], "must be a finite number"),
        ([{"score": "1"}], "must be a finite number"),
    ],
)
def test_wrong_scores_are_refused(scores: list[object], words: str) -> None:
    message = Scores(task_id="t", run_id="r", round=1, client_id="pi", scores=(CandidateScore(score=1.0),), seconds=2.0)
    plain = {**json.loads(encode(message)), "scores": scores}
    with pytest.raises(ProtocolError, match=words):
        decode(json.dumps(plain).encode())


def _presence(**changes: object) -> bytes:
    plain = json.loads(encode(Presence(client_id="a", session_id="s", online=True, message_id="m")))
    plain.update(changes)
    return json.dumps({key: value for key, value in plain.items() if value is not ...}).encode()


def _profile(**changes: object) -> bytes:
    profile = Profile(
        client_id="pi",
        session_id="s",
        device="raspberry_pi_4",
        runtimes=("onnx",),
        sample_count=1,
        class_counts=(1,),
        input_shape=(4,),
        memory_total_bytes=1,
        memory_fraction=1.0,
    )
    return json.dumps({**json.loads(encode(profile)), **changes}).encode()


def test_optional_fields_of_a_profile_are_left_out() -> None:
    plain = json.loads(_profile())
    assert not {"operators", "macs_per_s", "max_training_bytes"} & set(plain)
    profile = decode(_profile(operators=["Conv", "aten::add.out"], macs_per_s=1e9, max_training_bytes=300))
    assert isinstance(profile, Profile)
    assert (profile.operators, profile.macs_per_s) == (("Conv", "aten::add.out"), 1e9)
    assert profile.max_training_bytes == 300
    assert decode(encode(profile)) == profile


def test_the_bytes_of_a_declaration_and_of_its_answer_are_fixed() -> None:
    """Profiles without a declaration, and other acks, are encoded as in earlier releases."""
    plain = json.loads(_profile(message_id="m"))
    assert "architecture" not in plain
    assert "problem" not in json.loads(encode(Ack(of="m", status="accepted")))
    declared = Architecture(axes=(("stream", Prefix(size=4)),), blocks=("b1",), name="mine")
    architecture = {
        "axes": [["stream", {"size": 4, "type": "prefix"}]],
        "blocks": ["b1"],
        "choices": [],
        "name": "mine",
    }
    profile = decode(_profile(message_id="m", architecture=architecture))
    assert isinstance(profile, Profile)
    assert profile.architecture == declared
    assert (
        encode(profile)
        == json.dumps({**plain, "architecture": architecture}, sort_keys=True, separators=(",", ":")).encode()
    )
    answer = Ack(of="m", status="refused", reason="no", message_id="r", problem="too_large")
    assert encode(answer) == (
        b'{"kind":"ack","message_id":"r","of":"m","problem":"too_large","reason":"no","schema":3,"status":"refused"}'
    )


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"9" * 5000, "is not JSON|JSON object"),
        (b"[]", "must be a JSON object"),
        (_presence(schema=2), "schema version is 2, but must be 3"),
        (_presence(schema=...), "schema version is None"),
        (_presence(kind="other"), "kind is 'other'"),
        (_presence(kind=["presence"]), "kind is"),
        (_presence(extra=1), "extra is an unknown key"),
        (_presence(online=...), "online is missing"),
        (_presence(online=1), "online is 1, but must be true or false"),
        (_presence(client_id="a/b"), "client_id is 'a/b', but must be"),
        (_presence(client_id=""), "client_id is '', but must be"),
        (_presence(client_id="a\n"), "made of printable characters"),
        (_presence(client_id=".."), "not '.' or '-' first"),
        (_presence(client_id="-rf"), "not '.' or '-' first"),
        (_presence(message_id="x" * 4097), "has 4097 characters, but must have at most 4096"),
        (_presence(session_id="\ud800"), "must be text without NUL"),
        (_presence(session_id="a\0"), "must be text without NUL"),
        (_profile(device="\x1b[2J"), "must be made of printable characters"),
        (_profile(runtimes=["on\nnx"]), "must be made of printable characters"),
        (_profile(operators=["Ge\nlu"]), "must be made of printable characters"),
        (_profile(architecture={"axes": [["a", {"type": "all"}]]}), "has the type 'all'"),
        (_profile(architecture={"axes": [["a", {"type": "prefix", "size": 0}]]}), r"axes\[0\]\[1\]\.size is 0"),
        (_profile(architecture={"name": "\x1b[2J"}), "must be made of printable characters"),
        (_profile(architecture="w1/2"), "architecture is 'w1/2', but must be a table"),
        (_profile(max_training_bytes=0), "max_training_bytes is 0, but must be 1 or more"),
        (_profile(macs_per_s=0), "macs_per_s is 0.0, but must be above 0"),
        (_profile(software={"\udc00": "1"}), "Profile.software has the key .*, but must be text"),
        (_profile(sample_count=2**40 + 1), "sample_count is .*, but must be from 1 to 1099511627776"),
    ],
)
def test_wrong_messages_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode(payload)


def test_a_message_of_another_kind_than_its_topic_is_refused() -> None:
    payload = encode(Ack(of="m", status="accepted"))
    with pytest.raises(ProtocolError, match="kind is 'ack', but must be update"):
        decode(payload, expected="update")


def test_a_message_above_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(TooLargeError, match=f"must be at most {MAX_CONTROL_BYTES}"):
        decode(b"[" * (MAX_CONTROL_BYTES + 1))


@pytest.mark.parametrize("count", [True, 1.0, "1", None, 2**63])
def test_a_count_is_a_whole_number_of_64_bits(count: object) -> None:
    plain = json.loads(encode(ROUND))
    with pytest.raises(ProtocolError, match=r"round is .*, but must be a whole number"):
        decode(json.dumps({**plain, "round": count}).encode())


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_neither_sent_nor_accepted(number: float) -> None:
    message = ROUND
    plain = json.loads(encode(message))
    with pytest.raises(ProtocolError):
        decode(json.dumps({**plain, "log_time_s": number}).encode())
    with pytest.raises(InvalidError, match=r"log_time_s is .*, but must be a finite number"):
        dataclasses.replace(message, log_time_s=number)


def test_message_ids_differ_and_client_ids_are_checked() -> None:
    assert make_message_id() != make_message_id()
    assert check_client_id("a.B-_9") == "a.B-_9"
    with pytest.raises(ProtocolError):
        check_client_id("x" * 65)
