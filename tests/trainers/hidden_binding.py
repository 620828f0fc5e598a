"""Hides the native binding of ExecuTorch from this process and from the processes that it starts."""

import os
import sys
from pathlib import Path

import pytest

NO_BINDING = "subfleet-executorch is not built; run: make native (needs a C++ compiler)"
# Every Python process runs this first; importing the name then fails as if the package were not installed.
_HIDING = "import sys; sys.modules['subfleet_executorch'] = None"


def hide_binding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the binding until the test ends; `folder` receives a `sitecustomize.py`."""
    monkeypatch.setitem(sys.modules, "subfleet_executorch", None)
    (folder / "sitecustomize.py").write_text(_HIDING)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
