"""Makes the native binding of ExecuTorch look as if it were not installed, here and in processes started from here."""

import os
import sys
from pathlib import Path

import pytest

NO_BINDING = "subfleet-executorch is not built; run: make native (needs a C++ compiler)"
# What every Python process runs before anything else; to import the name then fails as where there is no such package.
_HIDING = "import sys; sys.modules['subfleet_executorch'] = None"


def hide_binding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide it until the test ends; `folder` takes a file."""
    monkeypatch.setitem(sys.modules, "subfleet_executorch", None)
    (folder / "sitecustomize.py").write_text(_HIDING)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
