"""The game with real processes: a broker, `subfleet serve`, sixteen of `subfleet-edge join`, and four liars."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from liar_benchmark.games import DRAWN, HONEST, MODEL, create_run, gather_game
from liar_benchmark.lying import LIARS
from liar_benchmark.tables import MOST_LOST
from subfleet.emulation.client_processes import ClientCommand
from subfleet.emulation.files import Files, write_files
from subfleet.link.broker import EmbeddedBroker
from subfleet.transport.address import BrokerAddress, parse_url

__all__ = ["PROCESS_ROUNDS", "ProcessResult", "play_in_processes"]

PROCESS_ROUNDS: Mapping[str, int] = MappingProxyType({"fedavg": 10, "fedtrans": 10, "oort": 30})
_SETTINGS: Mapping[str, str] = MappingProxyType({"fedtrans": "beta = 0.05\ngamma = 2\ndelta = 2\nstop_rounds = 0\n"})
"""Rounds of methods, as in one process."""
_LEAVE_S = 120.0
"""Time for members to exit by themselves after the server."""
_RUN_S = 3600.0
_LIAR = Path(__file__).resolve().parent / "member.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRun:
    """The outcome of the processes of one run.

    Attributes:
        summary: summary of the results; empty if there are none.
        failed: processes that ended with an error, or that had to be stopped.
        seconds: duration of the whole run.
    """

    summary: Mapping[str, Any]
    failed: tuple[str, ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Accuracy on the server's samples; 0 without results."""
        return float(self.summary.get("accuracy") or 0.0)

    @property
    def failed_attempts(self) -> int:
        """The failed attempts of all rounds."""
        return sum(int(record.get("failed_attempts", 0)) for record in self.summary.get("rounds", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """A method's runs with four liars and without, seed by seed. Failed processes are not restarted.

    Attributes:
        rounds: rounds of each run.
        without: runs of only the honest members.
        beside: the same with liars.
    """

    method: str
    rounds: int
    without: tuple[ProcessRun, ...]
    beside: tuple[ProcessRun, ...]

    @property
    def differences(self) -> tuple[float, ...]:
        """By seed, the accuracy with liars minus the accuracy without."""
        return tuple(
            lied_to.accuracy - honest.accuracy for honest, lied_to in zip(self.without, self.beside, strict=True)
        )

    @property
    def description(self) -> str:
        """The accuracies and the duration in one line."""
        without, beside = _format_mean_accuracy(self.without), _format_mean_accuracy(self.beside)
        return f"{without} % without, {beside} % with liars, {self.minutes:.1f} minutes a run"

    @property
    def minutes(self) -> float:
        """The mean duration of a run with liars."""
        return statistics.fmean(run.seconds for run in self.beside) / 60

    @property
    def problems(self) -> Iterator[str]:
        """The problems of the runs as sentences."""
        for where, runs in (("without liars", self.without), ("with liars", self.beside)):
            for seed, run in enumerate(runs, start=1):
                if run.failed:
                    yield f"{self.method}, {where}, seed {seed}: did not end by themselves: {', '.join(run.failed)}"
                if len(run.summary.get("rounds", ())) != self.rounds:
                    yield f"{self.method}, {where}, seed {seed}: not all rounds closed"
        if (difference := statistics.fmean(self.differences)) < -MOST_LOST:
            yield f"{self.method}: {-100 * difference:.1f} points were lost, but 2 at most may be"

    @property
    def cells(self) -> Sequence[str]:
        """The cells of its table row."""
        failed = sum(bool(run.failed) for run in (*self.without, *self.beside))
        return (
            self.method,
            _format_mean_accuracy(self.without),
            _format_mean_accuracy(self.beside),
            f"{100 * statistics.fmean(self.differences):+.1f}",
            f"{100 * min(self.differences):+.1f}",
            str(self.rounds),
            str(len(self.beside)),
            f"**no**: {failed} runs" if failed else "yes",
            str(sum(run.failed_attempts for run in self.beside)),
            "0",
            f"{self.minutes:.1f}",
        )


def _format_mean_accuracy(runs: Sequence[ProcessRun]) -> str:
    return f"{100 * statistics.fmean(run.accuracy for run in runs):.1f}"


def play_in_processes(method: str, folder: Path, rounds: int, seeds: Sequence[int]) -> ProcessResult:
    """Run a method with each seed, without liars and with them.

    Args:
        method: a key of `PROCESS_ROUNDS`.
        folder: folder for all files.
        rounds: rounds of each run.
        seeds: seeds of the runs.

    Raises:
        SubfleetError: the broker does not start, or a file cannot be written.
    """
    runs = [
        tuple(_run_processes(method, folder / f"{name}{seed}", rounds, seed, liars=name == "liars") for seed in seeds)
        for name in ("honest", "liars")
    ]
    return ProcessResult(method=method, rounds=rounds, without=runs[0], beside=runs[1])


def _run_processes(method: str, folder: Path, rounds: int, seed: int, *, liars: bool) -> ProcessRun:
    folder.mkdir()
    game = gather_game(create_run(method, seed, rounds), liars=liars, guarded=True, runtime="onnx")
    files = write_files(game, folder)
    file = folder / "liars.toml"
    file.write_text(_format_run_file(method, rounds, seed, files.test), encoding="utf-8")
    started_s = time.monotonic()
    with ExitStack() as stack:
        broker = parse_url(stack.enter_context(EmbeddedBroker()).url)
        processes = {"server": _start(stack, _build_server_command(file, folder, broker), folder / "server.txt")}
        for device in game.devices:
            name = device.client_id
            command = _build_member_command(name, broker, files, folder)
            arguments = command.build_arguments()
            if name in LIARS:
                arguments = [sys.executable, str(_LIAR), *_build_liar_arguments(command)]
            processes[name] = _start(stack, arguments, folder / f"{name}.txt")
        failed = tuple(_collect_failures(processes))
    summaries = list((folder / "runs").glob("*/summary.json"))
    summary = json.loads(summaries[0].read_text(encoding="utf-8")) if summaries else {}
    return ProcessRun(summary=summary, failed=failed, seconds=time.monotonic() - started_s)


def _format_run_file(method: str, rounds: int, seed: int, test: Path) -> str:
    """The run file; it differs from the run in one process by its deadlines and its runtime."""
    clients_per_round = DRAWN if method == "oort" else 0
    return f"""
name = "liars"
rounds = {rounds}
min_clients = {HONEST}
clients_per_round = {clients_per_round}
rates = [0.125, 0.25, 0.5, 1.0]
communication_s = 1.0
targets = ["onnx"]
deploy_targets = []
seed = {seed}

[clock]
step_s = 60.0

[method]
type = "{method}"
{_SETTINGS.get(method, "")}
[model]
family = "mlp"
input_shape = {list(MODEL.input_shape)}
class_count = {MODEL.class_count}
widths = {list(MODEL.widths)}
depths = {list(MODEL.depths)}
group_size = {MODEL.group_size}

[training]
epochs = 2
batch_size = 8
learning_rate = 0.05

[data]
test = "{test}"

[deadlines]
join_s = 300.0
measure_s = 20.0
round_s = 40.0
evaluate_s = 20.0
lease_s = 30.0
linger_s = 10.0
"""


def _build_server_command(file: Path, folder: Path, broker: BrokerAddress) -> list[str]:
    serve = [sys.executable, "-m", "subfleet.cli.main", "serve", str(file), "--http-port", "0"]
    return [*serve, "--broker", f"mqtt://{broker.host}:{broker.port}", "--runs", str(folder / "runs")]


def _build_member_command(name: str, broker: BrokerAddress, files: Files, folder: Path) -> ClientCommand:
    return ClientCommand(
        client_id=name,
        broker=broker,
        fleet="main",
        data=files.clients[name],
        held_out=files.held_out[name],
        profile=str(files.profiles[name]),
        log=files.logs[name],
        state=folder / "devices" / name,
        runtime="onnx",
    )


def _build_liar_arguments(command: ClientCommand) -> list[str]:
    address = f"mqtt://{command.broker.host}:{command.broker.port}"
    paths = [str(path) for path in (command.data, command.held_out, command.profile, command.log, command.state)]
    return [command.client_id, address, *paths]


def _start(stack: ExitStack, arguments: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
    log = stack.enter_context(output.open("wb"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _collect_failures(processes: Mapping[str, "subprocess.Popen[bytes]"]) -> Iterator[str]:
    """Wait for the server and the members to exit; yields the processes that fail or do not exit in time."""
    for name, process in processes.items():
        try:
            code = process.wait(timeout=_RUN_S if name == "server" else _LEAVE_S)
        except subprocess.TimeoutExpired:
            yield f"{name} stayed"
            continue
        if code != 0:
            yield f"{name} ended with exit code {code}"
