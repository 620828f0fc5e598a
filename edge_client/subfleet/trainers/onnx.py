"""Stock ONNX Runtime, on the CPU or with its CUDA provider. Needs no PyTorch and no `onnx`.

Carried values stay outside of the runtime's arena, so that the arena holds only the values of one step and can be
released completely. Measured against arrays that the runtime allocates, on one core: a pre-activation ResNet-18 of full
width takes 293 MB instead of 338 MB, of width 1/4 51 MB instead of 56 MB, with step times within 2 % of each other;
between two jobs 5 MB instead of 50 MB.

The many small sessions of a chain share one arena, since only one of them runs at a time. Measured with eight programs
of 75 MB each that have run: 79 MB with the shared arena, 13 MB after it is released, 544 MB with separate arenas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from subfleet.arrays import numpy_dtype
from subfleet.protocol.errors import ConfigError, MissingExtraError, TrainingError
from subfleet.protocol.loading import explain_load_error
from subfleet.protocol.programs import Program
from subfleet.protocol.silence import import_silently
from subfleet.trainers.onnx_sessions import GIVE_BACK, PROVIDERS, call_guarded, check_values, open_session
from subfleet.trainers.prediction import FREE_BATCH_SIZE, Model, read_form
from subfleet.trainers.runtime import Array, Operands, RunProgram, RuntimeKind, Value, make_buffer, unpack
from subfleet.trainers.trainer import RuntimeTrainer

# The smallest model: one Identity from "x" to "y", float32 of shape (1,), opset 13, IR version 8.
_IDENTITY = (
    b'\x08\x08:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01wZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
_SAME_AS_REQUESTED = 1
"""The shared arena grows by exactly what is requested, so that all of it can be released."""
_INPUT_TYPES: Mapping[str, str] = MappingProxyType({"tensor(float)": "float32", "tensor(int64)": "int64"})


class OnnxRuntime:
    """See `Runtime`.

    Args:
        module: the package `onnxruntime`.
        provider: "cpu", or "cuda" with a build that supports it.
    """

    def __init__(self, module: ModuleType, provider: str) -> None:
        self._module = module
        self._provider = provider

    @property
    def name(self) -> str:
        """See `Runtime.name`."""
        return f"ONNX Runtime {self._module.__version__} with {', '.join(self._module.get_available_providers())}"

    def programs(self, threads: int) -> "_OnnxPrograms":
        """See `Runtime.programs`."""
        return _OnnxPrograms(self._module, self._provider, threads)

    def open_model(self, path: Path, body: bytes, threads: int) -> Model:
        """See `Runtime.open_model`."""
        session = open_session(self._module, body, threads, self._provider)
        inputs = session.get_inputs()
        if len(inputs) != 1 or inputs[0].type not in _INPUT_TYPES or not _takes_samples(inputs[0].shape):
            raise TrainingError(
                f"model {str(path)!r} must have one input of shape (batch, *sample shape), and only the batch "
                "may be open"
            )
        name = inputs[0].name
        batch, *sample_shape = inputs[0].shape
        output = session.get_outputs()[0].name
        notes = session.get_modelmeta().custom_metadata_map
        form = read_form(
            path,
            lambda name: notes.get(name, ""),
            sample_shape=tuple(sample_shape),
            dtype=_INPUT_TYPES[inputs[0].type],
        )

        def infer(samples: Array) -> Array:
            return np.asarray(call_guarded(lambda: session.run([output], {name: samples}))[0])

        return Model(form=form, batch_size=batch if isinstance(batch, int) else FREE_BATCH_SIZE, infer=infer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A value of the runtime; on the CPU it shares the memory of our array, which must live as long."""

    value: Any
    array: Array | None
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class _OnnxPrograms:
    """See `Programs`."""

    def __init__(self, module: ModuleType, provider: str, threads: int) -> None:
        self._module = module
        self._provider = provider
        self._threads = threads

    def open(self, package: Program) -> Callable[[str], RunProgram]:
        """See `Programs.open`."""
        shares_arena = package.manifest.chain is not None
        if shares_arena:
            _share_arena(self._module)
        program = unpack(package)
        return lambda name: self._load(program(name), shares_arena=shares_arena)

    def hold(self, array: Array) -> _Held:
        """See `Programs.hold`."""
        value = self._value(array, self._provider)
        own = array if self._provider == "cpu" else None
        return _Held(value=value, array=own, shape=array.shape, dtype=array.dtype)

    def twin(self, value: _Held) -> _Held:
        """See `Programs.twin`."""
        return self.hold(make_buffer(value.shape, value.dtype))

    def array(self, value: Value) -> Array:
        """See `Programs.array`."""
        if not isinstance(value, _Held):
            array: Array = value
            return array
        # the array of `numpy()` does not keep its value alive.
        return np.array(value.value.numpy()) if value.array is None else value.array

    def _load(self, program: Program, *, shares_arena: bool) -> RunProgram:
        manifest = program.manifest
        writers = ", ".join(f"{tool} {version}" for tool, version in sorted(manifest.versions.items()))
        session = open_session(
            self._module, program.body, self._threads, self._provider, writers=writers, shares_arena=shares_arena
        )
        check_values("inputs", manifest.inputs, session.get_inputs())
        check_values("outputs", manifest.outputs, session.get_outputs())
        last_run = self._module.RunOptions()
        last_run.add_run_config_entry(GIVE_BACK, "cpu:0" if self._provider == "cpu" else "cpu:0;gpu:0")
        last_run.add_run_config_entry("gpu_graph_id", "0")  # its default; without it each run costs a C++ exception
        results = [(value.name, value.shape, numpy_dtype(value.dtype)) for value in manifest.outputs]

        def run(operands: Operands, fed: Mapping[str, Value], *, last: bool = False) -> Mapping[str, Value]:
            if operands.prepared is None:
                operands.prepared = self._prepare(session, operands, results)
            binding, buffers = operands.prepared
            for name, array in fed.items():
                binding.bind_cpu_input(name, array if array.flags.c_contiguous else array.copy(order="C"))
            call_guarded(lambda: session.run_with_iobinding(binding, last_run if last else None))
            for name, array in fed.items():
                binding.bind_cpu_input(name, np.empty(0, array.dtype))  # it would hold the array until the next run
            outputs: Mapping[str, Value] = buffers
            return outputs

        return run

    def _prepare(
        self, session: Any, operands: Operands, results: Sequence[tuple[str, tuple[int, ...], np.dtype[np.generic]]]
    ) -> tuple[Any, Mapping[str, Value]]:
        """Bind all inputs and outputs; returns the binding and the outputs."""
        binding = session.io_binding()
        for name, value in operands.values.items():
            if isinstance(value, _Held):
                binding.bind_ortvalue_input(name, value.value)
            else:
                binding.bind_cpu_input(name, value if value.flags.c_contiguous else value.copy(order="C"))
        buffers: dict[str, Value] = {}
        for name, shape, dtype in results:
            own = operands.spare.get(name)
            buffers[name] = np.empty(shape, dtype) if own is None else own
            binding.bind_ortvalue_output(name, self._value(buffers[name], "cpu") if own is None else own.value)
        return binding, buffers

    def _value(self, array: Array, device: str) -> Any:
        return self._module.OrtValue.ortvalue_from_numpy(array, device, 0)


@cache  # a process has one environment for all trainers
def _share_arena(module: ModuleType) -> None:
    """Register the arena in the process's environment that sessions with `session.use_env_allocators` share."""
    arena, usual = module.OrtAllocatorType.ORT_ARENA_ALLOCATOR, module.OrtMemType.DEFAULT
    settings = module.OrtArenaCfg({"arena_extend_strategy": _SAME_AS_REQUESTED})
    module.create_and_register_allocator(module.OrtMemoryInfo("Cpu", arena, 0, usual), settings)


def load_onnx(provider: str) -> OnnxRuntime:
    """Import ONNX Runtime and trigger its lazy loading, so that it counts for no single training.

    Raises:
        MissingExtraError: it is not installed.
        BrokenError: it cannot be loaded.
        ConfigError: it has no such provider, or the provider does not work.
    """
    try:
        module: ModuleType = import_silently("onnxruntime")
    except ModuleNotFoundError as error:
        raise MissingExtraError("onnxruntime", "edge") from error
    except Exception as error:  # a build for another NumPy may raise anything
        raise explain_load_error("onnxruntime", error) from error
    needed = PROVIDERS[provider]
    available = module.get_available_providers()
    if needed in available:
        try:
            session = open_session(module, _IDENTITY, 1, provider)
        except TrainingError as error:
            raise ConfigError(f"the provider {provider!r} does not work here: {error}") from error
        session.run(None, {"x": np.zeros(1, np.float32)})
        # If a provider's libraries are missing, it is left out, with only a log line.
        available = session.get_providers()
    if needed not in available:
        raise ConfigError(
            f"the provider {provider!r} needs {needed}, but ONNX Runtime {module.__version__} works with "
            f"{available} here; install a build that has it (onnxruntime-gpu, on Jetson NVIDIA's own) and its "
            "libraries, or leave --provider out"
        )
    return OnnxRuntime(module, provider)


def _takes_samples(shape: Sequence[object]) -> bool:
    """Whether an input's shape is (batch, *sample shape); its batch may be a name instead of a number."""
    return len(shape) >= 2 and all(isinstance(size, int) for size in shape[1:])


ONNX = RuntimeKind(target="onnx", suffix=".onnx", providers=("cpu", "cuda"), load=load_onnx)
OnnxTrainer = partial(RuntimeTrainer, ONNX)
"""Makes the trainer of programs and models in the ONNX format; takes `provider` and `host` as `RuntimeTrainer` does."""
