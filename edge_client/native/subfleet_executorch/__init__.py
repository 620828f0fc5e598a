"""Runs ExecuTorch programs on ExecuTorch's C++ runtime: no PyTorch, no copies of what goes in.

>>> program = Program(Path("step.pte").read_bytes())
>>> method = program.load_method("forward", memory_limit_bytes=200_000_000)
>>> outputs = [numpy.empty(info.shape, info.dtype) for info in method.outputs]
>>> method.execute(inputs, outputs)
"""

from subfleet_executorch._native import (
    EXECUTORCH_VERSION,
    Arena,
    ExecutorchError,
    Method,
    Program,
    TensorInfo,
    set_thread_count,
    thread_count,
)

__all__ = [
    "EXECUTORCH_VERSION",
    "Arena",
    "ExecutorchError",
    "Method",
    "Program",
    "TensorInfo",
    "set_thread_count",
    "thread_count",
]
