"""One small run file on every host: the same folder of results, and nothing in it that nobody has measured."""

import csv
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from subfleet.emulation.client_processes import ClientCommand, ClientProcesses
from subfleet.emulation.hosting import open_host
from subfleet.export.cache import CacheFolder
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
family = "mlp"
input_shape = [1, 8, 8]
class_count = 10
widths = [32]
depths = [1]
group_size = 4

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
WORKING = {"data", "devices", "logs", "output", "profiles", "server"}
"""Folders that a host works in: what it needs to go on after it was stopped, which a batch never does."""
EMULATED: tuple[HostKind, ...] = ("processes", "batch")
TIMED = ("costs.rounds.", "costs.clients.")
"""Seconds, where somebody has measured them."""
MEASURED = ("seconds", "took_s", "measured_peak_bytes")


class _Rounds(Unobserved):
    """Remembers what observers are told."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def round_finished(self, record: RoundRecord) -> None:
        self.records.append(record)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def described(place: Path) -> Run:
    path = place / "small.toml"
    path.write_text(FILE, encoding="utf-8")
    return read_run(str(path), ())


@pytest.fixture(scope="module")
def told(place: Path, described: Run, cache: CacheFolder) -> Mapping[HostKind, _Rounds]:
    """What each host of emulated fleets told of the run, which then lies in a folder of the host's name."""
    found: dict[HostKind, _Rounds] = {}
    for kind in EMULATED:
        folder, found[kind] = create_folder(place / kind), _Rounds()
        write_description(folder, described)
        with open_host(kind, cache) as host:
            host(described, folder, found[kind], threading.Event())
    return found


@pytest.fixture(scope="module")
def served(place: Path, described: Run, told: Mapping[HostKind, _Rounds], cache: CacheFolder) -> Path:
    """The folder of `subfleet serve`, with clients that have the data of those that were processes."""

    from subfleet.cli.serving import serve_fleet
    from subfleet.reporting.api import HttpAddress

    assert "processes" in told
    emulated = place / "processes"
    with EmbeddedBroker() as broker:
        address = parse_url(broker.url)
        commands = tuple(
            ClientCommand(
                client_id=device.id,
                broker=address,
                fleet=described.fleet.name,
                data=emulated / "data" / f"{device.id}.npz",
                held_out=emulated / "data" / f"{device.id}.held-out.npz",
                profile=device.profile,
                log=emulated / "logs" / f"{device.id}.csv",
                state=place / "joined" / device.id,
                runtime=device.runtime,
            )
            for device in described.fleet.expand_devices()
        )
        with ClientProcesses(commands, output_folder=place / "joined" / "output") as fleet:
            folder = serve_fleet(
                described,
                place / "served",
                Unobserved(),
                threading.Event(),
                http=HttpAddress(host="127.0.0.1", port=0),
                cache=cache,
                broker=address,
            )
            fleet.wait(20.0)
    assert folder is not None
    return folder


def _tree(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in files if path.parts[0] not in WORKING}


def _summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_every_host_leaves_the_same_folder(place: Path, told: Mapping[HostKind, _Rounds], served: Path) -> None:
    trees = {folder.name: _tree(folder) for folder in (*(place / kind for kind in told), served)}
    assert trees["processes"] == trees["batch"] == trees["small"]
    assert {"model.safetensors", "models/ada/model.onnx", "models/bob/model.onnx"} < trees["batch"]


def test_every_host_tells_the_same_in_its_summary(place: Path, told: Mapping[HostKind, _Rounds], served: Path) -> None:
    """The same names all the way down, and the same choices: who trained what in which round, and what came of it."""
    summaries = [_summary(folder) for folder in (*(place / kind for kind in told), served)]
    names = [{name for name in _names(summary) if not name.startswith(TIMED)} for summary in summaries]
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
    folders = (*(place / kind for kind in told), served)
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1


def _names(value: Any, above: str = "") -> set[str]:
    """The names of all fields of a summary, with those above them; whatever stands in lists counts together."""
    if isinstance(value, dict):
        return {f"{above}{name}" for name in value}.union(
            *(_names(one, f"{above}{name}.") for name, one in value.items())
        )
    return set[str]().union(*(_names(one, f"{above}[].") for one in value)) if isinstance(value, list) else set()


def test_every_host_tells_the_same_of_devices_models(
    place: Path, told: Mapping[HostKind, _Rounds], served: Path
) -> None:
    for folder in (*(place / kind for kind in told), served):
        models = _summary(folder)["models"]
        assert [(one["client_id"], one["target"], one["status"]) for one in models] == [
            (name, "onnx", "deployed") for name in ("ada", "bob")
        ]
        for one in models:
            assert (folder / one["file"]).stat().st_size == one["bytes"]


def test_equal_models_are_one_file_with_several_names(place: Path, told: Mapping[HostKind, _Rounds]) -> None:
    for kind in told:
        one, other = ((place / kind / "models" / name / "model.onnx") for name in ("ada", "bob"))
        assert one.samefile(other)


def test_the_accuracy_is_that_of_the_models_that_devices_are_given(
    place: Path, told: Mapping[HostKind, _Rounds]
) -> None:
    """Each is tried by a runtime, and the network that nobody trained is not what is told."""
    found = {kind: _summary(place / kind) for kind in told}
    for summary in found.values():
        assert summary["model"]["description"] == "submodel w1/2 d1, the largest that devices have trained"
        assert [one["accuracy"] for one in summary["models"]] == pytest.approx([summary["accuracy"]] * 2, abs=0.011)
    assert found["processes"]["accuracy"] == found["batch"]["accuracy"], "the same bits on both hosts"


def test_what_was_not_measured_is_empty(place: Path, told: Mapping[HostKind, _Rounds]) -> None:
    measured: Mapping[HostKind, bool] = {"processes": True, "batch": False}
    for kind, is_measured in measured.items():
        folder = place / kind
        with (folder / "clients.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert {bool(row[name]) for row in rows for name in MEASURED} == {is_measured}
        summary = _summary(folder)
        plain = [row for record in summary["rounds"] for row in record["clients"]]
        assert {row[name] is not None for row in plain for name in MEASURED} == {is_measured}
        assert (summary["rounds"][0]["seconds"] is not None) is is_measured
        assert (summary["costs"]["rounds"] is not None) is is_measured
        assert ("Planned against measured" in (folder / "report.html").read_text(encoding="utf-8")) is is_measured
        (record,) = told[kind].records
        assert {"seconds", "measured_peak_bytes"} & round_figures(record).keys() == (
            {"seconds", "measured_peak_bytes"} if is_measured else set()
        )
