"""The formats of programs, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from subfleet.export.targets.base import Target
from subfleet.export.targets.executorch import ExecutorchTarget
from subfleet.export.targets.onnx import OnnxTarget
from subfleet.protocol.errors import ExportError

__all__ = ["TARGETS", "find_target"]

TARGETS: Mapping[str, Target] = MappingProxyType({"onnx": OnnxTarget(), "executorch": ExecutorchTarget()})


def find_target(name: str) -> Target:
    """Return the target of a name.

    Raises:
        ExportError: there is none; the message lists the known ones.
    """
    if name not in TARGETS:
        raise ExportError(f"target is {name!r}, but must be one of {sorted(TARGETS)}")
    return TARGETS[name]
