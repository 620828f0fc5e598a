"""The README shows a recorded run as the current program prints it; the run has the properties of the demo."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from integration.demo_story import CLIENTS, check_story

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_demo", ROOT / "scripts" / "readme_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorded(script: ModuleType) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(script.RECORDED.read_text(encoding="utf-8"))
    return loaded


def test_the_readme_agrees_with_the_recorded_run(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0


def test_the_recorded_run_has_the_properties_of_the_demo(recorded: dict[str, Any]) -> None:
    check_story(recorded["summary"])


def test_every_round_and_device_is_in_the_block(script: ModuleType, recorded: dict[str, Any]) -> None:
    lines = script.build_block(recorded).splitlines()
    rounds = recorded["summary"]["rounds"]
    titles = [line for line in lines if line.startswith("    round ")]
    assert [title.split(":")[0] for title in titles] == [f"    round {record['round']}" for record in rounds]
    for title, record in zip(titles, rounds, strict=True):
        assert f"accuracy {record['accuracy']:.4f}" in title
    for title, record in ((titles[0], rounds[0]), (titles[-1], rounds[-1])):
        rows = lines[lines.index(title) + 4 :][: len(CLIENTS)]
        assert [row.split()[0] for row in rows] == list(CLIENTS)
        for row, client in zip(rows, record["clients"], strict=True):
            assert f" {client['architecture']} " in row
            assert f" {client['limit'] or '-'} " in row
    models = [line.split(", ")[0].split() for line in lines if "models/" in line]
    runtimes = {client["client_id"]: client["runtime"] for client in rounds[0]["clients"]}
    suffixes = {name: {"onnx": ".onnx", "executorch": ".pte"}[runtimes[name]] for name in CLIENTS}
    assert models == [[f"{name}:", f"models/{name}/model{suffix}"] for name, suffix in suffixes.items()]
    assert f"    Test accuracy of the full model: {recorded['summary']['accuracy']:.4f}" in lines
    assert any(f": {recorded['seconds']} s" in line for line in lines)


@pytest.mark.slow
def test_a_changed_block_is_detected_and_rewritten(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "README.md"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    copy.write_text(text.replace("    round 1: ", "    round 7: "), encoding="utf-8")
    assert script.main(["--check"], readme=copy) == 1
    assert "run: python scripts/readme_demo.py --write" in capsys.readouterr().err
    assert script.main(["--write"], readme=copy) == 0
    assert copy.read_text(encoding="utf-8") == text
    copy.write_text("no block", encoding="utf-8")
    assert script.main(["--write"], readme=copy) == 1
