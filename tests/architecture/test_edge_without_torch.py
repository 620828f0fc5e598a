"""Every module of the agent can be imported with only the few packages of the agent installed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "protocol": ROOT / "protocol/subfleet/protocol",
    "transport": ROOT / "protocol/subfleet/transport",
    "device_profiles": ROOT / "device_profiles/subfleet/device_profiles",
    "agent": ROOT / "edge_client/subfleet/agent",
    "device": ROOT / "edge_client/subfleet/device",
    "edge_client": ROOT / "edge_client/subfleet/edge_client",
}
BLOCKED = ("torch", "numpy", "executorch", "onnx", "onnxruntime", "fastapi", "safetensors", "sqlalchemy", "pydantic")
PROGRAM = """
import importlib, sys
blocked, modules = sys.argv[1].split(","), sys.argv[2].split(",")
for name in blocked:
    sys.modules[name] = None  # importing it raises ImportError, as if it were not installed
for name in modules:
    importlib.import_module(name)
loaded = [name for name in sys.modules if name.split(".")[0] in blocked and sys.modules[name] is not None]
assert not loaded, loaded
"""


def _list_modules(package: str) -> list[str]:
    folder = PACKAGES[package]
    names = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        names.append(".".join(["subfleet", package, *(part for part in parts if part != "__init__")]))
    return names


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_module_imports_without_heavy_packages(package: str) -> None:
    modules = _list_modules(package)
    assert f"subfleet.{package}" in modules or len(modules) > 1
    result = _run(PROGRAM, ",".join(BLOCKED), ",".join(modules))
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_blocked_package_cannot_be_imported() -> None:
    result = _run(PROGRAM, ",".join(BLOCKED), "subfleet.arrays")
    assert result.returncode != 0
    assert "numpy" in result.stderr
