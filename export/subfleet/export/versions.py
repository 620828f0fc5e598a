"""The versions of the tools that write a program, which are part of its content id."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from subfleet.protocol.errors import ExportError, MissingExtraError

FORMAT_VERSION = 11
"""Increased with every change of ours that alters a program or its plan for the same request."""

_TOOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"onnx": ("torch", "onnx"), "executorch": ("torch", "executorch"), "torch": ("torch",)}
)

TARGET_NAMES = ("onnx", "executorch")
"""Every target that a graph is written for, known without importing its tools. The target "torch" is not among them:
its programs are requests."""


@cache
def installed_version(tool: str) -> str:
    """Return the version of an installed package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return version(tool)
    except PackageNotFoundError as error:
        raise MissingExtraError(tool, "export") from error


def tool_versions(target: str) -> dict[str, str]:
    """Return the versions of every package that takes part in writing a program for a target.

    Raises:
        ExportError: the target is unknown.
        MissingExtraError: one of its packages is not installed.
    """
    if target not in _TOOLS:
        raise ExportError(f"target is {target!r}, but must be one of {sorted(_TOOLS)}")
    return {"subfleet.export": str(FORMAT_VERSION)} | {tool: installed_version(tool) for tool in _TOOLS[target]}
