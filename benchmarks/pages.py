"""Writes the pages of results."""

from pathlib import Path

__all__ = ["write_page"]

_REMARKS = "\n## Remarks\n"


def write_page(path: Path, text: str) -> None:
    """Write measurements to a page, and keep the remarks that a person added at its end.

    Args:
        path: the page.
        text: Markdown that ends with a newline.
    """
    last = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(text + "".join(last.partition(_REMARKS)[1:]), encoding="utf-8")
