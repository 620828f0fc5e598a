"""Sessions of ONNX Runtime: opening them, checking their values, and explaining their errors."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from subfleet.protocol.errors import TrainingError
from subfleet.protocol.programs import ValueInfo
from subfleet.trainers.onnx_references import check_self_contained

PROVIDERS: Mapping[str, str] = MappingProxyType({"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"})
GIVE_BACK = "memory.enable_memory_arena_shrinkage"
"""Run setting that releases free memory of the named arenas after the run."""
_ERRORS_ONLY = 3
# External weights would be read from this folder, which does not exist; such models are refused before.
_NO_FOLDER = "/nonexistent"
# Messages of its exceptions if the system refused memory; they are not MemoryErrors.
_NO_MEMORY = ("Failed to allocate memory", "std::bad_alloc", "out of memory")
# Messages about a program that is newer than the runtime; each has the program's version, then the runtime's.
_TOO_NEW: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("ONNX IR version", re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")),
    ("ONNX opset", re.compile(r"Opset (\d+) is under development.*?till opset (\d+)", re.DOTALL)),
)
# The source location at the beginning of a message.
_OWN_SOURCE = re.compile(r"(\[ONNXRuntimeError\] : \d+ : \w+ : )?(/\S+:\d+ .*\) (?=[A-Z]))?")
_TYPES: Mapping[str, str] = MappingProxyType({"F32": "tensor(float)", "I64": "tensor(int64)", "F64": "tensor(double)"})


def open_session(
    runtime: ModuleType,
    model: bytes | memoryview,
    threads: int,
    provider: str = "cpu",
    *,
    writers: str = "",
    shares_arena: bool = False,
) -> Any:
    """Open a session for one program; with its own arena, its memory can be measured and is freed with it.

    Args:
        runtime: the package `onnxruntime`.
        model: the program's bytes.
        threads: number of threads.
        provider: "cpu" or "cuda".
        writers: the tools that wrote the program, for error messages.
        shares_arena: whether it uses the arena of the process.

    Raises:
        TrainingError: the runtime refuses the program, or the program refers to other files.
        MemoryError: the system refused memory.
    """
    check_self_contained(model)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # The arena is freed with its session; it reuses freed blocks tightly, whereas planned patterns reserve memory for a
    # whole run. Measured on two residual blocks: 26 MB; with patterns 46 MB; without the arena 34 to 58 MB.
    # Planned reuse keeps the block of a dead tensor for a later one of its shape, so others cannot use it: 33 MB with
    # it, 26 MB without. The exporter plans with these settings (`subfleet.export.memory.onnx_run`).
    options.enable_cpu_mem_arena = True
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    # Spinning threads drain batteries, but waking one for each operator takes up to a third of a step. So they spin
    # only during a step.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.load_model_format", "ONNX")  # read exactly what was checked
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _NO_FOLDER)
    if shares_arena:
        options.add_session_config_entry("session.use_env_allocators", "1")
    failure = f"ONNX Runtime {runtime.__version__} refused the program{f' that {writers} wrote' if writers else ''}"
    providers = [PROVIDERS[provider]]
    return call_guarded(lambda: runtime.InferenceSession(bytes(model), options, providers=providers), failure)


def check_values(kind: str, named: tuple[ValueInfo, ...], actual: Any) -> None:
    """Compare a session's inputs or outputs with its manifest; raises TrainingError if they differ."""
    expected = {(value.name, _TYPES.get(value.dtype, value.dtype), value.shape) for value in named}
    present = {(value.name, value.type, tuple(value.shape)) for value in actual}
    if expected != present:
        odd = sorted(str(entry) for entry in expected ^ present)
        raise TrainingError(
            f"the program's {kind} differ from its manifest, first in {odd[0]:.120}; it must be exported again"
        )


def call_guarded(call: Callable[[], Any], failure: str = "ONNX Runtime refused the program") -> Any:
    """Call the runtime, and translate its errors.

    Args:
        call: the call.
        failure: the beginning of the error message.

    Raises:
        MemoryError: the system refused memory.
        TrainingError: any other failure.
    """
    try:
        return call()
    except MemoryError:
        raise
    # ONNX Runtime's exceptions have no common base but Exception.
    except Exception as error:
        if any(words in str(error) for words in _NO_MEMORY):
            raise MemoryError(str(error)) from error
        for kind, pattern in _TOO_NEW:
            if match := pattern.search(str(error)):
                raise TrainingError(
                    f"{failure}: it is of {kind} {match[1]}, but this runtime reads {match[2]} at most; install a "
                    "newer runtime, or export with an older toolchain"
                ) from error
        reason = _OWN_SOURCE.sub("", str(error).strip().partition("\n")[0], count=1)
        raise TrainingError(f"{failure} ({reason:.300}); it must be exported again") from error
