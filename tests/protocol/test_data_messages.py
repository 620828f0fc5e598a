"""Input statistics and transforms in messages: they are bounded, and left out where they are not used."""

import json
from dataclasses import replace

import pytest
from protocol.test_messages import ROUND

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.input_statistics import InputStatistics
from subfleet.protocol.messages import Profile, decode, encode

PROFILE = Profile(
    client_id="ada",
    session_id="s",
    device="d",
    runtimes=("onnx",),
    sample_count=1,
    class_counts=(1,),
    input_shape=(1, 8, 8),
    memory_total_bytes=1,
    memory_fraction=0.5,
    message_id="m",
)
STATISTICS = InputStatistics(kind="numbers", minimum=0.0, maximum=1.0, mean=0.25, deviation=0.5)


def test_messages_without_statistics_are_those_of_earlier_releases() -> None:
    plain = json.loads(encode(PROFILE))
    assert not plain.keys() & {"inputs", "sizes_differ"}
    assert not json.loads(encode(ROUND)).keys() & {"sample_bytes", "asynchronous"}


def test_statistics_round_trip() -> None:
    profile = replace(PROFILE, inputs=STATISTICS, sizes_differ=True)
    assert json.loads(encode(profile))["inputs"] == {
        "kind": "numbers",
        "minimum": 0.0,
        "maximum": 1.0,
        "mean": 0.25,
        "deviation": 0.5,
    }
    assert decode(encode(profile)) == profile


@pytest.mark.parametrize(
    "wrong",
    [{"maximum": 1e300}, {"minimum": -1e300}, {"deviation": 7}, {"mean": -1}, {"kind": "pixels"}, {"more": 1}],
)
def test_absurd_statistics_are_refused_as_a_message(wrong: dict[str, object]) -> None:
    plain = json.loads(encode(PROFILE))
    plain["inputs"] = {"kind": "numbers", "minimum": 0, "maximum": 1, "mean": 0.5, "deviation": 0.1, **wrong}
    with pytest.raises(ProtocolError):
        decode(json.dumps(plain).encode())


def test_a_sample_that_takes_more_than_any_device_has_is_refused() -> None:
    plain = json.loads(encode(ROUND))
    with pytest.raises(ProtocolError, match="sample_bytes is"):
        decode(json.dumps({**plain, "sample_bytes": 2**40}).encode())
