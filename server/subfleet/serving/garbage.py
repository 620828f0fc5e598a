"""Python's look for garbage, which stops the loop while it lasts."""

import gc

__all__ = ["freeze_what_is_loaded"]


def freeze_what_is_loaded() -> None:
    """Leave all that is there now out of later looks for garbage: modules and tables, which stay as long as a process.

    PyTorch alone is hundreds of thousands of objects, and to go over them takes a tenth of a second. Call it once, when
    all is loaded: what is garbage by then is collected first.
    """
    gc.collect()
    gc.freeze()
