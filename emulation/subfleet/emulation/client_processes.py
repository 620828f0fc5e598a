"""Client processes on this machine. Each runs the agent of a real device, with a replayed resource log."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from subfleet.edge_client.joining import Durations
from subfleet.protocol.errors import RunError
from subfleet.transport.address import PASSWORD_VARIABLE, BrokerAddress

_LOG = logging.getLogger(__name__)
MAX_DEATHS = 3
"""How often a client may be killed in a run before the run fails."""
STOP_S = 10.0
"""Seconds that a client may take to stop before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCommand:
    """How a client process is started: the arguments and the environment of `subfleet-edge join`."""

    client_id: str
    broker: BrokerAddress
    fleet: str
    data: Path
    profile: str
    log: Path
    state: Path
    runtime: str
    declares: str = ""
    held_out: Path | None = None
    durations: Durations = "modelled"
    binds_memory: bool = False
    groups: Sequence[Path] = ()

    def build_arguments(self) -> list[str]:
        """The command line, with this Python interpreter."""
        return [
            *(sys.executable, "-m", "subfleet.edge_client.cli", "join", self.broker.url, *_tls_options(self.broker)),
            *(() if self.broker.username is None else ("--shared-user",)),
            *("--fleet", self.fleet, "--id", self.client_id, "--data", str(self.data), "--profile", self.profile),
            *("--replay", str(self.log), "--state", str(self.state), "--runtime", self.runtime),
            *("--durations", self.durations),
            *(("--bind-memory",) if self.binds_memory else ()),
            *(part for folder in self.groups for part in ("--group", str(folder))),
            *(("--architecture", self.declares) if self.declares else ()),
            *(() if self.held_out is None else ("--held-out", str(self.held_out))),
            "--wait",  # a broker on a busy machine may answer late
            "--leave-when-finished",
            "--leave-with-stdin",
        ]

    def build_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment variables. They hold the password, because every user can read a command line."""
        # One thread per client: clients share this machine, and results have the same bits with one thread only.
        environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment.pop(PASSWORD_VARIABLE, None)
        if self.broker.password is not None:
            environment[PASSWORD_VARIABLE] = self.broker.password
        return environment


def _tls_options(broker: BrokerAddress) -> list[str]:
    if broker.tls is None:
        return []
    options = {"--ca": broker.tls.ca, "--cert": broker.tls.certificate, "--key": broker.tls.key}
    return [part for option, path in options.items() if path is not None for part in (option, str(path))]


class ClientProcesses:
    """A context in which the clients run; leaving it stops them.

    Args:
        commands: one for each client.
        output_folder: receives the output of each client, as `<client>.txt`.
    """

    def __init__(self, commands: tuple[ClientCommand, ...], *, output_folder: Path) -> None:
        self._commands = commands
        self._folder = output_folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._deaths = dict.fromkeys((command.client_id for command in commands), 0)

    def __enter__(self) -> "ClientProcesses":
        self._folder.mkdir(parents=True, exist_ok=True)
        for command in self._commands:
            self._start(command)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Restart clients that were killed by a signal; they resume their work.

        Raises:
            RunError: a client has failed, or was killed too often; the message names the file with its output.
        """
        for command in self._commands:
            code = self._processes[command.client_id].poll()
            if code is None or code == 0:
                continue
            self._deaths[command.client_id] += 1
            if code > 0 or self._deaths[command.client_id] > MAX_DEATHS:
                how = f"ended with exit code {code}" if code > 0 else f"was killed {MAX_DEATHS + 1} times"
                raise RunError(f"client {command.client_id} {how}; see {self._folder / command.client_id}.txt")
            _LOG.warning("client %s was killed by signal %d and is restarted", command.client_id, -code)
            self._start(command)

    def _start(self, command: ClientCommand) -> None:
        with (self._folder / f"{command.client_id}.txt").open("ab") as output:
            self._processes[command.client_id] = subprocess.Popen(
                # The pipe closes when this process ends, even if it is killed, so no client outlives it.
                command.build_arguments(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=command.build_environment(os.environ),
            )

    def wait(self, timeout_s: float) -> None:
        """Wait until every client has left by itself, for up to `timeout_s` seconds."""
        deadline_s = time.monotonic() + timeout_s
        for client_id, process in self._processes.items():
            try:
                process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                _LOG.warning("client %s did not exit by itself", client_id)

    def stop(self) -> None:
        """Ask every client to stop, and kill clients that do not stop in time."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline_s = time.monotonic() + STOP_S
        for process in self._processes.values():
            try:
                process.wait(timeout=max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
