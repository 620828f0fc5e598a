"""Refuses ONNX programs that refer to other files or may never end, before a runtime reads them.

In ONNX a tensor may name a file ("external data"), and so may a node with a provider's compiled code (`EPContext`).
ONNX Runtime opens such files itself; up to 1.23 at any absolute path, whatever folder is configured. Devices do not
have the package `onnx`, so the messages are read here in the wire format of protocol buffers, without copying tensors.

A node with a body (`Loop`, `Scan`, `If`) may run any number of times. A training step does not need one, and no runtime
can be interrupted in it.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from subfleet.protocol.errors import TrainingError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Mapping[int, int] = MappingProxyType({_FIXED64: 8, _FIXED32: 4})
_MOST_VARINT_BYTES = 10
_END_OF_TAGS = 2**32
"""A reader that keeps only 32 bits of a longer tag would see another field."""
_MOST_DEPTH = 100
"""The usual limit on nesting of protocol buffer readers."""
_MOST_FIELDS = 1_000_000
"""The most fields of one program; the largest exported programs have thousands."""

# From onnx.proto: by kind of message, the fields with messages that may contain a tensor or a node.
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
"""From the fifth byte on: ONNX Runtime's own format, which is not ONNX and cannot be checked here."""


def check_self_contained(program: bytes | memoryview) -> None:
    """Refuse a program that refers to other files, has a loop, or is not an ONNX model.

    Raises:
        TrainingError: the program is one of these.
    """
    content = memoryview(program)
    if bytes(content[4:8]) == _ORT_FORMAT:
        raise TrainingError("the program is in ONNX Runtime's own format, but must be an ONNX model; export it again")
    # A stack of partly read messages, not a list of pending ones: millions of empty messages fit into a few megabytes.
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
    # For any wire type: one reader may skip what another reads.
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
    """Yield the fields of a message: their numbers, with an integer or bytes as the value."""
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
            raise _make_error(f"a field has {size} bytes, but only {len(message) - position} are left")
        yield number, message[position : position + size]
        position += size


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    """Read a variable-length number; returns it with the position after it."""
    number = 0
    for index in range(min(_MOST_VARINT_BYTES, len(message) - position)):
        byte = message[position + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, position + index + 1
    raise _make_error("a number is truncated or too long")


def _make_error(problem: str) -> TrainingError:
    return TrainingError(f"the program is not an ONNX model ({problem}); it must be fetched or exported again")
