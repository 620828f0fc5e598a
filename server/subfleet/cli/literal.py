"""Text on a terminal, letter by letter: what devices call themselves is no markup."""

from rich.text import Text

from subfleet.protocol.text import make_printable

__all__ = ["literal"]


def literal(text: str, style: str = "") -> Text:
    """What rich shows as it stands: no markup, no links, no emoji codes."""
    return Text(make_printable(text), style=style)
