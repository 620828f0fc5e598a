"""The game with real processes: `subfleet serve`, a broker, sixteen times `subfleet-edge join`, and four liars."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from liar_benchmark.games import DRAWN, HONEST, MODEL, gathered_game, run_of
from liar_benchmark.lying import LIARS
from liar_benchmark.tables import MOST_LOST
from subfleet.emulation.files import Files, written
from subfleet.emulation.fleet import ClientCommand
from subfleet.link.broker import EmbeddedBroker
from subfleet.transport.address import BrokerAddress, parse_url

__all__ = ["PROCESS_ROUNDS", "ByProcesses", "played_by_processes"]

PROCESS_ROUNDS: Mapping[str, int] = MappingProxyType({"fedavg": 10, "fedtrans": 10, "oort": 18})
_SETTINGS: Mapping[str, str] = MappingProxyType({"fedtrans": "beta = 0.05\ngamma = 2\ndelta = 2\nstop_rounds = 0\n"})
"""Of methods, as in one process."""
_LEAVE_S = 120.0
"""For members to leave by themselves, after the server has."""
_RUN_S = 3600.0
_LIAR = Path(__file__).resolve().parent / "member.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the processes of one run ended.

    Attributes:
        summary: of the results; empty where there are none.
        failed: processes that ended with an error, or that had to be stopped.
        seconds: of the whole run.
    """

    summary: Mapping[str, Any]
    failed: tuple[str, ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        """On the server's samples; 0 where there are no results."""
        return float(self.summary.get("accuracy") or 0.0)

    @property
    def retries(self) -> int:
        """Of all rounds."""
        return sum(int(one.get("retries", 0)) for one in self.summary.get("rounds", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByProcesses:
    """A method's run with four liars, and the same without. Nothing is ever started anew: what fails has failed."""

    method: str
    rounds: int
    without: Ended
    beside: Ended

    @property
    def difference(self) -> float:
        """Of accuracies: what liars added."""
        return self.beside.accuracy - self.without.accuracy

    @property
    def told(self) -> str:
        """In words."""
        closed = len(self.beside.summary.get("rounds", ()))
        return (
            f"{100 * self.without.accuracy:.1f} % without, {100 * self.beside.accuracy:.1f} % with liars, {closed} of "
            f"{self.rounds} rounds, {self.beside.seconds / 60:.1f} minutes"
        )

    @property
    def problems(self) -> Iterator[str]:
        """What is wrong with it, in sentences."""
        for where, ended in (("without liars", self.without), ("with liars", self.beside)):
            if ended.failed:
                yield f"{self.method}, {where}: these did not end by themselves: {', '.join(ended.failed)}"
            if len(ended.summary.get("rounds", ())) != self.rounds:
                yield f"{self.method}, {where}: not all rounds closed"
        if self.difference < -MOST_LOST:
            yield f"{self.method}: {-100 * self.difference:.1f} points were lost, but 2 at most may be"

    @property
    def cells(self) -> Sequence[str]:
        """Those of its row."""
        failed = [*self.without.failed, *self.beside.failed]
        return (
            self.method,
            f"{100 * self.without.accuracy:.1f}",
            f"{100 * self.beside.accuracy:.1f}",
            f"{100 * self.difference:+.1f}",
            f"{len(self.beside.summary.get('rounds', ()))} of {self.rounds}",
            "yes" if not failed else f"**no**: {', '.join(failed)}",
            str(self.beside.retries),
            "0",
            f"{self.beside.seconds / 60:.1f}",
        )


def played_by_processes(method: str, folder: Path, rounds: int) -> ByProcesses:
    """Run a method twice, without liars and with them.

    Args:
        method: of `PROCESS_ROUNDS`.
        folder: for everything that is written.
        rounds: of each run.

    Raises:
        SubfleetError: the broker does not start, or a file cannot be written.
    """
    found = [_ended(method, folder / name, rounds, liars=name == "liars") for name in ("honest", "liars")]
    return ByProcesses(method=method, rounds=rounds, without=found[0], beside=found[1])


def _ended(method: str, folder: Path, rounds: int, *, liars: bool) -> Ended:
    folder.mkdir()
    game = gathered_game(run_of(method, 1, rounds), liars=liars, guarded=True, runtime="onnx")
    files = written(game, folder)
    file = folder / "liars.toml"
    file.write_text(_described(method, rounds, files.test), encoding="utf-8")
    started_s = time.monotonic()
    with ExitStack() as stack:
        broker = parse_url(stack.enter_context(EmbeddedBroker()).url)
        processes = {"server": _started(stack, _server(file, folder, broker), folder / "server.txt")}
        for device in game.devices:
            name = device.client_id
            command = _member(name, broker, files, folder)
            arguments = command.arguments()
            if name in LIARS:
                arguments = [sys.executable, str(_LIAR), *_liar_arguments(command)]
            processes[name] = _started(stack, arguments, folder / f"{name}.txt")
        failed = tuple(_failures(processes))
    summaries = list((folder / "runs").glob("*/summary.json"))
    summary = json.loads(summaries[0].read_text(encoding="utf-8")) if summaries else {}
    return Ended(summary=summary, failed=failed, seconds=time.monotonic() - started_s)


def _described(method: str, rounds: int, test: Path) -> str:
    """The run file; what is different from the run in one process are deadlines, as time passes, and the runtime."""
    drawn = DRAWN if method == "oort" else 0
    return f"""
name = "liars"
rounds = {rounds}
min_clients = {HONEST}
clients_per_round = {drawn}
rates = [0.125, 0.25, 0.5, 1.0]
communication_s = 1.0
targets = ["onnx"]
deploy_targets = []
seed = 1

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


def _server(file: Path, folder: Path, broker: BrokerAddress) -> list[str]:
    subfleet = [sys.executable, "-m", "subfleet.cli.main", "serve", str(file)]
    return [*subfleet, "--broker", f"mqtt://{broker.host}:{broker.port}", "--runs", str(folder / "runs"), "--port", "0"]


def _member(name: str, broker: BrokerAddress, files: Files, folder: Path) -> ClientCommand:
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


def _liar_arguments(command: ClientCommand) -> list[str]:
    address = f"mqtt://{command.broker.host}:{command.broker.port}"
    paths = [str(one) for one in (command.data, command.held_out, command.profile, command.log, command.state)]
    return [command.client_id, address, *paths]


def _started(stack: ExitStack, arguments: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
    told = stack.enter_context(output.open("wb"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=told, stderr=told, env=environment)
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _failures(processes: Mapping[str, "subprocess.Popen[bytes]"]) -> Iterator[str]:
    """Wait for the server, and for members to leave; yields those that end with an error, or stay."""
    for name, process in processes.items():
        try:
            code = process.wait(timeout=_RUN_S if name == "server" else _LEAVE_S)
        except subprocess.TimeoutExpired:
            yield f"{name} stayed"
            continue
        if code != 0:
            yield f"{name} ended with exit code {code}"
