"""Exports every submodel of a run for every target, so that problems and costs are known before devices join."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from subfleet.aggregation.devices import compute_device
from subfleet.cli.console import show_table, to_text
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.methods.run_networks import BeginContext
from subfleet.programs.supply import build_train_request
from subfleet.protocol.errors import ExportError
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import decode_program
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import Declared, RunContext
from subfleet.search.candidates import Candidate
from subfleet.serving.run_context import create_context
from subfleet.settings.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of exporting one submodel for one target.

    Attributes:
        submodel: display name.
        target: such as "onnx".
        parameters: number of parameters.
        program_bytes: size of the packed program, which is sent once to each device that trains it.
        planned_peak_bytes: memory that a device with common kernels needs to train it; see `MemoryPlan.packings`.
        memory: the planned memory by purpose.
        max_abs_diff: largest difference from PyTorch.
        waited_s: seconds until the program was ready, in order; close to 0 if the cache had it.
        problem: why it cannot be trained, with the layer and the remedy; empty if it can.
        architecture: the submodel, as a device may declare it.
    """

    submodel: str
    target: str
    parameters: int
    program_bytes: int = 0
    planned_peak_bytes: int = 0
    memory: MemoryPlan | None = None
    max_abs_diff: float = 0.0
    waited_s: float = 0.0
    problem: str = ""
    architecture: Architecture


def export_submodels(config: Run, cache: CacheFolder) -> Iterator[Verdict]:
    """Export the training program of every submodel, from the smallest to the largest, for every target of the run.

    If devices of the run bring networks of their own, these are the submodels. Programs stay in the cache for the run.

    Raises:
        ConfigError: the description of the run is invalid, or its compute device is missing.
    """
    compute_device(config.device)
    context = create_context(config, config.name)
    with ExportPool(cache) as pool:
        exports = [
            (
                candidate,
                target,
                pool.submit(build_train_request(declared.network, candidate.architecture, target, context.training(1))),
            )
            for declared in _list_networks(context)
            for candidate in declared.candidates
            for target in config.targets
        ]
        for candidate, target, future in exports:
            yield _build_verdict(candidate, target, future)


def _list_networks(context: RunContext) -> Sequence[Declared]:
    """The networks that the run begins with: the unions of the networks of its devices, or its model."""
    brought = {
        device.id: device.network for device in context.config.fleet.expand_devices() if device.network is not None
    }
    if not brought or not context.roles.assigner.declarations or context.roles.networks.begin is None:
        return (context.first,)
    names = tuple(brought)
    unions = context.roles.networks.begin(
        BeginContext(
            network=context.network,
            rates=context.config.rates,
            clients=names,
            brought=MappingProxyType(brought),
            carried_by=lambda lineage: names,
        )
    )
    return [context.get_declared(union) for union in unions]


def _build_verdict(candidate: Candidate, target: str, future: "Future[Path]") -> Verdict:
    started_s = time.monotonic()
    architecture = candidate.architecture
    verdict = Verdict(
        submodel=architecture.name, target=target, parameters=candidate.parameters, architecture=architecture
    )
    try:
        content = future.result().read_bytes()
    except ExportError as error:
        return replace(verdict, problem=str(error))
    manifest = decode_program(content).manifest
    return replace(
        verdict,
        program_bytes=len(content),
        planned_peak_bytes=manifest.planned_peak_bytes,
        memory=manifest.memory,
        max_abs_diff=manifest.max_abs_diff,
        waited_s=time.monotonic() - started_s,
    )


def show_verdicts(verdicts: list[Verdict], console: Console) -> None:
    """Print a row for each submodel and target, and the problems below the table."""
    titles = ("submodel", "runtime", "parameters", "program kB", "peak MB", "difference", "state")
    rows = []
    for verdict in verdicts:
        cells = (
            verdict.submodel,
            verdict.target,
            f"{verdict.parameters:,}",
            f"{verdict.program_bytes / 1000:.0f}",
            f"{verdict.planned_peak_bytes / 1e6:.1f}",
            f"{verdict.max_abs_diff:.0e}",
            "cannot be trained" if verdict.problem else "ready",
        )
        rows.append([to_text(cell, "red" if verdict.problem else "") for cell in cells])
    left = ("submodel", "runtime", "state")
    show_table(console, titles, rows, title="Training programs of the run", left=left, unwrapped=titles)
    for verdict in verdicts:
        if verdict.problem:
            console.print(to_text(f"{verdict.submodel} on {verdict.target}: {verdict.problem}"))
