"""Messages that are compressed on the wire."""

import gzip
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
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
    memory_fraction=1.0,
)
_ENCODED = encode(_LONG)


def test_a_long_message_is_compressed_and_comes_back_as_it_was() -> None:
    payload = encode(_LONG)
    assert gzip.decompress(payload) == canonical_json({"schema": 3, "kind": "profile", **to_plain(_LONG)})
    assert len(payload) < 50_000 < len(canonical_json(to_plain(_LONG)))
    assert decode(payload, expected="profile") == decode(memoryview(payload)) == _LONG


@given(cut=st.integers(4, len(_ENCODED) - 1), flipped=st.integers(0, 7))
def test_a_damaged_compressed_message_is_a_protocol_error(cut: int, flipped: int) -> None:
    for wrong in (_ENCODED[:cut], _ENCODED + b"x"):
        with pytest.raises(ProtocolError):
            decode(wrong)
    damaged = _ENCODED[:cut] + bytes([_ENCODED[cut] ^ 1 << flipped]) + _ENCODED[cut + 1 :]
    with suppress(ProtocolError):  # some bits of the header mean nothing
        assert decode(damaged) == _LONG


def test_a_compressed_message_takes_no_more_memory_than_a_plain_one_may() -> None:
    bomb = gzip.compress(bytes(64 * MAX_CONTROL_BYTES))
    tracemalloc.start()
    with pytest.raises(TooLargeError):
        decode(bomb)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * MAX_CONTROL_BYTES
