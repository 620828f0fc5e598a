"""Whole runs of searches: programs come a round later, after a kill, or never."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.server_rig import FakeExports, World, config, fleet
from server.test_export_queue import BUDGETS, SEARCH

from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.export.requests import AnyRequest, TrainRequest
from subfleet.protocol.errors import ExportError
from subfleet.protocol.task import Train
from subfleet.rounds.context import RunContext
from subfleet.serving.run_context import create_context as planned


def _plan_or_fail(context: RunContext, names: set[str]) -> Callable[[TrainRequest], int]:
    """An exporter with plans equal to the cost estimates, which cannot write the sizes of these names."""

    def peak_bytes(request: TrainRequest) -> int:
        if request.architecture.architecture_id in names:
            raise ExportError("a layer cannot be trained")
        return context.first.estimate(request.architecture).training_memory_bytes["onnx"]

    return peak_bytes


def _hold_back(exports: FakeExports, sizes: set[str]) -> None:
    """From now on only these sizes are written; the others never become ready."""
    write = exports.submit

    def submit(request: AnyRequest, **options: Any) -> "Future[Path]":
        if isinstance(request, TrainRequest) and request.architecture.architecture_id not in sizes:
            return Future()
        return write(request, **options)

    exports.submit = submit  # type: ignore[method-assign]


def _run(folder: Path, names: set[str], *, kill: bool = False) -> World:
    settings = config(method=replace(SEARCH, distillation=DistillationSettings(iterations=2)), rounds=3)
    behaviours = fleet()
    for name, behaviour in behaviours.items():
        behaviour.memory_budget_bytes = lambda _, name=name: BUDGETS[name]  # type: ignore[misc]
    world = World(folder, settings, behaviours, planned=_plan_or_fail(planned(settings, "run"), names))
    if kill:
        _hold_back(world.exports, {size.architecture_id for size in planned(settings, "run").space})
        world.run(
            lambda: world.server.state.aggregated_round == 0 and world.server.state.queue != () and _all_done(world)
        )
        del world.exports.submit
        world.kill_server()
    world.run()
    return world


def _all_done(world: World) -> bool:
    return all(client.stage == "done" for client in world.server.state.clients.values())


def _list_requested_first(world: World) -> set[str]:
    training = [request for request in world.exports.requests if isinstance(request, TrainRequest)]
    assigned = {
        task.architecture.architecture_id
        for device in world.devices.values()
        for task in device.tasks
        if task.round == 1
    }
    return {request.architecture.architecture_id for request in training} - assigned


@pytest.mark.slow
def test_a_run_that_writes_ahead_has_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    calm = _run(tmp_path / "calm", set())
    first, second, _ = calm.notes.records
    assert first.programs_written > 0
    assert {row.architecture for row in second.clients} - {row.architecture for row in first.clients}
    assert sum(row.parameters_lost for row in first.clients) > sum(row.parameters_lost for row in second.clients)
    assert _run(tmp_path / "killed", set(), kill=True).model_bytes() == calm.model_bytes()


@pytest.mark.slow
def test_a_run_whose_requested_programs_cannot_be_written_goes_on_without_them(tmp_path: Path) -> None:
    broken = _list_requested_first(_run(tmp_path / "whole", set()))
    assert broken
    world = _run(tmp_path / "broken", broken)
    tasks = [task for device in world.devices.values() for task in device.tasks]
    trained = {task.architecture.architecture_id for task in tasks if isinstance(task.work, Train)}
    assert not trained & broken
    assert {row.status for record in world.notes.records for row in record.clients} == {"aggregated"}
