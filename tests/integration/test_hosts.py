"""A small run file on every host: the folders of results are the same, and have no unmeasured figures."""

import csv
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matrices import mostly_long
from shared_programs import share_exporter

from subfleet.emulation.client_processes import ClientCommand, ClientProcesses
from subfleet.emulation.hosting import open_host
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import RoundRecord
from subfleet.link.broker import EmbeddedBroker
from subfleet.observers.figures import round_figures
from subfleet.settings.fleet import HostKind
from subfleet.settings.reading import read_run
from subfleet.settings.run import Run
from subfleet.settings.run_folder import create_folder, write_description
from subfleet.transport.address import parse_url

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.export, pytest.mark.timeout(300)]

FILE = """
name = "small"
rounds = 1
min_clients = 2
rates = [0.5, 1.0]
deploy_targets = ["onnx"]

[method]
type = "fedavg"
model = "smallest"

[model]
{model}

[training]
epochs = 4
batch_size = 16
learning_rate = 0.1

[clock]
step_s = 60.0

[data]
name = "digits"
samples = 240
test_samples = 100
held_out = 0.2

[fleet]
name = "hosts"

[[fleet.devices]]
id = "ada"
profile = "laptop"
log = "laptop"

[[fleet.devices]]
id = "bob"
profile = "laptop"
log = "laptop"
"""
CODE = """
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width)
        self.last = nn.Conv2d(2 * width, width, 1)

    def forward(self, images):
        return images + self.last(self.norm(self.first(images)).relu())


class Convolutions(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), Block(16), nn.MaxPool2d(2), Block(16), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(16, 10),
        )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 24), nn.Linear(24, 10)
        layer = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, images):
        return self.head(self.encoder(self.embed(images.flatten(1, 2))).mean(1))
"""
MODELS = {
    "family": 'family = "mlp"\ninput_shape = [1, 8, 8]\nclass_count = 10\nwidths = [32]\ndepths = [1]\ngroup_size = 4',
    "convolutions": 'module = "nets_of_hosts:Convolutions"\ninput_shape = [1, 8, 8]',
    "transformer": 'module = "nets_of_hosts:Transformer"\ninput_shape = [1, 8, 8]',
}
WORKING = {"data", "devices", "logs", "output", "profiles", "server", "batch"}
"""Working folders of a host, with which it can resume a run."""
EMULATED: tuple[HostKind, ...] = ("processes", "batch")
TIMED = ("costs.rounds.", "costs.clients.")
"""Seconds, which not every host measures."""
SECONDS = ("seconds", "took_s")


class _Rounds(Unobserved):
    """Records the rounds that observers receive."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def round_finished(self, record: RoundRecord) -> None:
        self.records.append(record)


@pytest.fixture(scope="module", params=mostly_long(MODELS, "family"))
def model(request: pytest.FixtureRequest) -> str:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def base_folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def run(model: str, base_folder: Path) -> Run:
    path = base_folder / "small.toml"
    path.write_text(FILE.format(model=model), encoding="utf-8")
    (base_folder / "nets_of_hosts.py").write_text(CODE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base_folder)  # the code is imported here, and nowhere else
        return read_run(str(path), ())


@pytest.fixture(scope="module")
def reports(base_folder: Path, run: Run, cache: CacheFolder, exports: ExportPool) -> Mapping[HostKind, _Rounds]:
    """The rounds of each host of emulated fleets; the run is in a folder with the name of the host."""
    rounds: dict[HostKind, _Rounds] = {}
    for kind in EMULATED:
        folder, rounds[kind] = create_folder(base_folder / kind), _Rounds()
        write_description(folder, run)
        with share_exporter(exports), open_host(kind, cache) as host:
            host(run, folder, rounds[kind], threading.Event())
    return rounds


@pytest.fixture(scope="module")
def served_folder(base_folder: Path, run: Run, reports: Mapping[HostKind, _Rounds], cache: CacheFolder) -> Path:
    """The folder of `subfleet serve`; its clients have the data of the client processes."""

    from subfleet.cli.serving import serve_fleet
    from subfleet.reporting.api import HttpAddress

    assert "processes" in reports
    emulated = base_folder / "processes"
    with EmbeddedBroker() as broker:
        address = parse_url(broker.url)
        commands = tuple(
            ClientCommand(
                client_id=device.id,
                broker=address,
                fleet=run.fleet.name,
                data=emulated / "data" / f"{device.id}.npz",
                held_out=emulated / "data" / f"{device.id}.held-out.npz",
                profile=device.profile,
                log=emulated / "logs" / f"{device.id}.csv",
                state=base_folder / "joined" / device.id,
                runtime=device.runtime,
            )
            for device in run.fleet.expand_devices()
        )
        with ClientProcesses(commands, output_folder=base_folder / "joined" / "output") as fleet:
            folder = serve_fleet(
                run,
                base_folder / "served",
                Unobserved(),
                threading.Event(),
                http=HttpAddress(host="127.0.0.1", port=0),
                cache=cache,
                broker=address,
            )
            fleet.wait(20.0)
    assert folder is not None
    return folder


def _list_files(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in files if path.parts[0] not in WORKING}


def _read_summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_every_host_leaves_the_same_folder(
    base_folder: Path, reports: Mapping[HostKind, _Rounds], served_folder: Path
) -> None:
    trees = {folder.name: _list_files(folder) for folder in (*(base_folder / kind for kind in reports), served_folder)}
    assert trees["processes"] == trees["batch"] == trees["small"]
    assert {"model.safetensors", "models/ada/model.onnx", "models/bob/model.onnx"} < trees["batch"]


def test_every_host_writes_the_same_summary(
    base_folder: Path, reports: Mapping[HostKind, _Rounds], served_folder: Path
) -> None:
    """The summaries have the same fields at every level, the same assignments in each round and the same model."""
    summaries = [_read_summary(folder) for folder in (*(base_folder / kind for kind in reports), served_folder)]
    names = [{name for name in _list_names(summary) if not name.startswith(TIMED)} for summary in summaries]
    assert names[0] == names[1] == names[2]
    chosen = [
        [
            (row["client_id"], row["architecture"], row["status"])
            for record in summary["rounds"]
            for row in record["clients"]
        ]
        for summary in summaries
    ]
    assert chosen[0] == chosen[1] == chosen[2]
    assert len({summary["accuracy"] for summary in summaries}) == 1
    assert len({json.dumps(summary["figures"]["tiers"]) for summary in summaries}) == 1
    folders = (*(base_folder / kind for kind in reports), served_folder)
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1


def _list_names(value: Any, prefix: str = "") -> set[str]:
    """The dotted names of all fields of a summary; the items of a list have one name."""
    if isinstance(value, dict):
        return {f"{prefix}{name}" for name in value}.union(
            *(_list_names(part, f"{prefix}{name}.") for name, part in value.items())
        )
    return (
        set[str]().union(*(_list_names(part, f"{prefix}[].") for part in value)) if isinstance(value, list) else set()
    )


def test_every_host_reports_the_same_models_of_devices(
    base_folder: Path, reports: Mapping[HostKind, _Rounds], served_folder: Path
) -> None:
    for folder in (*(base_folder / kind for kind in reports), served_folder):
        models = _read_summary(folder)["models"]
        assert [(model["client_id"], model["target"], model["status"]) for model in models] == [
            (name, "onnx", "deployed") for name in ("ada", "bob")
        ]
        for model in models:
            assert (folder / model["file"]).stat().st_size == model["bytes"]


def test_equal_models_are_one_file_with_several_names(base_folder: Path, reports: Mapping[HostKind, _Rounds]) -> None:
    for kind in reports:
        first, second = ((base_folder / kind / "models" / name / "model.onnx") for name in ("ada", "bob"))
        assert first.samefile(second)


def test_the_accuracy_is_that_of_the_models_that_devices_are_given(
    model: str, base_folder: Path, reports: Mapping[HostKind, _Rounds]
) -> None:
    """A runtime evaluates each of them; the accuracy is not that of the whole network, which no device trained."""
    # All blocks of these modules may be left out, the first one of an MLP may not.
    smallest = "w1/2 d1" if model == MODELS["family"] else "w1/2 d0"
    summaries = {kind: _read_summary(base_folder / kind) for kind in reports}
    for summary in summaries.values():
        assert summary["model"]["description"] == f"submodel {smallest}, the largest that devices have trained"
        accuracies = [given["accuracy"] for given in summary["models"]]
        assert accuracies == pytest.approx([summary["accuracy"]] * 2, abs=0.011)
    assert summaries["processes"]["accuracy"] == summaries["batch"]["accuracy"], "the same bits on both hosts"


def test_no_memory_is_measured_in_a_batch_and_seconds_are_everywhere(
    base_folder: Path, reports: Mapping[HostKind, _Rounds]
) -> None:
    measured: Mapping[HostKind, bool] = {"processes": True, "batch": False}
    for kind, is_measured in measured.items():
        folder = base_folder / kind
        with (folder / "clients.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert {bool(row["measured_peak_bytes"]) for row in rows} == {is_measured}
        assert all(row[name] for row in rows for name in SECONDS)
        summary = _read_summary(folder)
        json_rows = [row for record in summary["rounds"] for row in record["clients"]]
        assert {row["measured_peak_bytes"] is not None for row in json_rows} == {is_measured}
        assert all(row[name] > 0 for row in json_rows for name in SECONDS)
        assert summary["rounds"][0]["seconds"] > 0
        assert summary["costs"]["rounds"]["mean_s"] > 0
        assert ("Planned against measured" in (folder / "report.html").read_text(encoding="utf-8")) is is_measured
        (record,) = reports[kind].records
        memory = {"measured_peak_bytes"} if is_measured else set[str]()
        assert {"seconds", "measured_peak_bytes"} & round_figures(record).keys() == {"seconds", *memory}
