"""ExecuTorch through its own Python bindings, which need PyTorch; programs run in its plain runtime."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch  # before the bindings, which are linked against its libraries

try:  # `portable_lib` re-exports the same, but loads the whole exporter, which takes seconds and memory
    from executorch.extension.pybindings import _C as bindings  # noqa: N811 - it is no constant
except ImportError:  # ExecuTorch before 1.5
    from executorch.extension.pybindings import portable_lib as bindings

from subfleet.protocol.errors import TrainingError
from subfleet.protocol.programs import Program
from subfleet.trainers.executorch_methods import METHOD, MethodShapes, check_manifest, check_note, make_model
from subfleet.trainers.prediction import Model
from subfleet.trainers.runtime import Array, CopiedPrograms, RunArrays

# The message of PyTorch's allocator, which holds the outputs, if the system refused memory.
_NO_MEMORY = "can't allocate memory"
# PyTorch's numbers of types, which the bindings return.
_DTYPES: Mapping[int, str] = {0: "uint8", 4: "int64", 6: "float32", 7: "float64", 11: "bool"}


class BindingsRuntime:
    """See `Runtime`."""

    def __init__(self) -> None:
        # PyTorch's code for handing over tensors takes 1.2 MB, for any program.
        torch.from_numpy(np.zeros(1, np.float32)).clone().numpy()

    @property
    def name(self) -> str:
        """See `Runtime.name`."""
        return f"ExecuTorch {version('executorch')} with PyTorch"

    def programs(self, threads: int) -> CopiedPrograms:
        """See `Runtime.programs`."""
        return CopiedPrograms(_load, threads)

    def open_model(self, path: Path, body: bytes, threads: int) -> Model:
        """See `Runtime.open_model`."""
        _set_threads(threads)
        program = _LoadedProgram(body)

        def infer(samples: Array) -> Array:
            return np.array(program.execute([_make_tensor(samples)])[0].numpy())

        return make_model(path, program.shapes(METHOD), note=program.note, infer=infer)


class _LoadedProgram:
    """A program and its loaded methods.

    References must be to this object: methods read the program's memory, and the program that of its file, but they do
    not keep each other alive.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._program = _call_guarded(
            lambda: bindings._load_program_from_buffer(  # noqa: SLF001 - as with every name that the bindings give
                body, program_verification=bindings.Verification.InternalConsistency
            )
        )
        self.method_names = {self._program.get_method_name(index) for index in range(self._program.num_methods())}
        if METHOD not in self.method_names:
            raise TrainingError(f"the ExecuTorch program has no method {METHOD!r}; it must be exported again")
        self._methods: dict[str, Any] = {}
        self._method(METHOD)

    def shapes(self, method: str) -> MethodShapes:
        """Read the inputs and outputs of a method."""
        shapes: MethodShapes = _call_guarded(lambda: _read_shapes(self._program.method_meta(method)))
        return shapes

    def execute(self, inputs: Sequence[torch.Tensor], name: str = METHOD) -> Sequence[torch.Tensor]:
        """Run once; results are memory that the next run overwrites, or copies of inputs."""
        method = self._method(name)
        # By default it would hold every result twice: where the kernels wrote it, and as a copy.
        results: Sequence[torch.Tensor] = _call_guarded(lambda: method(inputs, clone_outputs=False))
        handed = {tensor.data_ptr() for tensor in inputs}
        return [result.clone() if result.data_ptr() in handed else result for result in results]

    def note(self, name: str) -> str:
        """Read the text that a method returns as a tensor of bytes; empty if there is no such method.

        Raises:
            TrainingError: the runtime failed, or the method returns something else.
        """
        if name not in self.method_names:
            return ""
        check_note(name, self.shapes(name))
        text: torch.Tensor = self.execute([], name)[0]
        return text.numpy().tobytes().decode(errors="replace")

    def _method(self, name: str) -> Any:
        if name not in self._methods:
            self._methods[name] = _call_guarded(lambda: self._program.load_method(name))
        return self._methods[name]


def _read_shapes(meta: Any) -> MethodShapes:
    def of(info: Any) -> tuple[str, tuple[int, ...]]:
        return _DTYPES.get(info.dtype(), str(info.dtype())), tuple(info.sizes())

    return MethodShapes(
        inputs=tuple(of(meta.input_tensor_meta(i)) for i in range(meta.num_inputs())),
        outputs=tuple(of(meta.output_tensor_meta(i)) for i in range(meta.num_outputs())),
    )


def _load(program: Program, threads: int) -> RunArrays:
    _set_threads(threads)
    loaded = _LoadedProgram(bytes(program.body))
    check_manifest(program.manifest, loaded.shapes(METHOD))
    inputs = [value.name for value in program.manifest.inputs]
    outputs = [value.name for value in program.manifest.outputs]

    def run(values: Mapping[str, Array]) -> Mapping[str, Array]:
        results = loaded.execute([_make_tensor(values[name]) for name in inputs])
        return {name: result.numpy() for name, result in zip(outputs, results, strict=True)}

    return run


def _set_threads(threads: int) -> None:
    """Set the threads of the whole process: PyTorch's pool and XNNPACK's."""
    torch.set_num_threads(threads)
    # Unsafe only while a program runs. XNNPACK otherwise uses every core, and there is no public setting.
    if bindings._threadpool_get_thread_count() != threads:  # noqa: SLF001 - as the line above says
        bindings._unsafe_reset_threadpool(threads)  # noqa: SLF001 - as the line above says


def _make_tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _call_guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except MemoryError:
        raise
    # The bindings raise RuntimeError for most failures, and other errors for wrong arguments.
    except Exception as error:
        if _NO_MEMORY in str(error):
            raise MemoryError(str(error)) from error
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(f"ExecuTorch refused the program ({reason:.300}); it must be exported again") from error
