"""Starts child processes with the same Python and the same module search path."""

import json
import sys

_START = (
    "import json, sys; from importlib import import_module; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "import_module(sys.argv.pop(1)).main(sys.argv[1:])"
)


def make_child_command(module: str, *arguments: str) -> list[str]:
    """Make the command that calls a module's `main` with some arguments in a new process.

    Args:
        module: its full name.
        arguments: handed to `main` as a list.
    """
    return [sys.executable, "-c", _START, json.dumps(sys.path), module, *arguments]
