"""Explains in one sentence why an installed package cannot be loaded, and what to do."""

import re
from importlib.metadata import PackageNotFoundError, version

from subfleet.protocol.errors import BrokenError

_NUMPY = re.compile(r"numpy|multiarray|_ARRAY_API", re.IGNORECASE)
_NUMPY_TOO_OLD = re.compile(r"compiled against (ABI|API) version \S+ but this version of numpy")
_MOST_CHARACTERS = 200


def explain_load_error(package: str, error: BaseException) -> BrokenError:
    """Make the error for a package that raised something while it was loaded or tried; "" names no package."""
    cause = find_cause(error)
    what = f"the package {package!r} is there, but cannot be loaded" if package else "it raised an error"
    return BrokenError(f"{what} ({cause}); {_find_remedy(package, cause)}")


def find_cause(error: BaseException) -> str:
    """Describe the innermost cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.{_MOST_CHARACTERS}}" if text else type(error).__name__


def _find_remedy(package: str, cause: str) -> str:
    if cause.startswith(MemoryError.__name__):
        return "free some memory, add swap, or raise the limit of the container"
    # Never suggest to reinstall the package itself: that would overwrite a board's own build for its GPU.
    if package != "numpy" and _NUMPY.search(cause):
        installed = _read_version("numpy")
        if _NUMPY_TOO_OLD.search(cause) or not installed.startswith("2"):
            return (
                f"this build was made for a newer NumPy than {installed or 'is here'}; run: pip install --upgrade numpy"
            )
        return f"this build was made for NumPy 1, but NumPy {installed} is here; run: pip install 'numpy>=1.26,<2'"
    return "install the libraries that this build of it needs, or another build"


def _read_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
