"""ExecuTorch's plain runtime, through our native binding, or else through its own bindings with PyTorch."""

from functools import partial
from importlib.util import find_spec

from subfleet.protocol.errors import MissingExtraError
from subfleet.protocol.loading import explain_load_error
from subfleet.trainers.runtime import Runtime, RuntimeKind
from subfleet.trainers.trainer import RuntimeTrainer

# Devices get no PyTorch, which ExecuTorch's own bindings need.
_REMEDY = (
    "install the wheel of subfleet-executorch that was built for this device, or use ONNX Runtime: --runtime onnx for "
    "training, and .onnx models"
)


def load_executorch(provider: str = "cpu") -> Runtime:
    """Load the native binding if it is installed, else ExecuTorch's own bindings.

    Raises:
        MissingExtraError: neither is installed.
        BrokenError: one is installed, but cannot be loaded.
    """
    del provider  # there is one
    try:
        if find_spec("subfleet_executorch") is not None:
            from subfleet.trainers.executorch_native import NativeRuntime

            return NativeRuntime()
        from subfleet.trainers.executorch_bindings import BindingsRuntime

        return BindingsRuntime()
    except ModuleNotFoundError as error:
        raise MissingExtraError("subfleet_executorch", "edge", remedy=_REMEDY) from error
    except Exception as error:
        raise explain_load_error("executorch", error) from error


EXECUTORCH = RuntimeKind(target="executorch", suffix=".pte", providers=("cpu",), load=load_executorch, reloads=True)
ExecutorchTrainer = partial(RuntimeTrainer, EXECUTORCH)
"""Makes the trainer of programs and models in the ExecuTorch format; takes `host` as `RuntimeTrainer` does."""
