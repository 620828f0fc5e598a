"""Fakes around a real server: an exporter without programs, devices without trainers, and a clock set by tests."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.fake_device import CLASSES, SHAPE, Behaviour, Device

from subfleet.elastic.building import network_of
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.network import Network
from subfleet.elastic.size_table import SizeTable
from subfleet.export.requests import AnyRequest, EstimateRequest, InferRequest, TrainRequest
from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal
from subfleet.journal.records import RoundRecord
from subfleet.link.device_link import DeviceLink, connect_devices
from subfleet.methods.heterofl import HeteroFL
from subfleet.programs.worker import Worker
from subfleet.protocol.errors import ExportError
from subfleet.protocol.memory_plan import MemoryPlan, Packing
from subfleet.protocol.programs import Program, ProgramManifest, encode_program
from subfleet.protocol.training import TrainingSettings
from subfleet.rounds.context import RunContext
from subfleet.search.query import Search
from subfleet.serving.run_context import create_context
from subfleet.serving.session import Server
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import Deadlines, LogClock
from subfleet.transport.counting import CountingTransport
from subfleet.transport.in_memory import Faults, MemoryBroker

MODEL = Mlp(input_shape=SHAPE, class_count=CLASSES, widths=(8, 8), depths=(2, 1), group_size=4)


def evaluation() -> tuple[Any, Any]:
    """Return the data set that the configurations of these tests name as an entry point."""
    generator = np.random.default_rng(5)
    return generator.random((30, *SHAPE), dtype=np.float32), generator.integers(0, CLASSES, 30)


def config(**changes: Any) -> Run:
    """Return a small run with a logical clock and every deadline far away."""
    settings: dict[str, Any] = {
        "name": "test",
        "model": MODEL,
        "data": DataSettings(test="server.server_rig:evaluation"),
        "rounds": 2,
        "min_clients": 3,
        "training": TrainingSettings(batch_size=4),
        "rates": (0.5, 1.0),
        "method": HeteroFL(weighting="samples", class_mask=False, depth=True),
        "clock": LogClock(start_s=0.0, step_s=10.0),
        "deadlines": Deadlines(join_s=1e4, measure_s=1e4, round_s=1e4, deploy_s=1e4, lease_s=1e4, linger_s=0.0),
        "deploy_targets": ("onnx",),
        "memory_overhead_bytes": {},
    }
    return Run(**{**settings, **changes})


def estimates_of(network: Network, bytes_per_parameter: int = 16) -> MemoryEstimates:
    """Return cost estimates that depend on parameters alone."""
    sizes, tensors = SizeTable(network), Counter[int]()
    for decl in network.tensors.values():
        factors = [factor for dim in decl.factors for factor in dim]
        number = math.prod(factor for factor in factors if isinstance(factor, int))
        tensors[sizes.column(number, Counter(factor for factor in factors if isinstance(factor, str)), decl.part)] += 1
    return MemoryEstimates(
        columns=sizes.columns(),
        held=bytes_per_parameter * np.array([tensors[column] for column in range(len(sizes))], dtype=np.float64),
        peaks=np.zeros((0, len(sizes))),
        parts=(),
        lines=np.array([[1.0, 1000.0]]),
    )


def search_of(context: RunContext, target: str = "onnx") -> Search | None:
    """Start the search of a method; None if it has no search."""
    search = context.roles.assigner.search
    return None if search is None else search.start(context.network, context.first.estimate, target)


class HandClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Notes:
    """An observer that records what it is told."""

    messages: list[str] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.messages.append(text)

    def round_finished(self, record: RoundRecord) -> None:
        self.records.append(record)


class FakeExports:
    """Writes programs; a function of the request gives their planned peak."""

    def __init__(self, folder: Path, planned: Callable[[Any], int] = lambda _: 1000) -> None:
        self.folder = folder
        self.planned = planned
        self.operators: tuple[str, ...] = ()
        self.packings: tuple[Packing, ...] = ()
        self.requests: list[AnyRequest] = []
        folder.mkdir(parents=True, exist_ok=True)

    def submit(
        self, request: AnyRequest, *, weights_path: Path | None = None, samples_from: str = ""
    ) -> "Future[Path]":
        self.requests.append(request)
        future: Future[Path] = Future()
        if isinstance(request, EstimateRequest):
            future.set_result(self._write_estimates(request))
            return future
        if isinstance(request, InferRequest):
            assert weights_path is not None
            assert bool(samples_from) == bool(request.samples_sha256)
            future.set_result(self._write_model(request, weights_path))
            return future
        try:
            planned_bytes = self.planned(request)
        except ExportError as error:
            future.set_exception(error)
            return future
        manifest = ProgramManifest(
            program_id=request.program_id,
            target=request.target,
            purpose="train" if isinstance(request, TrainRequest) else "evaluate",
            batch_size=request.batch_size,
            inputs=(),
            outputs=(),
            memory=MemoryPlan(runtime_bytes=planned_bytes, packings=self.packings),
            max_abs_diff=0.0,
            operators=self.operators,
        )
        path = self.folder / f"{request.program_id}.program"
        path.write_bytes(encode_program(Program(manifest=manifest, body=request.architecture.architecture_id.encode())))
        future.set_result(path)
        return future

    def _write_estimates(self, request: EstimateRequest) -> Path:
        path = self.folder / request.file_name
        path.write_bytes(estimates_of(network_of(request.training.model)).pack())
        return path

    def _write_model(self, request: InferRequest, weights_path: Path) -> Path:
        path = self.folder / f"{request.program_id}.{request.target}"
        plain = {"max_abs_diff": 1e-6}
        metadata = (
            plain if request.quantisation == "none" else {"quantisation": {"accuracy": 0.75, "float_accuracy": 0.875}}
        )
        Path(f"{path}.json").write_text(json.dumps(metadata), encoding="utf-8")
        path.write_bytes(b"model " + request.architecture.architecture_id.encode() + weights_path.read_bytes())
        return path


class World:
    """A broker, a server and devices in one thread, with a clock that the test sets."""

    def __init__(
        self,
        folder: Path,
        settings: Run,
        devices: Mapping[str, Behaviour],
        *,
        faults: Faults | None = None,
        planned: Callable[[Any], int] = lambda _: 1000,
        order: int = 0,
    ) -> None:
        self.clock = HandClock()
        self.folder = folder
        self.settings = settings
        self.broker = MemoryBroker(faults, clock=self.clock)
        self.notes = Notes()
        self.exports = FakeExports(folder / "exports", planned)
        self.order = random.Random(order)
        self.devices = {name: self.new_device(name, behaviour) for name, behaviour in devices.items()}
        self.server = self.new_server()
        self.server.open()
        for device in self.devices.values():
            device.open()

    def new_device(self, name: str, behaviour: Behaviour, *, start: int = 1) -> Device:
        folder = self.folder / "devices"
        return Device(name, self.broker.client(name), folder, self.clock, behaviour, start=start)

    @property
    def context(self) -> RunContext:
        """The run context, without the statistics of the evaluation data."""
        return create_context(self.settings, self.server.context.run_id)

    @property
    def journal(self) -> Journal:
        """The journal of the run, opened as another process reads it."""
        return Journal(open_database(self.folder / "state", warns=False), self.server.context.run_id)

    def new_server(self) -> Server:
        self.line = CountingTransport(self.broker.client("server"))
        return Server(
            self.settings,
            connect_devices(self.settings.fleet.name, self.line, clock=self.clock),
            self.notes,
            state_folder=self.folder / "state",
            exports=self.exports,
            clock=self.clock,
        )

    def kill_server(self) -> None:
        """Replace the server as a new process would; closing the old one sends nothing, like a kill."""
        self.server.close()
        self.server = self.new_server()
        self.server.open()

    def turn(self, seconds: float = 0.25) -> None:
        """Advance the clock; every device takes one step in random order, then the server."""
        self.clock.now_s += seconds
        names = sorted(self.devices)
        self.order.shuffle(names)
        for name in names:
            self.devices[name].step()
        self.server.step(0.0)
        # Background work takes no time in these tests: the next step, or a restart after a kill, finds it done.
        self.server.finish(exports=False)

    def run(self, until: Callable[[], bool] | None = None, *, turns: int = 4000, seconds: float = 0.25) -> None:
        for _ in range(turns):
            if self.server.finished if until is None else until():
                return
            self.turn(seconds)
        raise AssertionError(f"the run hangs in {self.server.state.phase} of round {self.server.state.round}")

    def model_bytes(self) -> bytes:
        path = self.server.result().model_path
        assert path is not None
        return path.read_bytes()


@contextmanager
def losing_actions() -> Iterator[None]:
    """Make servers perform none of the actions that they have journaled, as if killed in between."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "begin", lambda *_: None)
        for name in ("ask", "send_task", "withdraw", "reply", "pull"):
            patch.setattr(DeviceLink, name, lambda *_: None)
        yield


def fleet(**changes: Any) -> dict[str, Behaviour]:
    """Three devices with different samples."""
    return {
        name: replace(Behaviour(sample_count=count), **changes)
        for name, count in (("ada", 7), ("bob", 20), ("cyd", 33))
    }
