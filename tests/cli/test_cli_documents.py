"""The documents say what the code does."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from subfleet.elastic.families import FAMILIES
from subfleet.elastic.network import ModelConfig
from subfleet.protocol.training import TrainingSettings
from subfleet.server.config import Deadlines, ServerConfig, load_config

ROOT = Path(__file__).resolve().parents[2]


def test_every_configuration_key_is_documented() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    run, model = (
        {field.name for kind in kinds for field in dataclasses.fields(kind)}
        for kinds in ((ServerConfig, TrainingSettings), (ModelConfig,))
    )
    assert run - documented <= {"objective", "optimiser", "seed"}
    assert documented <= run | model | FAMILIES.keys()
    assert all(f"`{name}`" in page for name in model)
    assert all(f"`{field.name}`" in page for field in dataclasses.fields(Deadlines))


def test_the_example_configuration_loads() -> None:
    config = load_config(ROOT / "examples/fleet.toml")
    assert config.name == "my-fleet"
    assert config.model.widths == (32, 64)


def test_links_lead_somewhere() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/check_links.py"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout
