"""Exports every submodel of a run for every target before any device is there, and shows what each one takes."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.table import Table

from subfleet.aggregation.devices import compute_device
from subfleet.cli.literal import literal
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.methods.run_networks import BeginContext
from subfleet.programs.supply import build_train_request
from subfleet.protocol.errors import ExportError
from subfleet.protocol.memory import MemoryPlan
from subfleet.protocol.programs import decode_program
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import Declared, RunContext
from subfleet.search.candidates import Candidate
from subfleet.serving.context import context_of
from subfleet.settings.run import Run

__all__ = ["Verdict", "preflight", "table"]

_MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of exporting one submodel for one target.

    Attributes:
        submodel: display name.
        target: such as "onnx".
        parameters: numbers that the submodel holds.
        program_bytes: size of the packed program, sent once to each device that trains it.
        planned_peak_bytes: memory that a device with usual kernels needs to train it; see `MemoryPlan.packings`.
        memory: the same by what it is for.
        max_abs_diff: largest difference from PyTorch.
        waited_s: until it was there, behind those before it; next to nothing where it was exported before.
        problem: why it cannot be trained there, with the layer and the remedy; else empty.
        architecture: the submodel itself, as a device may declare it.
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


def preflight(config: Run, cache: CacheFolder) -> Iterator[Verdict]:
    """Export the training program of every submodel, from the smallest to the largest, for every target of the run.

    Where its devices bring networks of their own, these are the submodels.

    What was exported stays in the cache, so that the run finds it there.

    Raises:
        ConfigError: the run's description is wrong, or names a device that is not there.
    """
    compute_device(config.device)
    context = context_of(config, config.name)
    with ExportPool(cache) as pool:
        asked = [
            (
                candidate,
                target,
                pool.submit_training(
                    build_train_request(declared.network, candidate.architecture, target, context.training(1))
                ),
            )
            for declared in _networks(context)
            for candidate in declared.candidates
            for target in config.targets
        ]
        for candidate, target, future in asked:
            yield _verdict(candidate, target, future)


def _networks(context: RunContext) -> Sequence[Declared]:
    """The networks that the run begins with: unions of what its devices bring, or that which it describes."""
    brought = {one.id: one.network for one in context.config.fleet.each() if one.network is not None}
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
    return [context.declared(one) for one in unions]


def _verdict(candidate: Candidate, target: str, future: "Future[Path]") -> Verdict:
    started_s = time.monotonic()
    architecture = candidate.architecture
    asked = Verdict(
        submodel=architecture.name, target=target, parameters=candidate.parameters, architecture=architecture
    )
    try:
        content = future.result().read_bytes()
    except ExportError as error:
        return replace(asked, problem=str(error))
    manifest = decode_program(content).manifest
    return replace(
        asked,
        program_bytes=len(content),
        planned_peak_bytes=manifest.planned_peak_bytes,
        memory=manifest.memory,
        max_abs_diff=manifest.max_abs_diff,
        waited_s=time.monotonic() - started_s,
    )


def table(verdicts: list[Verdict], console: Console) -> None:
    """Show one row per submodel and target, and below it the problems in full."""
    shown = Table(title="Training programs of the run", title_justify="left", title_style="bold")
    for title in ("submodel", "runtime", "parameters", "program kB", "peak MB", "difference", "state"):
        words = title in ("submodel", "runtime", "state")
        shown.add_column(title, justify="left" if words else "right", no_wrap=True)
    for verdict in verdicts:
        cells = (
            verdict.submodel,
            verdict.target,
            f"{verdict.parameters:,}",
            f"{verdict.program_bytes / 1000:.0f}",
            f"{verdict.planned_peak_bytes / _MEGABYTE:.1f}",
            f"{verdict.max_abs_diff:.0e}",
            "cannot be trained" if verdict.problem else "ready",
        )
        shown.add_row(*map(literal, cells), style="red" if verdict.problem else None)
    console.print(shown)
    for verdict in verdicts:
        if verdict.problem:
            console.print(literal(f"{verdict.submodel} on {verdict.target}: {verdict.problem}"))
