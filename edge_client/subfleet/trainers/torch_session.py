"""A step in PyTorch itself, which holds what is carried as tensors; and the steps of a chain's pieces."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from subfleet.protocol.errors import ConfigError, ExportError, ProtocolError, SubfleetError, TrainingError
from subfleet.protocol.programs import Program
from subfleet.trainers.chain_programs import LoadPiece
from subfleet.trainers.sessions import Array, SessionLayout, StepSession, zeros

if TYPE_CHECKING:
    import torch

    from subfleet.export.steps import Step

__all__ = ["TorchPieces", "TorchSession", "guarded", "open_session", "tensor_of"]

_Read = TypeVar("_Read")
# What PyTorch's CPU allocator says where the system gave no memory; it raises no MemoryError.
_NO_MEMORY = ("can't allocate memory", "out of memory")


class TorchSession:
    """See `StepSession`."""

    def __init__(self, step: "Step", layout: SessionLayout, threads: int, provider: str) -> None:
        self._step = step
        self._layout = layout
        self._threads = threads
        self._provider = provider
        self._carried: dict[str, torch.Tensor] = {}
        self._constants: dict[str, torch.Tensor] = {}

    def begin(self, stored: Mapping[str, Array], constants: Mapping[str, Array]) -> None:
        """See `StepSession.begin`."""
        import torch

        # Here, because PyTorch's number of threads belongs to the thread that asks, and each job has one of its own.
        torch.set_num_threads(self._threads)
        self._carried = {name: tensor_of(np.array(array), self._provider) for name, array in stored.items()}
        self._carried |= {name: tensor_of(array, self._provider) for name, array in zeros(self._layout).items()}
        self._constants = {name: tensor_of(array, self._provider) for name, array in constants.items()}

    def step(self, fed: Mapping[str, Array], *, last: bool = False) -> Mapping[str, Array]:
        """See `StepSession.step`."""
        del last
        values = self._constants | self._carried | {name: tensor_of(fed[name], self._provider) for name in fed}
        outputs = _ran(self._step, values, self._provider)
        self._carried = {old: outputs[new] for old, new in self._layout.carried.items()}
        return {name: outputs[name].cpu().numpy() for name in self._layout.read}

    def gradients(self) -> Mapping[str, Array]:
        """See `StepSession.gradients`."""
        return {value.tensor: np.array(self._carried[value.name].cpu().numpy()) for value in self._layout.gradients}

    def finish(self) -> Mapping[str, Array]:
        """See `StepSession.finish`."""
        carried, self._carried, self._constants = self._carried, {}, {}
        return {value.name: carried[value.name].cpu().numpy() for value in self._layout.stored}


class TorchPieces:
    """See `PieceRuntime`."""

    def __init__(self, provider: str, threads: int) -> None:
        self._provider = provider
        self._threads = threads

    def open(self, chain: Program) -> LoadPiece:
        """See `PieceRuntime.open`."""
        from subfleet.export.chains.reading import read_torch_pieces

        steps = _read(chain, read_torch_pieces)
        return lambda name: partial(self._run, steps[name])

    def rest(self) -> None:
        """See `PieceRuntime.rest`."""

    def _run(self, step: "Step", values: Mapping[str, Array]) -> Mapping[str, Array]:
        import torch

        torch.set_num_threads(self._threads)  # with every run, as it belongs to the thread that asks
        given = {name: tensor_of(array, self._provider) for name, array in values.items()}
        return {name: result.cpu().numpy() for name, result in _ran(step, given, self._provider).items()}


def open_session(provider: str, program: Program, layout: SessionLayout, threads: int) -> StepSession:
    """A session for a training or an evaluation program; raises TrainingError where it cannot be used."""
    from subfleet.export.targets.torch import read_torch_step

    return TorchSession(_read(program, read_torch_step), layout, threads, provider)


def _read(program: Program, read: Callable[[Program], _Read]) -> _Read:
    from subfleet.export.versions import FORMAT_VERSION

    written = program.manifest.versions.get("subfleet.export")
    if written != str(FORMAT_VERSION):
        raise TrainingError(
            f"the program is of format {written}, but this trainer runs format {FORMAT_VERSION}; use the same release "
            "of Subfleet on server and device"
        )
    try:
        return read(program)
    except (ConfigError, ExportError, ProtocolError) as error:
        raise TrainingError(f"PyTorch's program cannot be used: {error}; it must be exported again") from error


def _ran(step: "Step", values: Mapping[str, Any], provider: str) -> dict[str, Any]:
    """A step's results by name."""
    import torch

    arguments = [values[value.name] for value in step.inputs]
    with torch.device(provider):
        results = guarded(lambda: step.run(*arguments))
    return {value.name: result for value, result in zip(step.outputs, results, strict=True)}


def tensor_of(array: Array, provider: str) -> Any:
    """An array as a tensor on a device; on the CPU it is the array's memory where that may be written."""
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(provider)


def guarded(call: Callable[[], Any]) -> Any:
    """Call PyTorch.

    Raises:
        MemoryError: the system gave no memory.
        TrainingError: anything else went wrong.
    """
    try:
        return call()
    except (MemoryError, SubfleetError):
        raise
    # PyTorch raises RuntimeError for most failures, and others where arguments do not fit.
    except Exception as error:
        if any(words in str(error) for words in _NO_MEMORY):
            raise MemoryError(str(error)) from error
        reason = str(error).strip().partition("\n")[0]
        raise TrainingError(f"PyTorch refused the program ({reason:.300}); it must be exported again") from error
