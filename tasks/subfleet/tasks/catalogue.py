"""The data sets that are installed: entry points, ours like everybody else's.

Reading their names imports none of them, and one is imported when it is asked for.
"""

from typing import Any

from subfleet.protocol.registry import Registry
from subfleet.tasks.named_dataset import NamedDataset

__all__ = ["DATASETS"]


def _create(found: Any) -> Any:
    """What is registered: a data set, or a function that takes nothing and gives one."""
    return found() if callable(found) else found


def _problem(found: object, name: str) -> str:
    if not isinstance(found, NamedDataset):
        wanted = "a NamedDataset of subfleet.tasks.named_dataset, or a function that gives one"
        return f"it is {type(found).__name__}, but must be {wanted}"
    if found.name != name:
        return f"its name is {found.name!r:.80}, but must be {name!r:.80}"
    # Its parts are named NAME:train and NAME:test, as module:function is.
    return "" if name.isidentifier() else f"{name!r:.80} must be letters, digits and underscores"


DATASETS = Registry[NamedDataset]("subfleet.datasets", "data set", read=_create, check=_problem)
"""Every data set that is installed, by the name that `[data] name = "..."` and `NAME:train` give."""
