"""The command line: examples in every help text; one sentence and an exit code for every error."""

import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from trainers.recording_program import manifest

from subfleet.agent.states import Saved
from subfleet.device import describing, runtimes
from subfleet.device.capture import CaptureOptions, capture
from subfleet.device.trials import TrialResult
from subfleet.device_profiles.logs import read_log
from subfleet.edge_client import cli
from subfleet.edge_client.device_options import DeviceOptions
from subfleet.edge_client.store import AgentStore, find_state_folder
from subfleet.protocol.errors import ConfigError, DataError, FileError, MissingExtraError, ProtocolError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.jobs import DataSummary, Prediction
from subfleet.protocol.memory_plan import MemoryPlan, Packing
from subfleet.protocol.programs import Program, encode_program
from subfleet.protocol.readings import Reading
from subfleet.protocol.registry import Registry

NOBODY = "mqtt://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _quiet_root_logger() -> Iterator[None]:
    # A command configures the logging of its process, which in a test is the test process.
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((6, 1, 2, 2), np.float32), y=np.arange(6) % 3)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    try:
        code = cli.main(arguments)
    except SystemExit as error:  # argparse exits this way
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", [(), ("join",), ("capture",), ("doctor",), ("predict",)])
def test_every_help_shows_an_example(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert f"example: subfleet-edge {' '.join(command)}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "COMMAND"),
        (("jion",), 2, "invalid choice"),
        (("join",), 2, "--data"),
        (("join", NOBODY, "--data", "x", "--memory-fraction", "2"), 2, "is 2, but must be above 0 and at most 1"),
        (("join", NOBODY, "--data", "x", "--memory-fraction", "much"), 2, "must be a number"),
        (("join", NOBODY, "--data", "x", "--memory-limit", "300m"), 2, "is '300m', but must be a size such as 300M"),
        (("join", NOBODY, "--data", "x", "--disk-limit", "0"), 2, "is '0', but must be a size such as 300M"),
        (("join", NOBODY, "--data", "x", "--threads", "0"), 2, "1 or more"),
        (("capture", "--every", "nan"), 2, "must be above 0"),
        (("capture", "--every", "1e10"), 2, "at most 1e+09"),
        (("join", "http://host", "--data", "x"), 10, "mqtt://host:port"),
        (("join", NOBODY, "--data", "x", "--profile", "toaster"), 10, "toaster"),
        (("join", NOBODY, "--data", "x", "--fleet", "a/b"), 10, "a/b"),
        (("join", "mqtt://me@h", "--data", "x", "--id", "you"), 10, "omit --id"),
        (("join", NOBODY, "--data", "x", "--ca", "absent.pem"), 10, "--ca is for TLS"),
        (("join", "mqtts://h", "--data", "x", "--ca", "absent.pem"), 11, "absent.pem"),
        (("join", "mqtts://h", "--data", "x", "--key", "absent.pem"), 10, "--cert names no certificate"),
        (("join", "mqtt://me@h", "--data", "x", "--password-file", "absent"), 11, "absent"),
        (("join", NOBODY, "--data", "x", "--id", "a/b"), 21, "a/b"),
        (("join", NOBODY, "--data", "x", "--replay", "absent.csv"), 11, "absent.csv"),
        (("join", NOBODY, "--data", "/no/such/data"), 11, "/no/such/data"),
        (("join", NOBODY, "--data", "digits:train", "--held-out", "/no/such/part"), 11, "/no/such/part"),
        (("join", NOBODY, "--data", "x", "--architecture", "absent.json"), 11, "absent.json"),
        (("join", NOBODY, "--data", "x", "--architecture", "a\0b"), 11, "name a file with a submodel as JSON"),
        (
            ("join", NOBODY, "--data", "x", "--architecture", '{"axes": 1}'),
            10,
            "Architecture.axes is 1, but must be a list",
        ),
        (("join", NOBODY, "--data", "x", "--architecture", "{"), 10, "is not JSON"),
        (("predict", "model.txt", "--data", "x"), 10, "must end in one of"),
        (("predict", "absent.onnx", "--data", "x"), 11, "absent"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    exit_code, out, err = run(capsys, *arguments)
    assert (exit_code, out) == (code, "")
    assert words in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


def test_a_shortened_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for shortened in (("--memory", "0.5"), ("--thread", "2"), ("--verb",)):
        code, _, err = run(capsys, "join", NOBODY, "--data", "x", *shortened)
        assert code == ExitCode.USAGE
        assert f"unrecognized arguments: {' '.join(shortened)}" in err


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"subfleet-edge {version('subfleet')}\n", "")


@pytest.mark.slow
def test_an_unreachable_broker_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: str) -> None:
    code, _, err = run(capsys, "join", NOBODY, "--data", data, "--state", str(tmp_path / "state"))
    assert code == ExitCode.TRANSPORT
    assert "no broker listens at 127.0.0.1:1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RuntimeError("odd"), ExitCode.INTERNAL, "a defect of Subfleet (RuntimeError: odd); --verbose"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "run the same command again"),
        (ModuleNotFoundError("no", name="paho.mqtt"), ExitCode.MISSING_EXTRA, "pip install 'subfleet[edge]'"),
        (DataError("two\nlines"), ExitCode.DATA, "two lines"),
    ],
)
def test_nothing_reaches_the_user_as_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(runtimes, "find_trainer", fail)
    exit_code, _, err = run(capsys, "predict", "m.onnx", "--data", "d")
    assert exit_code == code
    assert words in err
    assert len(err.splitlines()) == 1


class FakeTrainer:
    target = "fake"
    suffix = ".fake"
    providers = ("cpu", "cuda")
    held_bytes = 0

    def __init__(self, error: Exception | None = None, provider: str = "cpu") -> None:
        self.error = error
        self.provider = provider

    def describe_runtime(self) -> str:
        return "a test's"

    def describe(self, data: str) -> DataSummary:
        if self.error is not None:
            raise self.error
        return DataSummary(sample_count=len(data), input_shape=(1,), class_counts=(1,))

    def train(self, job: object, stopped: object) -> None:
        raise NotImplementedError

    def score(self, job: object, stopped: object) -> float:
        raise NotImplementedError

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        return Prediction(labels=(2, 0), metrics={"accuracy": 0.5, "auroc": 0.75}, classes=("ant", "bee", "cat"))


class FakeEntry:
    def __init__(self, name: str, trainer: object) -> None:
        self.name = self.value = name
        self.dist = None
        self.trainer = trainer

    def load(self) -> object:
        if isinstance(self.trainer, Exception):
            raise self.trainer
        return lambda provider="cpu": self.trainer if provider == "cpu" else FakeTrainer(provider=provider)


def succeed(name: str, provider: str) -> TrialResult:
    return TrialResult(text=f"{name} on {provider}")


def use_trainers(monkeypatch: pytest.MonkeyPatch, **trainers: object) -> None:
    entries: list[Any] = [FakeEntry(name, trainer) for name, trainer in trainers.items()]
    monkeypatch.setattr(runtimes, "TRAINERS", Registry("fake.trainers", "runtime", find=lambda group: entries))


@pytest.mark.slow
def test_predict_chooses_the_trainer_by_suffix_and_prints_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_trainers(monkeypatch, fake=FakeTrainer())
    code, out, _ = run(capsys, "predict", "m.fake", "--data", "d", "--json")
    assert (code, json.loads(out)) == (
        0,
        {
            "model": "m.fake",
            "accuracy": 0.5,
            "headline": "accuracy",
            "metrics": {"accuracy": 0.5, "auroc": 0.75},
            "numbers": [],
            "labels": [2, 0],
            "names": ["cat", "ant"],
        },
    )
    output = run(capsys, "predict", "m.fake", "--data", "d")[1]
    assert "accuracy 0.5000 on 2 samples\npredicted: cat (1), ant (1)\n" in output


def test_the_first_runtime_that_is_installed_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = FakeTrainer(MissingExtraError("torch", "export"))
    use_trainers(monkeypatch, a=missing, b=FakeTrainer(), c=ModuleNotFoundError("no", name="numpy.linalg"))
    trainer, summary = runtimes.choose_trainer(["a", "b"], "data", attempt=succeed)
    assert (trainer.target, summary.sample_count) == ("fake", 4)
    with pytest.raises(MissingExtraError, match="'torch'"):
        runtimes.choose_trainer(["a"], "data", attempt=succeed)
    with pytest.raises(MissingExtraError, match="'numpy'"):
        runtimes.choose_trainer(["c"], "data", attempt=succeed)
    with pytest.raises(ConfigError, match="no runtime 'd'"):
        runtimes.choose_trainer(["d"], "data", attempt=succeed)


def test_a_provider_is_handed_to_the_runtime_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use_trainers(monkeypatch, a=FakeTrainer())
    trainer, _ = runtimes.choose_trainer(["a"], "data", "cuda", attempt=succeed)
    assert vars(trainer)["provider"] == "cuda"
    with pytest.raises(ConfigError, match=r"'a' has no provider 'tpu'; choose one of \['cpu', 'cuda'\]"):
        runtimes.choose_trainer(["a"], "data", "tpu", attempt=succeed)


def test_bad_data_is_not_taken_for_a_missing_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    use_trainers(monkeypatch, a=FakeTrainer(DataError("empty")), b=FakeTrainer())
    with pytest.raises(DataError, match="empty"):
        runtimes.choose_trainer(["a", "b"], "data", attempt=succeed)


def test_the_id_is_the_option_or_the_user_or_the_host() -> None:
    named, nameless = DeviceOptions(client_id="me"), DeviceOptions()
    assert named.choose_client_id(None) == "me"
    assert nameless.choose_client_id("me") == "me"
    assert named.choose_client_id("me") == "me"
    assert nameless.choose_client_id(None)
    with pytest.raises(ProtocolError):
        DeviceOptions(client_id="a b").choose_client_id(None)


def test_the_state_folder_names_fleet_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert find_state_folder("main", "pi") == Path("/x/subfleet/main/pi")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert find_state_folder("main", "pi") == Path.home() / ".local/state/subfleet/main/pi"


def test_the_command_line_overrides_the_profile() -> None:
    profile = DeviceOptions(profile="laptop", memory_fraction=0.75, threads=3).load_profile()
    assert (profile.memory_fraction, profile.threads) == (0.75, 3)
    assert DeviceOptions(profile="laptop").load_profile().threads == 1
    limited = DeviceOptions(profile="laptop", memory_limit="300M", disk_limit="1Gi").load_profile()
    assert (limited.max_training_bytes, limited.disk_limit_bytes) == (300_000_000, 2**30)


def test_join_applies_the_disk_limit_to_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: str) -> None:
    calls: list[tuple[object, ...]] = []

    def hold(*arguments: object) -> NoReturn:
        calls.append(arguments)
        raise FileError("this test ends here")

    monkeypatch.setattr(AgentStore, "open", hold)
    command = ("join", NOBODY, "--data", data, "--state", str(tmp_path))
    assert cli.main([*command, "--disk-limit", "50M"]) == cli.main(command) == ExitCode.FILE
    assert calls == [(tmp_path, 50_000_000), (tmp_path, 2_000_000_000)]


@pytest.mark.slow
@pytest.mark.usefixtures("healthy")
def test_doctor_reports_findings_and_remedies(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: str) -> None:
    state = str(tmp_path / "state")
    code, out, _ = run(capsys, "doctor", "--data", data, "--state", state, "--memory-fraction", "0.5", "--json")
    report = json.loads(out)
    assert code == 0
    assert {finding["check"] for finding in report["findings"]} >= {"python", "psutil", "runtimes", "memory", "data"}
    assert report["budget_bytes"] > 0
    code, out, _ = run(capsys, "doctor", "--state", state, "--memory-fraction", "0.5", "--memory-limit", "1K")
    assert "share 0.5 and at most 0.0 MB, budget 0.0 MB" in out
    _, out, _ = run(capsys, "doctor", "--state", state, "--memory-limit", "1K", "--json")
    assert json.loads(out)["budget_bytes"] == 1000
    code, out, _ = run(capsys, "doctor", NOBODY, "--data", "/no/such", "--state", state)
    assert code == ExitCode.FILE
    assert "FAIL data" in out
    assert "FAIL broker" in out
    assert "no broker listens" in out


@pytest.mark.usefixtures("healthy")
def test_doctor_reports_whether_a_program_fits_the_budget_to_the_byte(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describing, "detect_packing_width", lambda: 32)
    memory = MemoryPlan(runtime_bytes=990, packings=(Packing(width=32, more_bytes=10),))
    program_manifest = replace(manifest(4), memory=memory)
    store = AgentStore(tmp_path)
    ref = store.blobs.add(encode_program(Program(manifest=program_manifest, body=b"-")))
    store.save(Saved(programs=(ref.sha256,)))
    for limit, verdict in (("1000", " fits"), ("999", " does not fit")):
        _, out, _ = run(capsys, "doctor", "--state", str(tmp_path), "--memory-limit", limit)
        assert f"MB{verdict}" in out


@pytest.mark.usefixtures("healthy")
def test_doctor_changes_nothing_in_the_folder_of_an_agent_at_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "half.tmp").write_bytes(b"x")
    (tmp_path / "agent.json").write_bytes(b"{")
    code, out, _ = run(capsys, "doctor", "--state", str(tmp_path))
    assert code == ExitCode.PROTOCOL
    assert "FAIL fits" in out
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "agent.json", "blobs", "blobs/half.tmp",
    ]  # fmt: skip


class SteadyMeter:
    def read(self, log_time_s: float | None) -> tuple[float | None, Reading]:
        return None, Reading(memory_free_bytes=5, network="wifi")

    def low(self, quantile: float) -> Reading | None:
        return None

    def note_transfer(self, direction: str, size_bytes: int, now_s: float) -> None:
        raise NotImplementedError


def test_a_capture_is_a_log_with_rows_at_whole_steps(tmp_path: Path) -> None:
    times = itertools.count(100.0, 0.25)  # every reading of the clock takes a quarter of a second
    slept: list[float] = []
    options = CaptureOptions(path=tmp_path / "c.csv", duration_s=10.0, step_s=5.0)
    assert capture(options, SteadyMeter(), clock=lambda: next(times), sleep=slept.append) == 3
    rows = read_log(tmp_path / "c.csv").rows
    assert [row.reading for row in rows] == [Reading(memory_free_bytes=5, network="wifi")] * 3
    assert slept == [0.0, 4.25, 8.75]


def test_an_interrupted_capture_has_every_row_and_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"

    def interrupt(_: float) -> None:
        if path.read_text().count("\n") > 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(CaptureOptions(path=path), SteadyMeter(), sleep=interrupt)
    assert len(read_log(path).rows) == 2
    with pytest.raises(FileError, match="already exists"):
        capture(CaptureOptions(path=path), SteadyMeter())
