"""Libraries that report to their vendors are imported only with reporting switched off."""

import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from subfleet.protocol.silence import SWITCHES, Switch

ROOT = Path(__file__).parents[2]
FOLDERS = (*(path.parent.name for path in ROOT.glob("*/subfleet")), "benchmarks", "scripts", "examples")
IMPORT = re.compile(
    rf"^\s*(?:import|from) +({'|'.join(name for switch in SWITCHES for name in switch.modules)})\b", re.M
)


@pytest.mark.parametrize(
    ("line", "matches"),
    [
        ("    import onnxruntime\n", True),
        ("import onnxruntime as ort", True),
        ("x = 1\nfrom onnxruntime.quantization import QuantType\n", True),
        ("    from datasets import Dataset", True),
        ('onnxruntime = import_silently("onnxruntime")\n', False),
        ("from onnxruntime_extensions import ops\n", False),
        ("from subfleet.observers.wandb import wandb\n", False),
    ],
)
def test_the_pattern_matches_imports_of_these_libraries(line: str, matches: bool) -> None:
    assert bool(IMPORT.search(line)) == matches


def list_loud_imports(text: str) -> list[str]:
    """Libraries that a module imports before it has switched off their reports; a program may do that by itself."""
    switches = {name: switch for switch in SWITCHES for name in switch.modules}
    return [
        found[1]
        for found in IMPORT.finditer(text)
        if f'os.environ["{switches[found[1]].variable}"] = "{switches[found[1]].value}"' not in text[: found.start()]
    ]


def test_no_module_imports_such_a_library_directly() -> None:
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 400
    importing = [str(path.relative_to(ROOT)) for path in modules if list_loud_imports(path.read_text(encoding="utf-8"))]
    assert importing == [], "load it by subfleet.protocol.silence.import_silently"
    loud = "from flwr.app import Context\n"
    assert list_loud_imports(loud) == ["flwr"]
    assert list_loud_imports(f'os.environ["FLWR_TELEMETRY_ENABLED"] = "0"\n{loud}') == []


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: str(switch.variable))
def test_a_switch_is_documented(switch: Switch) -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    assert f"`{switch.variable}={switch.value}`" in page


@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: str(switch.variable))
def test_an_installed_library_knows_its_switch(switch: Switch) -> None:
    if switch.modules[0] == "onnxruntime" and tuple(map(int, version("onnxruntime").split(".")[:2])) < (1, 29):
        pytest.skip("ONNX Runtime reports from 1.29 on, and this one is older")
    spec = importlib.util.find_spec(switch.modules[0])
    assert spec is not None
    assert spec.origin is not None
    files = [path for pattern in ("*.py", "*.so*") for path in Path(spec.origin).parent.rglob(pattern)]
    assert any(switch.variable.encode() in path.read_bytes() for path in files)
