"""Virtual fleets: the real server and agents in one process, with a clock that stands still while they work."""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from emulation.batch_cases import LARGE_BYTES, SMALL_BYTES, client, config, experiment, part

from subfleet import tasks
from subfleet.agent.states import AgentSettings
from subfleet.device.describing import declare_architecture, find_packing_width
from subfleet.device.meters import ReplayMeter
from subfleet.device_profiles import ReplayedLog, load_profile
from subfleet.edge_client.session import Device, EdgeSession
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.batch.trainers import SharedHost
from subfleet.emulation.client_processes import ClientCommand
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun, build_profile
from subfleet.export.pool import ExportPool
from subfleet.journal.records import ClientRow, RoundRecord
from subfleet.link.device_link import connect_devices
from subfleet.methods.flexifed import FlexiFed
from subfleet.protocol.errors import ConfigError, LoadError, MemoryLimitError, RunError
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import DataSummary, Job, Prediction, TrainResult
from subfleet.protocol.messages import Message, Update
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.protocol.topics import Topics
from subfleet.serving.session import Server
from subfleet.settings.fleet import HostSettings
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import Deadlines, LogClock
from subfleet.trainers.onnx import ONNX, OnnxTrainer
from subfleet.trainers.trainer import RuntimeTrainer
from subfleet.transport.address import parse_url
from subfleet.transport.in_memory import MemoryBroker

pytestmark = [pytest.mark.slow, pytest.mark.export]


class Boaster:
    """Changes the sample count of each update to ten."""

    def rewrite(self, message: Message) -> Iterable[Message]:
        yield replace(message, sample_count=10) if isinstance(message, Update) else message

    def accepts(self, kind: str) -> bool:
        return True


@pytest.fixture(scope="module")
def undisturbed(exports: ExportPool) -> BatchResult:
    """A run without faults."""
    return run_batch(experiment(), exports)


def rows_by_name(record: RoundRecord) -> dict[str, ClientRow]:
    return {row.client_id: row for row in record.clients}


class RefusingTrainer:
    """A trainer that always exceeds its memory limit."""

    target: ClassVar[str] = "onnx"
    suffix: ClassVar[str] = ".onnx"
    providers: ClassVar[tuple[str, ...]] = ("cpu",)
    held_bytes = 0

    def __init__(self) -> None:
        self.jobs: list[Job[Train]] = []

    def describe_runtime(self) -> str:
        return "a test's"

    def describe(self, data: str) -> DataSummary:
        raise NotImplementedError

    def train(self, job: Job[Train], stopped: Callable[[], bool]) -> TrainResult:
        self.jobs.append(job)
        raise MemoryLimitError(needed_bytes=job.memory_limit_bytes + 1, limit_bytes=job.memory_limit_bytes)

    def calibrate(self, job: Job[Calibrate], stopped: Callable[[], bool]) -> TrainResult:
        raise NotImplementedError

    def score(self, job: Job[Score], stopped: Callable[[], bool]) -> float:
        raise NotImplementedError

    def evaluate(self, job: Job[Evaluate], stopped: Callable[[], bool]) -> EvaluationResult:
        raise NotImplementedError

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        raise NotImplementedError


def test_it_ends_with_every_client_aggregated_in_every_round(undisturbed: BatchResult) -> None:
    assert [record.round for record in undisturbed.rounds] == [1, 2]
    assert [record.log_time_s for record in undisturbed.rounds] == [0.0, 60.0]
    assert {row.status for record in undisturbed.rounds for row in record.clients} == {"aggregated"}
    assert {name: tuple(submodels) for name, submodels in undisturbed.trained.items()} == dict.fromkeys(
        ("ada", "bob", "cyd"), (1, 2)
    )
    first, *_, last = (record.loss for record in undisturbed.rounds)
    assert first is not None
    assert last is not None
    assert last < first


def test_submodels_follow_the_log_at_the_rounds_time(undisturbed: BatchResult) -> None:
    first, second = map(rows_by_name, undisturbed.rounds)
    assert {name: row.budget_bytes for name, row in first.items()} == {
        "ada": SMALL_BYTES,
        "bob": SMALL_BYTES,
        "cyd": LARGE_BYTES,
    }
    assert first["ada"].architecture == first["bob"].architecture == second["ada"].architecture == "w1/2 d1"
    assert second["bob"].architecture == second["cyd"].architecture == first["cyd"].architecture == "w1 d1"
    for row in (*first.values(), *second.values()):
        assert 0 < row.planned_peak_bytes <= row.budget_bytes
        assert (row.downlink_budget_bytes, row.uplink_budget_bytes) == (1_250_000, 125_000)
        assert row.update_bytes == row.weight_bytes == 4 * row.parameters <= 125_000
        assert row.bytes_up > 4 * row.parameters, "the whole update was sent"


def test_the_same_experiment_gives_the_same_bits(undisturbed: BatchResult, exports: ExportPool) -> None:
    repeated = run_batch(experiment(), exports)
    assert repeated.model == undisturbed.model
    assert (repeated.rounds, repeated.turns) == (undisturbed.rounds, undisturbed.turns), (
        "byte counts and times are the same, too"
    )
    assert run_batch(experiment(seed=6), exports).model != undisturbed.model


def test_a_round_takes_as_long_as_its_slowest_link(undisturbed: BatchResult) -> None:
    for record in undisturbed.rounds:
        links_s = [8 * row.bytes_down / 1e7 + 8 * row.bytes_up / 1e6 for row in record.clients]
        assert [row.took_s for row in record.clients] == pytest.approx(links_s)
        assert record.seconds == pytest.approx(max(links_s), abs=0.01)
    rounds_s = sum(record.seconds or 0 for record in undisturbed.rounds)
    assert rounds_s < undisturbed.logical_seconds < rounds_s + 0.1, "devices also evaluate the last model"
    assert undisturbed.turns < 50


class SlowExports:
    """An exporter with answers that come late."""

    def __init__(self, exports: ExportPool) -> None:
        self._exports = exports

    def submit(self, *arguments: Any, **options: Any) -> "Future[Path]":
        late: Future[Path] = Future()
        file = self._exports.submit(*arguments, **options)
        threading.Timer(0.03, lambda: late.set_result(file.result())).start()
        return late


def test_work_of_the_server_takes_no_logical_time(undisturbed: BatchResult, exports: ExportPool) -> None:
    slowed = run_batch(experiment(), cast("ExportPool", SlowExports(exports)))
    assert slowed.rounds == undisturbed.rounds
    assert slowed.logical_seconds == undisturbed.logical_seconds


def test_a_run_without_durations_takes_no_time(exports: ExportPool) -> None:
    result = run_batch(experiment(host=HostSettings(durations="none")), exports)
    assert result.logical_seconds < 0.01, "no attempt or deadline elapsed"
    assert {row.took_s for record in result.rounds for row in record.clients} == {None}


def test_a_client_that_always_refuses_does_not_block_the_others(exports: ExportPool) -> None:
    refuser = RefusingTrainer()
    result = run_batch(experiment(), exports, trainers={"cyd": refuser})
    for record in result.rounds:
        rows = rows_by_name(record)
        assert rows["cyd"].status.startswith("refused: memory")
        assert rows["ada"].status == rows["bob"].status == "aggregated"
    assert len(refuser.jobs) == 4, "in each round it was also assigned a smaller task"
    assert "cyd" not in result.trained


def test_what_a_client_says_may_be_changed(exports: ExportPool) -> None:
    result = run_batch(experiment(), exports, interference={"cyd": Boaster()})
    for record in result.rounds:
        assert {row.client_id: row.sample_count for row in record.clients} == {"ada": 40, "bob": 40, "cyd": 10}


def test_what_clients_declare_is_what_is_trained(exports: ExportPool) -> None:
    """The small device declares a size that fits from the second round on, and never trains a smaller one."""
    small = Architecture(axes=tuple((f"section0.{axis}", Prefix(size=32)) for axis in ("block0.inner", "stream")))
    gathered = experiment(method=FlexiFed(choice="declared"))
    clients = tuple(
        replace(device, profile=replace(device.profile, architecture=architecture))
        for device, architecture in zip(gathered.devices, (small, Architecture(), small), strict=True)
    )
    first, second = map(rows_by_name, run_batch(replace(gathered, devices=clients), exports).rounds)
    for rows in (first, second):
        assert [(rows[name].architecture, rows[name].status) for name in ("ada", "cyd")] == [
            ("w1/2 d1", "aggregated")
        ] * 2
    assert first["bob"].status.startswith("skipped: its declared architecture, 'w1 d1', needs")
    assert (second["bob"].architecture, second["bob"].status) == ("w1 d1", "aggregated")


def test_a_client_process_gets_its_declared_architecture(tmp_path: Path) -> None:
    architecture = Architecture(axes=(("section0.stream", Prefix(size=32)),), name="w1/2 d1")
    plain = ClientCommand(
        client_id="pi",
        broker=parse_url("mqtt://h"),
        data=tmp_path,
        fleet="main",
        profile="laptop",
        log=tmp_path,
        state=tmp_path,
        runtime="onnx",
    )
    arguments = replace(plain, declares=canonical_json(architecture).decode()).build_arguments()
    assert (
        declare_architecture(load_profile("laptop"), arguments[arguments.index("--architecture") + 1]).architecture
        == architecture
    )
    assert "--architecture" not in plain.build_arguments()


class LimitedTrainer(RuntimeTrainer):
    """A runtime that loads no program with large weights, like one that lacks an operator."""

    def __init__(self, largest_bytes: int) -> None:
        super().__init__(ONNX, host=SharedHost())
        self.largest_bytes = largest_bytes
        self.refused: list[str] = []

    def train(self, job: Job[Train], stopped: Callable[[], bool]) -> TrainResult:
        if job.weights_path.stat().st_size > self.largest_bytes:
            self.refused.append(job.program_path.name)
            raise LoadError("no kernel for so wide a layer")
        return super().train(job, stopped)


def test_a_runtime_that_loads_no_large_program_ends_up_with_a_smaller_one(exports: ExportPool) -> None:
    limited = LimitedTrainer(20_000)
    result = run_batch(experiment(rounds=3), exports, trainers={"cyd": limited})
    rows = [rows_by_name(record)["cyd"] for record in result.rounds]
    assert [(row.status, row.architecture) for row in rows] == [("aggregated", "w1/2 d1")] * 3
    assert [row.refusals for row in rows] == ["runtime: no kernel for so wide a layer", "", ""]
    assert len(limited.refused) == 1, "the refused program is not sent again"
    assert rows_by_name(result.rounds[1])["bob"].architecture == "w1 d1", "other clients may train it"


def test_a_training_program_of_pytorch_runs_too(exports: ExportPool) -> None:
    large = tuple(client(name, index, LARGE_BYTES, runtime="torch") for index, name in enumerate(("ada", "bob", "cyd")))
    result = run_batch(replace(experiment(rounds=1), devices=large), exports)
    assert [(row.runtime, row.status) for row in result.rounds[0].clients] == [("torch", "aggregated")] * 3


def test_a_run_that_does_not_end_is_given_up(exports: ExportPool) -> None:
    with pytest.raises(RunError, match=r"within 6 turns: it is in phase '\w+' of round 1"):
        run_batch(experiment(host=HostSettings(turns_per_round=2)), exports)


class Mute:
    """Lets nothing pass."""

    def rewrite(self, message: Message) -> Iterable[Message]:
        return ()

    def accepts(self, kind: str) -> bool:
        return False


def test_a_failed_run_has_its_reason(exports: ExportPool) -> None:
    # No client is heard, so none joins; logical seconds pass at no cost.
    started_s = time.monotonic()
    with pytest.raises(RunError, match="only 0 of 3 clients were present after 3000 s"):
        run_batch(
            experiment(deadlines=Deadlines(join_s=3000.0)),
            exports,
            interference=dict.fromkeys(("ada", "bob", "cyd"), Mute()),
        )
    assert time.monotonic() - started_s < 3000.0


def test_a_runtime_that_is_unknown_here_is_refused(exports: ExportPool) -> None:
    unknown = replace(experiment(), devices=tuple(replace(device, runtime="other") for device in experiment().devices))
    with pytest.raises(ConfigError, match="clients run other, but in one process they can run executorch, onnx, torch"):
        run_batch(unknown, exports)


class ThreadedFleet:
    """The same fleet in real time, with a thread and a trainer for each client."""

    def __init__(self, gathered: GatheredRun, exports: ExportPool, folder: Path) -> None:
        self.stop = threading.Event()
        broker = MemoryBroker()
        tasks.write_npz(folder / "evaluation.npz", gathered.evaluation)
        server_config = replace(gathered.run, data=DataSettings(test=str(folder / "evaluation.npz")))
        link = connect_devices("main", broker.client("server"))
        self.server = Server(server_config, link, self, state_folder=folder / "server", exports=exports)
        threads = [
            threading.Thread(target=self._join, args=(device, broker, folder / device.client_id), daemon=True)
            for device in gathered.devices
        ]
        for thread in threads:
            thread.start()
        self.result = self.server.run(self.stop)
        self.stop.set()
        for thread in threads:
            thread.join(10.0)

    def say(self, text: str) -> None:
        """Ignored."""

    def round_finished(self, record: RoundRecord) -> None:
        """Ignored."""

    def _join(self, emulated: EmulatedDevice, broker: MemoryBroker, folder: Path) -> None:
        with AgentStore.open(folder) as store:
            tasks.write_npz(folder / "data.npz", emulated.data)
            trainer = OnnxTrainer()
            worker = TrainingWorker(
                {"onnx": trainer}, blobs=store.blobs, work_folder=store.work_folder, data=str(folder / "data.npz")
            )
            meter = ReplayMeter(ReplayedLog(emulated.log))
            data_bytes = emulated.data.summary().data_bytes
            profile = build_profile(emulated)
            assert profile.packing_width == find_packing_width(emulated.profile)
            settings = AgentSettings(profile=profile, data_bytes=data_bytes)
            device = Device(store=store, worker=worker, meter=meter)
            EdgeSession(settings, broker.client(emulated.client_id), Topics(), device).run(
                self.stop.is_set, poll_s=0.01
            )


def test_the_model_has_the_bits_of_a_fleet_in_real_time(exports: ExportPool, tmp_path: Path) -> None:
    # With budgets that the memory of this process, which all clients share, does not exceed by chance.
    gathered = replace(
        experiment(rates=(0.5,), clock=LogClock(), deadlines=Deadlines(linger_s=0.0)),
        devices=tuple(client(name, index, LARGE_BYTES) for index, name in enumerate(("ada", "bob", "cyd"))),
    )
    virtual = run_batch(gathered, exports)
    real = ThreadedFleet(gathered, exports, tmp_path).result
    assert {row.status for record in real.rounds for row in record.clients} == {"aggregated"}
    assert real.model_path is not None
    assert real.model_path.read_bytes() == virtual.model


def test_impossible_descriptions_are_refused() -> None:
    ada = client("ada", 0, LARGE_BYTES)
    with pytest.raises(ConfigError, match=r"client ids \['ada'\] are used more than once"):
        GatheredRun(run=config(), devices=(ada, ada, ada), evaluation=part(10))
    with pytest.raises(ConfigError, match="there are 1 clients, but a round needs 3"):
        GatheredRun(run=config(), devices=(ada,), evaluation=part(10))
    with pytest.raises(ConfigError, match="clock is missing"):
        GatheredRun(run=config(clock=None, min_clients=1), devices=(ada,), evaluation=part(10))
    with pytest.raises(ValueError, match="turns_per_round is 0"):
        HostSettings(turns_per_round=0)


def test_a_fixed_size_fits_the_log_most_of_the_time(exports: ExportPool) -> None:
    """A regression: a client with most memory at first kept the whole model, and skipped every later round."""
    free_bytes = (LARGE_BYTES, *(SMALL_BYTES,) * 9)
    clients = (client("ada", 0, *free_bytes), client("bob", 1, SMALL_BYTES), client("cyd", 2, LARGE_BYTES))
    gathered = GatheredRun(run=config(method=FlexiFed()), devices=clients, evaluation=part(10))
    first, second = run_batch(gathered, exports).rounds
    assert (first.participation, second.participation) == (1.0, 1.0)
    for record in (first, second):
        rows = rows_by_name(record)
        assert rows["ada"].architecture_id == rows["bob"].architecture_id != rows["cyd"].architecture_id
    # Nine tenths of its log have little memory; at a quantile above that, the first reading decides the size.
    patient = replace(gathered, run=config(method=FlexiFed(), log_quantile=0.95))
    first, second = run_batch(patient, exports).rounds
    assert first.participation == 1.0
    assert second.participation == pytest.approx(2 / 3)
    assert second.left_out == "1 skipped: memory"
