"""How a process of ours starts another one: the same Python, which looks for packages in the same places."""

import json
import sys

__all__ = ["make_child_command"]

_START = (
    "import json, sys; from importlib import import_module; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "import_module(sys.argv.pop(1)).main(sys.argv[1:])"
)


def make_child_command(module: str, *arguments: str) -> list[str]:
    """The command that calls the function `main` of a module with some arguments, in a process of its own.

    Args:
        module: its full name.
        arguments: handed to `main` as a list.
    """
    return [sys.executable, "-c", _START, json.dumps(sys.path), module, *arguments]
