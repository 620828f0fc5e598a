from collections.abc import Sequence
from typing import final

EXECUTORCH_VERSION: str
"""The release of ExecuTorch whose libraries are inside, such as "1.5.1"."""

class ExecutorchError(RuntimeError):
    """The runtime refused a program or an argument, or failed while it ran.

    Attributes:
        code: ExecuTorch's name for it: "InvalidProgram", "InvalidArgument", "OperatorMissing", "OutOfResources" ...
    """

    code: str

@final
class TensorInfo:
    """A tensor that a method takes or gives; its elements are in row-major order.

    Attributes:
        dtype: NumPy's name: "float32", "int64", "bool" ...
        shape: its fixed sizes; () is a scalar.
        size_bytes: of its elements.
        planned: it lies in the method's arenas, so that it is copied in or out; others are used where they are.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def planned(self) -> bool: ...

@final
class Arena:
    """Memory that several methods lie in, one of which runs at a time; it takes none until one has run.

    Args:
        size_bytes: room for the largest of them.

    Raises:
        MemoryError: the system has no such room.
    """

    def __init__(self, size_bytes: int) -> None: ...
    @property
    def size_bytes(self) -> int: ...
    def release(self) -> None:
        """Give the memory back to the system until the next run."""

@final
class Method:
    """A method that is ready to run; its memory goes back to the system when the object goes.

    Attributes:
        inputs: what `execute` takes.
        outputs: what `execute` writes.
        backends: the names of the delegates that it uses, such as "XnnpackBackend".
        arena_bytes: sizes of the planned arenas; all of them are held as long as the method, or as the shared arena.
        structure_bytes: what the runtime's own structures take beside them.
        scratch_peak_bytes: the most that kernels held at once in calls so far, given back after each kernel.
    """

    @property
    def inputs(self) -> tuple[TensorInfo, ...]: ...
    @property
    def outputs(self) -> tuple[TensorInfo, ...]: ...
    @property
    def backends(self) -> tuple[str, ...]: ...
    @property
    def arena_bytes(self) -> tuple[int, ...]: ...
    @property
    def structure_bytes(self) -> int: ...
    @property
    def scratch_peak_bytes(self) -> int: ...
    def execute(self, inputs: Sequence[object], outputs: Sequence[object]) -> None:
        """Run once. Other Python threads run meanwhile; calls of one method wait for each other.

        Args:
            inputs: contiguous arrays (NumPy's, or anything with the buffer protocol) of exactly the types and shapes of
                `inputs`; they are read where they are.
            outputs: contiguous arrays that can be written, of exactly those of `outputs`; none may share memory with
                another argument. What they hold after an error is undefined.

        Raises:
            ExecutorchError: an array does not fit ("InvalidArgument"), or the program failed.
            MemoryError: the system has no memory for a kernel.
        """

@final
class Program:
    """A verified program.

    Args:
        data: its bytes, which are kept, not copied, where they are aligned to 16 bytes.

    Attributes:
        method_names: of the methods inside.

    Raises:
        ExecutorchError: the bytes are no program of this runtime ("InvalidProgram").
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None: ...
    @property
    def method_names(self) -> tuple[str, ...]: ...
    def load_method(
        self,
        name: str = "forward",
        *,
        memory_limit_bytes: int | None = None,
        arena: Arena | None = None,
        own_workspace: bool = False,
    ) -> Method:
        """Take the memory that is planned for a method and make it ready.

        Args:
            name: of the method.
            memory_limit_bytes: the most that its arenas may take together; checked before any is taken.
            arena: where they lie; methods of one arena wait for each other. None gives it memory of its own.
            own_workspace: whether XNNPACK takes a workspace for this method alone. Otherwise all methods of the process
                share one, which is as large as the largest of them needs.

        Raises:
            ExecutorchError: there is no such method, an operator or a backend is missing, or the plan is beyond the
                limit ("OutOfResources").
            MemoryError: the system has no memory for the arenas.
        """

def thread_count() -> int:
    """The threads of the pool, which all methods of the process share; at first one for each performance core."""

def set_thread_count(count: int) -> None:
    """Make a pool of so many threads, 1 or more.

    Raises:
        ExecutorchError: methods are loaded ("InvalidState"): they hold on to the old pool, so drop them first.
    """
