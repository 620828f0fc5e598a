"""PyTorch itself, on the CPU or a CUDA device, for machines where it is installed.

It runs the step that the programs of other targets are traced from, so it is also their reference.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from subfleet.protocol.errors import (
    ConfigError,
    ExportError,
    MissingExtraError,
    ProtocolError,
    SubfleetError,
    TrainingError,
)
from subfleet.protocol.loading import explain_load_error
from subfleet.protocol.programs import Program
from subfleet.trainers.prediction import FREE_BATCH_SIZE, Model, ModelForm
from subfleet.trainers.runtime import Array, Operands, RunProgram, RuntimeKind, Value
from subfleet.trainers.trainer import RuntimeTrainer

if TYPE_CHECKING:
    from subfleet.export.steps import Step

_Read = TypeVar("_Read")
# This runtime is for machines that have PyTorch; the error recommends a runtime without it.
_REMEDY = "use ONNX Runtime, which devices have: --runtime onnx for training, and .onnx models"
# The message of PyTorch's CPU allocator if the system refused memory; it raises no MemoryError.
_NO_MEMORY = ("can't allocate memory", "out of memory")


class TorchRuntime:
    """See `Runtime`.

    Args:
        provider: the device that computes: "cpu" or "cuda".
    """

    def __init__(self, provider: str) -> None:
        self._provider = provider

    @property
    def name(self) -> str:
        """See `Runtime.name`."""
        import torch

        return f"PyTorch {torch.__version__} on {self._provider}"

    def programs(self, threads: int) -> "_TorchPrograms":
        """See `Runtime.programs`."""
        return _TorchPrograms(self._provider, threads)

    def open_model(self, path: Path, body: bytes, threads: int) -> Model:
        """See `Runtime.open_model`: a tensor container that names its network."""
        import torch

        from subfleet.export.targets.torch import read_torch_model

        torch.set_num_threads(threads)
        try:
            described, module = read_torch_model(body)
        except (ConfigError, ProtocolError) as error:
            raise TrainingError(f"model {str(path)!r} cannot be used: {error}") from error
        module.to(self._provider)

        def infer(samples: Array) -> Array:
            with torch.no_grad():
                logits = _call_guarded(lambda: module(_make_tensor(samples, self._provider)))
            outputs: Array = logits.cpu().numpy()
            return outputs

        form = ModelForm(
            sample_shape=described.model.input_shape,
            classes=described.classes,
            objective=described.objective,
            transform=described.transform,
        )
        return Model(form=form, batch_size=FREE_BATCH_SIZE, infer=infer)


class _TorchPrograms:
    """See `Programs`. Their values are tensors on the device that computes."""

    def __init__(self, provider: str, threads: int) -> None:
        self._provider = provider
        self._threads = threads

    def open(self, package: Program) -> Callable[[str], RunProgram]:
        """See `Programs.open`."""
        from subfleet.export.chains.supernets import read_torch_pieces
        from subfleet.export.targets.torch import read_torch_step

        if package.manifest.chain is not None:
            steps = _read(package, read_torch_pieces)
            return lambda name: partial(self._run, steps[name])
        step = _read(package, read_torch_step)
        return lambda _: partial(self._run, step)

    def hold(self, array: Array) -> Value:
        """See `Programs.hold`."""
        return _make_tensor(array, self._provider)

    def twin(self, value: Value) -> None:
        """See `Programs.twin`."""

    def array(self, value: Value) -> Array:
        """See `Programs.array`."""
        array: Array = value.cpu().numpy()
        return array

    def _run(
        self, step: "Step", operands: Operands, fed: Mapping[str, Value], *, last: bool = False
    ) -> Mapping[str, Value]:
        import torch

        del last
        torch.set_num_threads(self._threads)  # with every run, as the setting belongs to the calling thread
        values = {**operands.values, **fed}
        arguments = [
            value if isinstance(value, torch.Tensor) else _make_tensor(value, self._provider)
            for value in (values[info.name] for info in step.inputs)
        ]
        with torch.device(self._provider):
            results = _call_guarded(lambda: step.run(*arguments))
        return {info.name: result for info, result in zip(step.outputs, results, strict=True)}


def _read(package: Program, read: Callable[[Program], _Read]) -> _Read:
    from subfleet.export.versions import FORMAT_VERSION

    written = package.manifest.versions.get("subfleet.export")
    if written != str(FORMAT_VERSION):
        raise TrainingError(
            f"the program is of format {written}, but this trainer runs format {FORMAT_VERSION}; use the same release "
            "of Subfleet on server and device"
        )
    try:
        return read(package)
    except (ConfigError, ExportError, ProtocolError) as error:
        raise TrainingError(f"PyTorch's program cannot be used: {error}; it must be exported again") from error


def _make_tensor(array: Array, provider: str) -> Any:
    """Make a tensor of an array; on the CPU it shares the array's memory if that is writable."""
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(provider)


def _call_guarded(call: Callable[[], Any]) -> Any:
    """Call PyTorch.

    Raises:
        MemoryError: the system refused memory.
        TrainingError: any other failure.
    """
    try:
        return call()
    except (MemoryError, SubfleetError):
        raise
    # PyTorch raises RuntimeError for most failures, and other errors for wrong arguments.
    except Exception as error:
        if any(words in str(error) for words in _NO_MEMORY):
            raise MemoryError(str(error)) from error
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(f"PyTorch refused the program ({reason:.300}); it must be exported again") from error


def load_torch(provider: str) -> TorchRuntime:
    """Import PyTorch and trigger its lazy loading, so that it counts for no single training.

    Raises:
        MissingExtraError: PyTorch is not installed.
        BrokenError: it cannot be loaded.
        ConfigError: it has no such device.
    """
    try:
        import torch

        from subfleet.export.targets.torch import run_smallest_step
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "export", remedy=_REMEDY) from error
    except Exception as error:
        raise explain_load_error("torch", error) from error
    if provider == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"the provider 'cuda' needs a CUDA device, but PyTorch {torch.__version__} finds none; install a build "
            "with CUDA and its driver, or leave --provider out"
        )
    run_smallest_step(provider)
    return TorchRuntime(provider)


TORCH = RuntimeKind(target="torch", suffix=".safetensors", providers=("cpu", "cuda"), load=load_torch)
TorchTrainer = partial(RuntimeTrainer, TORCH)
"""Makes the trainer of programs and models for PyTorch; takes `provider` and `host` as `RuntimeTrainer` does."""
