"""Fake packages that fail like builds for another board, and are found before the real ones."""

import os
from collections.abc import Mapping
from pathlib import Path

DYING = "import os, signal\nos.kill(os.getpid(), signal.{number})\nsignal.pause()\n"
ABORTING = "import os, sys\nsys.stderr.write('terminate called: no such device\\n')\nsys.stderr.flush()\nos.abort()\n"
LEAVING = "import os\nos.write(2, b'no licence\\n')\nos._exit(3)\n"
HANGING = "import time\ntime.sleep(600)\n"
RAISING = "raise ImportError('libboard.so.8: cannot open shared object file')\n"
FOR_NUMPY_1 = (
    "print('A module that was compiled using NumPy 1.x cannot be run in NumPy 2')\n"
    "try:\n    raise AttributeError('_ARRAY_API not found')\n"
    "except AttributeError as error:\n    raise SystemError('initialization failed') from error\n"
)
FOR_A_NEWER_NUMPY = "raise RuntimeError('module compiled against API version 0xe but this version of numpy is 0xd')\n"
_REAL = """
import importlib, os, signal, sys
sys.path.remove(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
del sys.modules["onnxruntime"]
real = sys.modules["onnxruntime"] = importlib.import_module("onnxruntime")
def step(session, binding, options=None):
    {step}
real.InferenceSession.run_with_iobinding, whole_step = step, real.InferenceSession.run_with_iobinding
"""
DYING_AS_IT_TRAINS = _REAL.format(step="os.kill(os.getpid(), signal.SIGILL)")
RAISING_AS_IT_TRAINS = _REAL.format(step="raise RuntimeError('Numpy is not available')")
WRONG_AS_IT_TRAINS = (
    _REAL.format(step="whole_step(session, binding, options)")
    + """
def bind(binding, name, array):
    whole_bind(binding, name, array * 2 if array.ndim > 1 else array)
real.IOBinding.bind_cpu_input, whole_bind = bind, real.IOBinding.bind_cpu_input
"""
)


def hide_modules(*names: str) -> str:
    """A `sitecustomize` module with which an import of one of the names fails as if it were not installed."""
    return f"import sys\nfor name in {names!r}:\n    sys.modules[name] = None\n"


def write_packages(folder: Path, packages: Mapping[str, str]) -> dict[str, str]:
    """Write packages, given as source by name, and return an environment in which Python finds them first.

    A name with a suffix is the name of a file.
    """
    packages_folder = folder / "site-packages"
    for name, text in packages.items():
        path = packages_folder / name if name.endswith(".py") else packages_folder / name / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    search_path = os.pathsep.join(filter(None, [str(packages_folder), os.environ.get("PYTHONPATH")]))
    # Results that are cached for the real packages stay untouched.
    return {**os.environ, "PYTHONPATH": search_path, "XDG_CACHE_HOME": str(folder / "cache")}
