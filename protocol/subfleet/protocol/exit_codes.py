"""Numbered exits of every Subfleet process.

A number never changes its meaning; docs/reference/exit-codes.md says what to do about each.
"""

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """Exit codes. Shells have no codes in the hundreds, so tens group the causes."""

    OK = 0
    INTERNAL = 1  # a defect of ours
    USAGE = 2  # a wrong option or argument, as argparse and click use it
    CONFIG = 10  # a configuration file that cannot be used
    FILE = 11  # a file or folder that is missing or cannot be read or written
    DATA = 12  # training data that cannot be used
    TRANSPORT = 20  # the broker cannot be reached or refuses us
    PROTOCOL = 21  # what was received is not a valid message
    PORT = 22  # an address that is already taken
    TAKEN = 23  # another process serves this fleet, or has this device's id
    EXPORT = 30  # a program that cannot be written or does not match PyTorch
    TRAINING = 31  # a training step that failed on the device
    MISSING_EXTRA = 40  # a package that this command needs is not installed, or does not work here
    SYSTEM = 41  # an operating system that Subfleet does not run on
    RUN = 50  # a run that did not reach its end
    INTERRUPTED = 130  # Ctrl-C, as shells use it
