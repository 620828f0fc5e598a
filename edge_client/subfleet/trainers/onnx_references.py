"""Refuses ONNX programs that refer out of their own bytes or may never end, before a runtime reads them.

ONNX lets a tensor name a file ("external data"), and a node one with what a provider has compiled (`EPContext`). ONNX
Runtime opens such files itself; up to 1.23 any absolute path, whatever folder it was told. A device has no package
`onnx`, so that the messages are walked here by the wire format of protocol buffers, without a copy of any tensor.

A node with a body (`Loop`, `Scan`, `If`) runs as often as numbers say that the program computes. A step has no use for
one, and no runtime can be told to leave it.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from subfleet.protocol.errors import TrainingError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Mapping[int, int] = MappingProxyType({_FIXED64: 8, _FIXED32: 4})
_MOST_VARINT_BYTES = 10
_END_OF_TAGS = 2**32
"""A reader that keeps 32 bits of a longer tag would take another field for it."""
_MOST_DEPTH = 100
"""As deep as readers of protocol buffers go."""
_MOST_FIELDS = 1_000_000
"""Of one program: the largest that is exported here has thousands."""

# Of onnx.proto: by kind of message, the fields that hold messages in which a tensor or a node may stand.
_INNER: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
        "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
        "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
        "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
        "NodeProto": {5: "AttributeProto"},
        "AttributeProto": {
            5: "TensorProto",
            6: "GraphProto",
            10: "TensorProto",
            11: "GraphProto",
            22: "SparseTensorProto",
            23: "SparseTensorProto",
        },
        "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
        "TensorProto": {},
    }
)
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of a TensorProto
_OPERATOR = 4  # of a NodeProto
_COMPILED = b"EPContext"
_WITH_BODIES = frozenset({b"If", b"Loop", b"Scan"})
_ORT_FORMAT = b"ORTM"
"""From the fifth byte on, of ONNX Runtime's own format, which is no ONNX and is not walked."""


def check_self_contained(program: bytes | memoryview) -> None:
    """Refuse a program that names anything outside of itself, has a loop, or is no ONNX model.

    Raises:
        TrainingError: it does, or they are not.
    """
    content = memoryview(program)
    if bytes(content[4:8]) == _ORT_FORMAT:
        raise TrainingError("the program is in ONNX Runtime's own format, but must be an ONNX model; export it again")
    # A stack of half-read messages, never a list of those to come: millions of empty ones fit into a few megabytes.
    reading = [("ModelProto", _read_fields(content))]
    budget, body = _MOST_FIELDS, b""
    while reading:
        kind, fields = reading[-1]
        number, value = next(fields, (0, 0))
        if number == 0:  # which no field has
            reading.pop()
            continue
        budget -= 1
        if budget < 0:
            raise _make_error(f"it has more than {_MOST_FIELDS} fields")
        _check_field(kind, number, value)
        if (operator := _read_operator(kind, number, value)) in _WITH_BODIES:
            body = operator
        if number in _INNER[kind] and isinstance(value, memoryview):
            reading.append((_INNER[kind][number], _read_fields(value)))
            if len(reading) > _MOST_DEPTH:
                raise _make_error(f"messages are nested more than {_MOST_DEPTH} deep")
    if body:
        raise TrainingError(
            f"a node of the program is {body.decode()!r}, whose body may run forever, but a step must be a "
            "plain sequence of operators; nothing was run, export it again without it"
        )


def _check_field(kind: str, number: int, value: int | memoryview) -> None:
    # Whatever the wire type: what one reader skips another may take.
    if kind == "TensorProto" and (number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value != 0)):
        raise TrainingError(
            "a tensor of the program lies in another file (external data), but a program must hold all of its tensors; "
            "nothing was read, export it again as one file"
        )
    if _read_operator(kind, number, value) == _COMPILED:
        raise TrainingError(
            "a node of the program is an EPContext, which names a compiled file, but a program must hold all that it "
            "needs; nothing was read, export it again as an ONNX model"
        )


def _read_operator(kind: str, number: int, value: int | memoryview) -> bytes:
    """Read the operator of a node, if the field names it; else empty."""
    return bytes(value) if (kind, number) == ("NodeProto", _OPERATOR) and isinstance(value, memoryview) else b""


def _read_fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message: numbers with a value, or with the bytes of what has no number for its value."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < tag < _END_OF_TAGS or number == 0:
            raise _make_error(f"a field has the tag {tag}")
        if wire_type == _VARINT:
            value, position = _read_varint(message, position)
            yield number, value
            continue
        if wire_type == _BYTES:
            size, position = _read_varint(message, position)
        elif wire_type in _FIXED_BYTES:
            size = _FIXED_BYTES[wire_type]
        else:
            raise _make_error(f"a field has the wire type {wire_type}")
        if size > len(message) - position:
            raise _make_error(f"a field has {size} bytes, but only {len(message) - position} bytes remain")
        yield number, message[position : position + size]
        position += size


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    """Read a number of variable length; returns it with the position behind it."""
    number = 0
    for index in range(min(_MOST_VARINT_BYTES, len(message) - position)):
        byte = message[position + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, position + index + 1
    raise _make_error("a number is truncated or too long")


def _make_error(what: str) -> TrainingError:
    return TrainingError(f"the program is no ONNX model ({what}); it must be fetched or exported again")
