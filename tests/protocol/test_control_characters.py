"""No text in a message and no line of a log contains terminal control characters."""

import dataclasses
import io
import json
import logging
import sys
import types
import typing
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given
from hypothesis import strategies as st
from matrices import examples
from protocol.message_strategies import MESSAGE_STRATEGIES

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.logs import log_to_standard_error
from subfleet.protocol.messages import MESSAGES, Ack, Message, Presence, Profile, Refusal, decode, encode
from subfleet.protocol.schema import to_plain
from subfleet.protocol.text import FREE_TEXTS, escape, make_printable, may_have_control_characters

CONTROL_CHARACTERS = [
    *map(chr, (*range(1, 32), *range(127, 160))),
    *map(chr, (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))),
]
"""C0 without NUL (which no message may contain), DEL, C1, line and paragraph breaks, and direction marks."""
Path = tuple[str | int, ...]


def iter_texts(plain: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Every text in plain data, with its path."""
    if isinstance(plain, str):
        yield path, plain
    elif isinstance(plain, dict):
        for key, value in plain.items():
            yield from iter_texts(value, (*path, key))
    elif isinstance(plain, list):
        for index, value in enumerate(plain):
            yield from iter_texts(value, (*path, index))


def replace_text(plain: Any, path: Path, text: str) -> Any:
    """A copy of plain data with another text at a path."""
    if not path:
        return text
    copy = plain.copy()
    copy[path[0]] = replace_text(plain[path[0]], path[1:], text)
    return copy


def find_text_fields(kind: Any, name: str = "") -> Iterator[str]:
    """The names of all fields that hold texts, in a message and in the records inside it."""
    if kind is str:
        yield name
    elif dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            yield from find_text_fields(hints[field.name], field.name)
    elif typing.get_origin(kind) in (tuple, dict, typing.Union, types.UnionType):
        for member in typing.get_args(kind):
            yield from find_text_fields(member, name)


def find_field(path: Path, known: set[str]) -> str:
    """The name of the field that holds the text at a path."""
    return next((step for step in reversed(path) if isinstance(step, str) and step in known), "")


def join_texts(message: Message) -> str:
    """All texts of a message, as one string."""
    plain = to_plain(message)
    return json.dumps(plain, ensure_ascii=False)


def fields_used(message: Message, known: set[str]) -> set[str]:
    """The fields of this message, and of the records inside it, that hold texts."""
    return {find_field(path, known) for path, _ in iter_texts(to_plain(message))} - {""}


def has_text_in(known: set[str], name: str, message: Message) -> bool:
    return name in fields_used(message, known)


def check_texts(message: Message, control: str, *, ascii_only: bool) -> None:
    """A control character at the end of any text of a message is refused, or replaced by a space."""
    plain = {"schema": 3, "kind": message.KIND, **to_plain(message)}
    for path, text in iter_texts(plain):
        payload = json.dumps(replace_text(plain, path, f"{text}{control}"), ensure_ascii=ascii_only).encode()
        try:
            received = decode(payload)
        except ProtocolError as error:
            assert control not in str(error)  # noqa: PT017 - either is right
        else:
            assert FREE_TEXTS.intersection(map(str, path)), f"{path} is a name"
            assert control not in join_texts(received)


@pytest.mark.hypothesis
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_every_text_of_every_message_is_refused_or_shown_without_control_characters(kind: str) -> None:
    known, checked_fields = set(find_text_fields(MESSAGES[kind])), set[str]()

    @examples(40, suppress_health_check=list(HealthCheck))
    @given(message=MESSAGE_STRATEGIES[kind], control=st.sampled_from(CONTROL_CHARACTERS), ascii_only=st.booleans())
    def check(message: Message, control: str, ascii_only: bool) -> None:
        check_texts(message, control, ascii_only=ascii_only)
        checked_fields.update(fields_used(message, known))

    check()
    for name in sorted(known - checked_fields):  # rarely drawn
        rare = find(MESSAGE_STRATEGIES[kind], partial(has_text_in, known, name))
        check_texts(rare, CONTROL_CHARACTERS[0], ascii_only=True)


@pytest.mark.parametrize("coding", ["utf-8", "utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_no_coding_of_json_hides_control_characters(coding: str) -> None:
    plain = json.loads(encode(Presence(client_id="pi", session_id="s", online=False)))
    for control in CONTROL_CHARACTERS:
        for ascii_only in (True, False):
            payload = json.dumps({**plain, "session_id": control, "reason": f"a{control}b"}, ensure_ascii=ascii_only)
            with pytest.raises(ProtocolError):
                decode(payload.encode(coding))
        payload = json.dumps({**plain, "reason": f"a{control}b"}, ensure_ascii=False)
        received = decode(payload.encode(coding))
        assert isinstance(received, Presence)
        assert received.reason == "a b", repr(control)


def test_texts_for_people_keep_all_but_control_characters() -> None:
    refusal = Refusal(
        task_id="t",
        run_id="r",
        round=1,
        client_id="pi",
        reason="data",
        detail="\x1b[2Jkäse\n\u202e und 日本語 👩\u200d🔬",
    )
    received = decode(encode(refusal))
    assert isinstance(received, Refusal)
    assert received.detail == " [2Jkäse   und 日本語 👩\u200d🔬"
    ack = decode(encode(Ack(of="m", status="refused", reason="a\x9bb\x07")))
    assert isinstance(ack, Ack)
    assert ack.reason == "a b "


def test_odd_versions_of_software_are_accepted() -> None:
    profile = Profile(
        client_id="pi", session_id="s", device="pi", runtimes=("onnx",), sample_count=1, class_counts=(1,),
        input_shape=(1,), memory_total_bytes=1, memory_fraction=0.5, software={"cpu\n": "ARMv7\x1b"},
    )  # fmt: skip
    received = decode(encode(profile))
    assert isinstance(received, Profile)
    assert received.software == {"cpu ": "ARMv7 "}


def test_a_message_that_is_too_deep_is_no_message() -> None:
    payload = b'{"schema":3,"kind":"missing","sha256":"\\u0061","message_id":' + b"[" * 90_000 + b"]" * 90_000 + b"}"
    with pytest.raises(ProtocolError):
        decode(payload)


def test_messages_without_escapes_are_not_searched() -> None:
    assert not may_have_control_characters(b'{"schema":3,"kind":"claim","holder":"~ }"}')


def test_control_characters_are_escaped_and_nothing_else_changes() -> None:
    assert escape("a\x1b[31m\u202eb\n\tkäse 👩\u200d🔬") == "a\\x1b[31m\\u202eb\\n\\tkäse 👩\u200d🔬"
    assert escape("a\n\tb\x07", keep="\n\t") == "a\n\tb\\x07"
    assert make_printable("a\x1b\nb") == "a  b"


@pytest.mark.parametrize("control", CONTROL_CHARACTERS)
def test_no_line_of_a_log_contains_control_characters(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_standard_error(logging.INFO, form="%(levelname)s %(message)s")
    log = logging.getLogger("subfleet.anything")
    log.info("task %s: %s", f"t{control}", f"{control}[2J")
    log.warning("failed", exc_info=ValueError(f"a library says {control}"), stack_info=True)
    logging.getLogger("library").info("nobody asked")
    written = stream.getvalue()
    assert written.startswith(
        f"INFO task t{escape(control)}: {escape(control)}[2J\nWARNING failed\nValueError: a library says "
    )
    assert "Stack (most recent call last)" in written
    assert "nobody asked" not in written
    assert control in "\n\t" or control not in written
