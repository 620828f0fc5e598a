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
"""Setting of a run that gives back the memory of the named arenas that is free after it."""
_ERRORS_ONLY = 3
# Weights in files beside a model would be read from this folder, and there is none; no such model gets so far.
_NO_FOLDER = "/nonexistent"
# What its exceptions say where the system gave no memory; none of them is a MemoryError.
_NO_MEMORY = ("Failed to allocate memory", "std::bad_alloc", "out of memory")
# What it says of a program that is newer than it is; each has the program's number and then the runtime's.
_TOO_NEW: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("ONNX IR version", re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")),
    ("ONNX opset", re.compile(r"Opset (\d+) is under development.*?till opset (\d+)", re.DOTALL)),
)
# Where in its own source it raised, up to the sentence itself.
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
    """Open a session for one program; with an arena of its own its memory can be measured and is freed with it.

    Args:
        runtime: the package `onnxruntime`.
        model: the program's bytes.
        threads: that it runs on.
        provider: what computes, "cpu" or "cuda".
        writers: the tools that wrote the program, for the error's sentence.
        shares_arena: whether it works in the arena of the process.

    Raises:
        TrainingError: the runtime refuses the program, or it refers out of its own bytes.
        MemoryError: the system gave no memory.
    """
    check_self_contained(model)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # The arena belongs to the session and goes with it; it fits freed blocks tightly, where planned patterns set memory
    # aside for a whole run. Measured on two residual blocks: 26 MB; with patterns 46 MB; without the arena 34 to 58 MB.
    # Planned reuse keeps the block of a dead tensor for a later one of its shape, so that no other may have it: 33 MB
    # with it, 26 MB without. The exporter plans with these settings (`subfleet.export.memory.onnx_run`).
    options.enable_cpu_mem_arena = True
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    # Threads that wait for work by spinning drain batteries; but to wake one for each operator of a step takes up to a
    # third of the step. So they spin inside a step alone.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.load_model_format", "ONNX")  # what was checked is what is read
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _NO_FOLDER)
    if shares_arena:
        options.add_session_config_entry("session.use_env_allocators", "1")
    what = f"ONNX Runtime {runtime.__version__} refused the program{f' that {writers} wrote' if writers else ''}"
    providers = [PROVIDERS[provider]]
    return call_guarded(lambda: runtime.InferenceSession(bytes(model), options, providers=providers), what)


def check_values(kind: str, named: tuple[ValueInfo, ...], actual: Any) -> None:
    """Compare a session's inputs or outputs with those of its manifest; raises TrainingError where they differ."""
    expected = {(value.name, _TYPES.get(value.dtype, value.dtype), value.shape) for value in named}
    present = {(value.name, value.type, tuple(value.shape)) for value in actual}
    if expected != present:
        odd = sorted(str(entry) for entry in expected ^ present)
        raise TrainingError(
            f"the program's {kind} differ from its manifest, first in {odd[0]:.120}; it must be exported again"
        )


def call_guarded(call: Callable[[], Any], what: str = "ONNX Runtime refused the program") -> Any:
    """Call the runtime, and translate its errors.

    Args:
        call: what to do.
        what: the beginning of the sentence where it fails.

    Raises:
        MemoryError: the system gave no memory.
        TrainingError: anything else went wrong.
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
                    f"{what}: it is of {kind} {match[1]}, but this runtime reads {match[2]} at most; install a newer "
                    "runtime, or export with an older toolchain"
                ) from error
        reason = _OWN_SOURCE.sub("", str(error).strip().partition("\n")[0], count=1)
        raise TrainingError(f"{what} ({reason:.300}); it must be exported again") from error
