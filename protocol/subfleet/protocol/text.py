"""Makes received text safe to show."""

import re
from collections.abc import Mapping
from typing import Any

from subfleet.protocol.errors import ProtocolError

_ACTING = "\x01-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
ACTING = re.compile(f"[{_ACTING}]")
"""On which terminals act: they begin escape sequences, break lines, or turn the direction of what follows."""
_UNSHOWN = re.compile(f"[\x00\ud800-\udfff{_ACTING}]")
"""With those that no message may have at all."""
FREE_TEXTS = frozenset({"detail", "reason", "software"})
"""The fields of messages that are written for people, and those below them; all other texts are names."""


def make_printable(text: str) -> str:
    """Replace terminal control characters, including line breaks, by spaces."""
    return "".join(character if character.isprintable() else " " for character in text)


def escape(text: str, *, keep: str = "") -> str:
    r"""Replace terminal control characters by escapes such as `\x1b`.

    Args:
        text: that others may have written, or libraries.
        keep: characters that stay, such as line breaks.
    """
    return _UNSHOWN.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def may_act(payload: bytes | memoryview) -> bool:
    """Whether JSON may contain terminal control characters; a cheap test.

    Those below 32 are written with a backslash, others as themselves, and JSON of two or four bytes a character has
    zeros in it.
    """
    content = bytes(payload)
    return not content.isascii() or any(mark in content for mark in (b"\\", b"\x7f", b"\x00"))


def check_texts(plain: Any, where: str = "", *, free: bool = False) -> Any:
    """Return parsed JSON without terminal control characters.

    Args:
        plain: what was received.
        where: names it in an error.
        free: it is written for people: such characters become spaces.

    Raises:
        ProtocolError: a name has such characters; the text says where.
    """
    if isinstance(plain, str):
        if free:
            return ACTING.sub(" ", plain)
        if ACTING.search(plain) is not None:
            raise ProtocolError(f"{where} is {plain!r:.80}, but must be made of printable characters")
        return plain
    if isinstance(plain, Mapping):
        found = {}
        for key, value in plain.items():
            name = check_texts(key, f"a key of {where}", free=free)
            found[name] = check_texts(value, f"{where}.{name:.80}", free=free or name in FREE_TEXTS)
        return found
    if isinstance(plain, list):
        return [check_texts(item, f"{where}[{place}]", free=free) for place, item in enumerate(plain)]
    return plain
