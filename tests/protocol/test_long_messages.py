"""Messages that are compressed on the wire."""

import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subfleet.protocol.errors import ProtocolError, TooLargeError
from subfleet.protocol.messages import MAX_CONTROL_BYTES, Profile, decode, encode
from subfleet.protocol.schema import canonical_json, to_plain

_LONG = Profile(
    client_id="a",
    session_id="s",
    device="d",
    runtimes=("onnx",),
    sample_count=1,
    class_counts=tuple(range(20_000)),
    input_shape=(1,),
    memory_total_bytes=1,
    memory_share=1.0,
)


def test_a_long_message_is_compressed_and_comes_back_as_it_was() -> None:
    payload = encode(_LONG)
    assert payload.startswith(b"SFZ1")
    assert len(payload) < 50_000 < len(canonical_json(to_plain(_LONG)))
    assert decode(payload, expected="profile") == decode(memoryview(payload)) == _LONG


@settings(deadline=None)
@given(cut=st.integers(4, len(encode(_LONG)) - 1), flipped=st.integers(0, 7))
def test_a_damaged_compressed_message_is_a_protocol_error(cut: int, flipped: int) -> None:
    payload = encode(_LONG)
    damaged = payload[:cut] + bytes([payload[cut] ^ 1 << flipped]) + payload[cut + 1 :]
    for wrong in (payload[:cut], damaged, payload + b"x"):
        with pytest.raises(ProtocolError):
            decode(wrong)


def test_a_compressed_message_takes_no_more_memory_than_a_plain_one_may() -> None:
    bomb = b"SFZ1" + zlib.compress(bytes(64 * MAX_CONTROL_BYTES))
    tracemalloc.start()
    with pytest.raises(TooLargeError):
        decode(bomb)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * MAX_CONTROL_BYTES
