"""Which tools write a program: part of its content id, because another tool may write other bytes."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from subfleet.protocol.errors import ExportError, MissingExtraError

__all__ = ["FORMAT_VERSION", "TARGET_NAMES", "tool_versions"]

FORMAT_VERSION = 7
"""Raised with every change of ours that alters what is written, or what is planned, for the same request."""

_TOOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"onnx": ("torch", "onnx"), "executorch": ("torch", "executorch"), "torch": ("torch",)}
)

TARGET_NAMES = ("onnx", "executorch")
"""Every target that a graph is written for, known without importing any of their tools. The target "torch" is not among
them: its programs are requests."""


@cache
def installed_version(tool: str) -> str:
    try:
        return version(tool)
    except PackageNotFoundError as error:
        raise MissingExtraError(tool, "export") from error


def tool_versions(target: str) -> dict[str, str]:
    """The versions of everything that takes part in writing a program for a target.

    Raises:
        ExportError: the target is unknown.
        MissingExtraError: one of its packages is not installed.
    """
    if target not in _TOOLS:
        raise ExportError(f"target is {target!r}, but must be one of {sorted(_TOOLS)}")
    return {"subfleet.export": str(FORMAT_VERSION)} | {tool: installed_version(tool) for tool in _TOOLS[target]}
