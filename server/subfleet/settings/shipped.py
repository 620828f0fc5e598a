"""The runs that come with the package: every TOML file in the folder `runs`, by its name."""

from functools import cache
from importlib import resources

__all__ = ["shipped_names", "shipped_text"]


@cache
def shipped_names() -> tuple[str, ...]:
    """The names of the shipped runs, "quickstart" first and the others in alphabetical order."""
    files = (file.name for file in (resources.files("subfleet.settings") / "runs").iterdir())
    names = (name.removesuffix(".toml") for name in files if name.endswith(".toml"))
    return tuple(sorted(names, key=lambda name: (name != "quickstart", name)))


def shipped_text(name: str) -> str:
    """The text of a shipped run.

    Raises:
        KeyError: there is none of that name.
    """
    if name not in shipped_names():
        raise KeyError(name)
    return (resources.files("subfleet.settings") / "runs" / f"{name}.toml").read_text(encoding="utf-8")
