"""What goes on beside an export, put off: tools log every pass, and warn of their own internals; Python collects."""

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pause_garbage_collection", "quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """While it is entered, nothing below an error is logged, and no warning is shown; what matters is an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """While it is entered, no garbage is collected: looking through a graph's nodes takes a third of making them."""
    if not gc.isenabled():  # by somebody who will turn it on again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
