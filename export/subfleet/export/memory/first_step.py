"""Measures what the first step of an ExecuTorch program takes in a new process, like a device's.

The heap of an exporter has holes of any size, where blocks lie that a device takes from the system.

    python -m subfleet.export.memory.first_step < a line of JSON with shapes and types, and the program
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from subfleet.export.memory.heap import measure_passing_bytes

_TIMEOUT_S = 600
Shape = tuple[tuple[int, ...], str]
"""The shape of an array, and its type's name in NumPy."""


def measure_first_step(
    body: bytes, inputs: Sequence[Shape], outputs: Sequence[Shape], *, freed_bytes: int
) -> int | None:
    """Run a program once in a new process, and measure what it took beyond what it keeps.

    Args:
        body: the program.
        inputs: its inputs.
        outputs: its outputs.
        freed_bytes: size of a block that a device frees before: the weights that it has read. glibc keeps all later
            blocks of up to that size in its heap, unless it is above 32 MB.

    Returns:
        The bytes; None if the process fails.
    """
    header = json.dumps({"inputs": inputs, "outputs": outputs, "freed_bytes": freed_bytes}).encode()
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        process = subprocess.run(
            [sys.executable, "-m", __name__],
            input=header + b"\n" + body,
            capture_output=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
        return int(process.stdout)
    return None


def _load_step(
    body: bytes, inputs: Sequence[Shape], outputs: Sequence[Shape], freed_bytes: int
) -> Callable[[], object]:
    """Load a program with the native binding; the result runs it once on zeros."""
    native = importlib.import_module("subfleet_executorch")
    np.empty(freed_bytes, np.uint8)  # freed at once
    native.set_thread_count(1)
    method = native.Program(body).load_method("forward")
    given, results = ([np.zeros(shape, dtype) for shape, dtype in arrays] for arrays in (inputs, outputs))
    return lambda: method.execute(given, results)


def main() -> None:
    """Measure the program that standard input holds, and print the bytes."""
    header = json.loads(sys.stdin.buffer.readline())
    run = _load_step(sys.stdin.buffer.read(), **header)
    sys.stdout.write(f"{measure_passing_bytes(run)}\n")


if __name__ == "__main__":
    main()
