"""The how-to page on a network of one's own, followed step by step."""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shared_programs import share_exporter
from typer.testing import CliRunner

from subfleet.cli.commands import app
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.settings.run_folder import read_description

pytestmark = [pytest.mark.slow, pytest.mark.export]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/bring-your-own-network.md").read_text(encoding="utf-8")
FILES = {
    name: (ROOT / "examples/own_network" / name).read_text(encoding="utf-8") for name in ("my_net.py", "mine.toml")
}


def list_blocks(page: str) -> Iterator[str]:
    """The indented blocks of a page inside a list, without their indentation."""
    lines: list[str] = []
    for line in [*page.splitlines(), "end"]:
        if line.startswith("        ") or (lines and not line):
            lines.append(line)
        elif lines:
            yield textwrap.dedent("\n".join(lines)).strip() + "\n"
            lines = []


def test_the_page_shows_the_files_of_the_example() -> None:
    blocks = list(list_blocks(PAGE))
    assert [name for name, text in FILES.items() if text not in blocks] == []


def test_the_example_is_trained_by_unequal_devices_and_takes_its_weights_back(
    cache: CacheFolder, exports: ExportPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "mine.toml", "--host", "batch", "--json"]
    for change in ("rounds=2", "training.epochs=1", "deploy_targets=[]"):
        arguments += ["--set", change]
    with share_exporter(exports):
        result = CliRunner().invoke(app, arguments, env={"SUBFLEET_CACHE": str(cache.path)})
    assert result.exit_code == 0, result.output
    rounds = json.loads((tmp_path / "runs/mine/summary.json").read_text(encoding="utf-8"))["rounds"]
    sizes = {row["architecture"] for record in rounds for row in record["clients"]}
    assert len(sizes) > 1, "links carry parts of it"
    assert isinstance(read_description(tmp_path / "runs/mine").model, Recorded)
    weights = load_file(tmp_path / "runs/mine/model.safetensors")
    del weights["model/json"]
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(compile(FILES["my_net.py"], "my_net.py", "exec"), namespace)  # noqa: S102 - the page's own code
    network = namespace["MyNet"](width=64)
    network.load_state_dict(weights, strict=False)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in network.state_dict().items() if name in weights)
    assert len(weights) == len([name for name in network.state_dict() if not name.endswith("num_batches_tracked")])
