import contextlib
import hashlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples

from subfleet.protocol.errors import ProtocolError, TooLargeError
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import (
    Program,
    ProgramManifest,
    ValueInfo,
    decode_program,
    encode_program,
    program_id_of,
)
from subfleet.protocol.tensors import DTYPE_BYTES, Tensor, decode_container, encode_container

# The output of the safetensors package 0.8.0 for these two tensors and this metadata.
GOLDEN_HEX = (
    "98000000000000007b225f5f6d657461646174615f5f223a7b226b696e64223a22676f6c64656e227d2c2277223a7b226474797065223a"
    "22463332222c227368617065223a5b322c325d2c22646174615f6f666673657473223a5b302c31365d7d2c226d61736b223a7b22647479"
    "7065223a22424f4f4c222c227368617065223a5b335d2c22646174615f6f666673657473223a5b31362c31395d7d7d2020200000803f00"
    "000040000040c00000003f010001"
)
_WEIGHTS = Tensor(name="w", dtype="F32", shape=(2, 2), data=struct.pack("<4f", 1.0, 2.0, -3.0, 0.5))
_MASK = Tensor(name="mask", dtype="BOOL", shape=(3,), data=b"\x01\x00\x01")


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    length = DTYPE_BYTES[dtype]
    for size in shape:
        length *= size
    name = draw(st.text(max_size=8).filter(lambda name: name != "__metadata__"))
    return Tensor(name=name, dtype=dtype, shape=shape, data=draw(st.binary(min_size=length, max_size=length)))


_LISTS = st.lists(_tensors(), max_size=5, unique_by=lambda tensor: tensor.name)


def _container(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_the_bytes_are_the_golden_ones() -> None:
    assert encode_container([_MASK, _WEIGHTS], {"kind": "golden"}).hex() == GOLDEN_HEX
    container = decode_container(bytes.fromhex(GOLDEN_HEX))
    assert dict(container.metadata) == {"kind": "golden"}
    assert container.tensors == {"w": _WEIGHTS, "mask": _MASK}


@pytest.mark.slow
@given(tensors=_LISTS, metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_a_container_comes_back_as_it_was(tensors: list[Tensor], metadata: dict[str, str]) -> None:
    payload = encode_container(tensors, metadata)
    container = decode_container(payload)
    assert dict(container.metadata) == metadata
    assert container.tensors == {tensor.name: tensor for tensor in tensors}
    assert encode_container(container.tensors.values(), container.metadata) == payload


def _check_reads_or_refuses(payload: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_container(payload)
    for read in (decode_program, program_id_of):
        with contextlib.suppress(ProtocolError):
            read(payload)


@pytest.mark.slow
@given(payload=st.one_of(st.binary(max_size=100), st.binary(max_size=80).map(_container)))
def test_arbitrary_bytes_raise_nothing_but_protocol_errors(payload: bytes) -> None:
    _check_reads_or_refuses(payload)


@pytest.mark.slow
@examples(60)
@given(data=st.data())
def test_a_spoilt_container_raises_nothing_but_protocol_errors(data: st.DataObject) -> None:
    payload = bytearray.fromhex(GOLDEN_HEX)
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    _check_reads_or_refuses(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    _check_reads_or_refuses(bytes(payload))


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "must have 8 or more"),
        (struct.pack("<Q", 2**40), "must be at most 16777216"),
        (struct.pack("<Q", 9) + b"{}", "cut off inside its header"),
        (_container(b"{"), "is not JSON"),
        (_container([]), "must be a JSON object"),
        (_container({"__metadata__": {"a": 1}}), "must be an object of strings"),
        (_container({"a": 1}), "must have dtype, shape and data_offsets"),
        (_container({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "but must start at 0"),
        (_container({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)), "must start at 0"),
        (_container({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "but must have 8"),
        (_container({"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)), "dtype 'C64'"),
        (_container({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"x"), "not made of sizes"),
        (_container({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x"), "not made of sizes"),
        (_container({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"xy"), "holds 2 bytes"),
    ],
)
def test_wrong_containers_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode_container(payload)


def test_a_container_above_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(TooLargeError):
        decode_container(bytes(11), max_bytes=10)


def test_a_name_may_not_occur_twice() -> None:
    with pytest.raises(ProtocolError, match="occurs twice"):
        encode_container([_MASK, _MASK])


def test_a_program_comes_back_as_it_was() -> None:
    value = ValueInfo(name="x", dtype="F32", shape=(8, 1), role="input")
    manifest = ProgramManifest(
        program_id="p",
        target="onnx",
        purpose="train",
        batch_size=8,
        inputs=(value,),
        outputs=(),
        memory=MemoryPlan(weights_bytes=60, runtime_bytes=40),
        max_abs_diff=1e-7,
        versions={"torch": "2"},
        operators=("Conv", "Gemm"),
    )
    packed = encode_program(Program(manifest=manifest, body=b"\x08\x01"))
    program = decode_program(packed)
    assert program_id_of(packed) == "p"
    assert program.manifest == manifest
    assert program.manifest.planned_peak_bytes == 100
    assert bytes(program.body) == b"\x08\x01"


def test_a_program_without_operators_has_the_manifest_of_an_older_one() -> None:
    manifest = ProgramManifest(
        program_id="p", target="onnx", purpose="train", batch_size=1, inputs=(), outputs=(),
        memory=MemoryPlan(weights_bytes=1), max_abs_diff=0.0,
    )  # fmt: skip
    packed = encode_program(Program(manifest=manifest, body=b"\x08"))
    assert b"operators" not in packed
    assert decode_program(packed).manifest.operators == ()


def test_a_program_whose_bytes_were_damaged_is_refused() -> None:
    manifest = ProgramManifest(
        program_id="p", target="onnx", purpose="train", batch_size=1, inputs=(), outputs=(),
        memory=MemoryPlan(weights_bytes=1), max_abs_diff=0.0,
    )  # fmt: skip
    packed = bytearray(encode_program(Program(manifest=manifest, body=b"\x08\x01")))
    packed[-1] ^= 1
    for read in (decode_program, program_id_of):
        with pytest.raises(ProtocolError, match="do not match their digest; fetch it again"):
            read(bytes(packed))


def test_a_manifest_without_an_id_is_refused() -> None:
    body = Tensor(name="program", dtype="U8", shape=(1,), data=b"\x08")
    for manifest in ("[]", "{}", '{"program_id": 3}'):
        metadata = {"manifest": manifest, "sha256": hashlib.sha256(b"\x08").hexdigest()}
        with pytest.raises(ProtocolError, match="must have a program_id"):
            program_id_of(encode_container([body], metadata))


@pytest.mark.parametrize("count", [1, 2000])
def test_containers_with_the_same_header_have_their_own_values(count: int) -> None:
    def make(value: int) -> bytes:
        return encode_container(
            Tensor(name=f"t{n}", dtype="U8", shape=(2,), data=bytes([value, n % 7])) for n in range(count)
        )

    first, second = decode_container(make(1)), decode_container(make(2))
    for value, container in ((1, first), (2, second)):
        assert {name: bytes(tensor.data) for name, tensor in container.tensors.items()} == {
            f"t{n}": bytes([value, n % 7]) for n in range(count)
        }
