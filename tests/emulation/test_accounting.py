"""A run that is accounted decides, moves and takes as long as one that trains, as far as estimates tell."""

import csv
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emulation.batch_cases import experiment
from emulation.test_asynchronous_fleet import race
from matrices import mostly_long

from subfleet.aggregation.updates import encode_submodel
from subfleet.arrays import encode_arrays
from subfleet.elastic.building import init_state, network_of
from subfleet.emulation.accounting.host import account, check_accountable
from subfleet.emulation.accounting.programs import count_update_bytes, count_weight_bytes
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.emulation.hosting import open_host
from subfleet.emulation.method_checks import gather_check
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import ClientRow, RoundRecord
from subfleet.methods import METHODS
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.task import Train
from subfleet.protocol.tensors import measure_container
from subfleet.settings.fleet import HostSettings
from subfleet.settings.reading import read_run
from subfleet.settings.sections import AsynchronousSettings, Evaluations

LEARNING = {"fedoras", "fedtrans", "fluid", "oort", "power_of_choice", "pyramidfl", "sattler"}
"""Methods whose decisions depend on what is trained."""
FILE = """
name = "small"
rounds = 2
rates = [0.5, 1.0]
deploy_targets = ["onnx"]

[model]
family = "mlp"
input_shape = [1, 8, 8]
class_count = 10
widths = [32]
depths = [1]
group_size = 4

[clock]

[data]
name = "digits"
samples = 240
test_samples = 100
held_out = 0.2

[[fleet.devices]]
id = "ada"
profile = "laptop"
log = "laptop"

[[fleet.devices]]
id = "bob"
profile = "laptop"
log = "laptop"
"""
_LEARNED = ("accuracy", "loss", "metrics", "model", "model_bytes")
_ESTIMATED = ("planned_peak_bytes", "bytes_down", "disk_bytes", "seconds", "took_s")


def without_evaluation(gathered: GatheredRun, **changes: Any) -> GatheredRun:
    run = replace(gathered.run, evaluation=Evaluations(last=False), deploy_targets=(), **changes)
    return replace(gathered, run=run)


def list_decided(record: RoundRecord) -> dict[str, Any]:
    """What a round decides, apart from its clients and what is estimated."""
    names = {*record.__dataclass_fields__} - {*_LEARNED, "seconds", "clients"}
    return {name: getattr(record, name) for name in names}


def list_row(row: ClientRow) -> dict[str, Any]:
    names = {*row.__dataclass_fields__} - {*_ESTIMATED, "loss"}
    return {name: getattr(row, name) for name in names}


def pair_rows(trained: tuple[RoundRecord, ...], accounted: tuple[RoundRecord, ...]) -> Iterator[tuple[Any, Any]]:
    assert len(trained) == len(accounted)
    for record, account_record in zip(trained, accounted, strict=True):
        assert list_decided(account_record) == list_decided(record)
        yield from zip(record.clients, account_record.clients, strict=True)


@pytest.mark.slow
@pytest.mark.export
@pytest.mark.parametrize("name", mostly_long(sorted({*METHODS} - LEARNING), "dynamic_selection", "fedrolex"))
def test_every_accountable_method_decides_as_if_it_trained(name: str, exports: ExportPool) -> None:
    """Programs have estimated plans and sizes, so memory, bytes down and seconds differ by a little."""
    gathered = without_evaluation(gather_check(METHODS[name]()))
    trained, accounted = run_batch(gathered, exports).rounds, account(gathered, exports, observer=Unobserved()).rounds
    distils = name == "fjord"  # the programs of students are larger than estimated
    coded = name == "anycostfl"  # encoded updates have another header
    for row, estimated in pair_rows(trained, accounted):
        known, told = list_row(row), list_row(estimated)
        assert told.pop("bytes_up") == (pytest.approx(known.pop("bytes_up"), rel=0.02 if coded else 0.0))
        assert told == known
        assert estimated.planned_peak_bytes == pytest.approx(row.planned_peak_bytes, rel=0.5 if distils else 0.15)
        for figure in ("bytes_down", "seconds", "took_s"):
            assert getattr(estimated, figure) == pytest.approx(getattr(row, figure), rel=0.4 if distils else 0.1)
        assert estimated.loss is None
    assert all(record.accuracy is record.loss is None and not record.metrics for record in accounted)


@pytest.mark.slow
@pytest.mark.export
def test_without_time_only_what_programs_need_differs(exports: ExportPool) -> None:
    gathered = without_evaluation(experiment(rounds=3), host=HostSettings(durations="none"), clients_per_round=2)
    trained, accounted = run_batch(gathered, exports).rounds, account(gathered, exports, observer=Unobserved()).rounds
    for row, estimated in pair_rows(trained, accounted):
        assert list_row(estimated) == list_row(row)
        assert (estimated.seconds, estimated.took_s) == (row.seconds, row.took_s) == (None, None)
    assert [record.not_drawn for record in accounted] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.export
def test_asynchronous_rounds_are_accounted(exports: ExportPool) -> None:
    settings = AsynchronousSettings(buffer=1, concurrency=3)
    gathered = without_evaluation(race(rounds=8, asynchronous=settings))
    trained, accounted = run_batch(gathered, exports).rounds, account(gathered, exports, observer=Unobserved()).rounds
    for row, estimated in pair_rows(trained, accounted):
        assert list_row(estimated) == list_row(row)
        assert estimated.seconds == pytest.approx(row.seconds, rel=0.1)
    assert max(row.staleness for record in accounted for row in record.clients) > 0


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_that_learns_is_refused_in_one_sentence(name: str) -> None:
    run = gather_check(METHODS[name]()).run
    if name not in LEARNING:
        check_accountable(run)
        return
    with pytest.raises(ConfigError, match=rf"^method '{name}' .* cannot be accounted: [^.;]*; use --host batch$"):
        check_accountable(run)


def test_measured_norms_are_refused() -> None:
    run = gather_check(METHODS["heterofl"](), norms="calibrated").run
    with pytest.raises(ConfigError, match="devices measure norms of the trained model"):
        check_accountable(run)


def test_weights_and_updates_have_the_bytes_of_their_containers() -> None:
    gathered = experiment()
    network = network_of(gathered.run.model)
    whole = network.full_architecture()
    state = init_state(network, 0)
    content = encode_submodel(network, whole, state)
    assert count_weight_bytes(network, whole, frozen=False) == len(content)
    sent = tuple(network.shapes(whole))[:2]
    work = Train(settings=gathered.run.training, sends=sent)
    update = encode_arrays({name: state[name].numpy() for name in sent})
    assert count_update_bytes(network, whole, work) == len(update)
    assert measure_container({}) == len(encode_arrays({}))


class Notes:
    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []

    def say(self, text: str) -> None:
        """Ignored."""

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record)


@pytest.mark.slow
@pytest.mark.export
def test_the_host_writes_the_same_folder_without_a_model(cache: CacheFolder, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(FILE, encoding="utf-8")
    notes, run = Notes(), read_run(str(tmp_path / "small.toml"), ())
    with open_host("accounting", cache) as host:
        outcome = host(run, tmp_path / "run", notes, threading.Event())
    files = {path.name for path in outcome.folder.iterdir()}
    assert files == {"summary.json", "rounds.csv", "clients.csv", "evaluations.csv", "report.html"}
    summary = json.loads((outcome.folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["accuracy"], summary["metrics"], len(summary["rounds"])) == (None, {}, 2)
    assert all(record["loss"] is record["accuracy"] is None for record in summary["rounds"])
    assert summary["costs"]["bytes_up"] > 0
    assert summary["figures"]["participation"] == 1.0
    with (outcome.folder / "clients.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert {row["status"] for row in rows} == {"aggregated"}
    assert {row["loss"] for row in rows} == {""}
    assert all(float(row["seconds"]) > 0 and int(row["bytes_up"]) > 0 for row in rows)
    assert notes.rounds == [*outcome.result.rounds]
    assert outcome.result.model_path is None
    assert "nothing was trained" in (outcome.folder / "report.html").read_text(encoding="utf-8")
