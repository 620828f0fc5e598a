"""Makes received text safe to show."""

import re
from collections.abc import Mapping
from typing import Any

from subfleet.protocol.errors import ProtocolError

_CONTROL = "\x01-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
CONTROL_CHARACTERS = re.compile(f"[{_CONTROL}]")
"""Characters that terminals interpret: they start escape sequences, break lines, or change the text direction."""
_UNSAFE = re.compile(f"[\x00\ud800-\udfff{_CONTROL}]")
"""These, and characters that no message may contain."""
FREE_TEXTS = frozenset({"detail", "reason", "software"})
"""Message fields with text for people, including everything below them; all other texts are names."""


def make_printable(text: str) -> str:
    """Replace terminal control characters, including line breaks, by spaces."""
    return "".join(character if character.isprintable() else " " for character in text)


def escape(text: str, *, keep: str = "") -> str:
    r"""Replace terminal control characters by escapes such as `\x1b`.

    Args:
        text: text of any origin.
        keep: characters that are not replaced, such as line breaks.
    """
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else repr(match[0])[1:-1], text)


def may_have_control_characters(payload: bytes | memoryview) -> bool:
    """Whether JSON may contain terminal control characters; a cheap test.

    JSON escapes characters below 32 with a backslash and may contain the others as they are; UTF-16 and UTF-32 contain
    zeros.
    """
    content = bytes(payload)
    return not content.isascii() or any(mark in content for mark in (b"\\", b"\x7f", b"\x00"))


def check_texts(plain: Any, where: str = "", *, free: bool = False) -> Any:
    """Return parsed JSON without terminal control characters.

    Args:
        plain: received data.
        where: its name in errors.
        free: whether it is text for people, in which such characters become spaces.

    Raises:
        ProtocolError: a name has such characters.
    """
    if isinstance(plain, str):
        if free:
            return CONTROL_CHARACTERS.sub(" ", plain)
        if CONTROL_CHARACTERS.search(plain) is not None:
            raise ProtocolError(f"{where} is {plain!r:.80}, but must be made of printable characters")
        return plain
    if isinstance(plain, Mapping):
        cleaned = {}
        for key, value in plain.items():
            name = check_texts(key, f"a key of {where}", free=free)
            cleaned[name] = check_texts(value, f"{where}.{name:.80}", free=free or name in FREE_TEXTS)
        return cleaned
    if isinstance(plain, list):
        return [check_texts(item, f"{where}[{index}]", free=free) for index, item in enumerate(plain)]
    return plain
