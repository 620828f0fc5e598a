"""Text that others wrote, fit to be shown."""

__all__ = ["printable"]


def printable(text: str) -> str:
    """The text with a space for every character that a terminal would act on, line breaks among them."""
    return "".join(character if character.isprintable() else " " for character in text)
