"""The networks that a run ended with, and the paths of its supernet: listed and written to files."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from safetensors.torch import load, save
from torch import Tensor

from subfleet.aggregation.evaluation_data import read_evaluation_data
from subfleet.cli.console import show_table
from subfleet.elastic.building import network_of
from subfleet.elastic.cost import Costs, estimate_cost
from subfleet.elastic.model_state import unpack_state
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import recalibrate
from subfleet.elastic.supernets import path_architecture, specialise_family
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.export.requests import InferRequest
from subfleet.methods.assigner import open_stream
from subfleet.programs.supply import read_figures
from subfleet.protocol.errors import ConfigError, FileError, explain_os_errors
from subfleet.protocol.schema import to_plain
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task_kinds import format_metrics
from subfleet.settings.run import Run
from subfleet.settings.run_folder import MODEL, SUPERNET, interpret_summary, read_description, read_summary
from subfleet.settings.stored_networks import read_networks

Row = dict[str, Any]
_BATCH_SIZE = 256


def describe_networks(folders: Sequence[Path]) -> list[Row]:
    """The final networks of some runs as plain data, the cheapest first.

    Each row has the settings of the network, as in `[model]` of a run's file, and the run's accuracy if it is the only
    network of its run. If devices have trained only a submodel of it, the row has the costs of that submodel.

    Raises:
        FileError: files of a run cannot be read.
        ConfigError: a run is not finished.
    """
    rows: list[Row] = []
    for folder in folders:
        with interpret_summary(folder):
            rows += _describe(folder)
    return sorted(rows, key=lambda row: (row["forward_macs"], row["run"], row["network"]))


def _describe(folder: Path) -> Iterator[Row]:
    networks = read_networks(folder)
    summary = read_summary(folder) or {}
    for stored in networks:
        network = network_of(stored.lineage.config)
        whole = network.full_architecture()
        model = stored.model or whole
        ((parameters, forward_macs),) = Costs(network).of([model])
        yield {
            "run": folder.name,
            "network": stored.name,
            "submodel": "" if model == whole else model.name,
            "forward_macs": forward_macs,
            "parameters": parameters,
            "accuracy": summary["accuracy"] if len(networks) == 1 else None,
            "headline": summary["headline"],
            "metrics": summary["metrics"] if len(networks) == 1 else {},
            "born_round": stored.lineage.born_round,
            "reason": stored.lineage.reason,
            "model": to_plain(stored.lineage.config),
        }


def show_networks(rows: Sequence[Row], console: Console) -> None:
    """Print the networks as a table."""
    titles = ("run", "network", "forward MACs", "parameters", "accuracy", "reason")
    cells = (
        (
            row["run"],
            f"{row['network']}, {row['submodel']}" if row["submodel"] else row["network"],
            f"{row['forward_macs']:,}",
            f"{row['parameters']:,}",
            _format_accuracy(row),
            row["reason"],
        )
        for row in rows
    )
    show_table(console, titles, cells, left=("run", "network", "reason"))


def _format_accuracy(row: Row) -> str:
    if row["headline"] != "accuracy" and row["metrics"]:
        return format_metrics({row["headline"]: row["metrics"][row["headline"]]})
    return "" if row["accuracy"] is None else f"{row['accuracy']:.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """A network of a finished run, with its weights.

    Attributes:
        run: its settings.
        network: the supernet, or a network that the run found in it.
        state: tensors by name; of a supernet as they were when it was searched, or at the end if it was not.
    """

    run: Run
    network: Network
    state: Mapping[str, Tensor]


def load_supernet(folder: Path) -> StoredWeights:
    """Read the supernet of a run.

    Raises:
        FileError: there is no run, it is not finished, or its files cannot be read.
        ConfigError: the model of the run is not a supernet.
    """
    run = read_description(folder)
    network = network_of(run.model)
    if not network.choices:
        raise ConfigError(f"the run {folder} has no supernet: its model, a {run.model.TYPE!r}, has no choices")
    path = next((file for file in (folder / SUPERNET, folder / MODEL) if file.exists()), None)
    if path is None:
        raise FileError(f"the run {folder} is not finished: it has no {MODEL} yet; let it finish first")
    return StoredWeights(run=run, network=network, state=_load_state(path, ""))


def load_network(folder: Path, name: str) -> StoredWeights:
    """Read a final network of a run, such as "t1", which was found for the lowest tier.

    Raises:
        FileError: there is no run, or its files cannot be read.
        ConfigError: the run is not finished, or has no such network.
        ProtocolError: the file of its model is damaged.
    """
    networks = {stored.name: stored for stored in read_networks(folder)}
    if name not in networks:
        raise ConfigError(f"the run {folder} ended without a network {name!r:.80}; name one of {list(networks)}")
    stored = networks[name]
    state = _load_state(folder / MODEL, stored.lineage.id)
    return StoredWeights(run=read_description(folder), network=network_of(stored.lineage.config), state=state)


def _load_state(path: Path, network_id: str) -> Mapping[str, Tensor]:
    with explain_os_errors(f"{path} cannot be read", "let that run finish, or choose another one"):
        return unpack_state(load(path.read_bytes())).of(network_id).shared


def choose_path(network: Network, operators: Sequence[str], seed: int | None) -> Architecture:
    """The path with the given operators, one for each choice in order; without operators, a uniformly drawn path.

    Raises:
        ConfigError: there are neither operators nor a seed, or the operators are no path.
    """
    if operators:
        return path_architecture(network, operators)
    if seed is None:
        choices = "; ".join(f"{name}: {', '.join(choice.operators)}" for name, choice in network.choices.items())
        raise ConfigError(f"name the operator of each choice with --operator, or draw a path with --random; {choices}")
    random = open_stream(f"{seed}/path")
    return path_architecture(network, [random.choice(choice.operators) for choice in network.choices.values()])


def write_path(
    weights: StoredWeights, path: Architecture, targets: Sequence[str], out: Path, *, cache: CacheFolder
) -> Row:
    """Write the weights of a path, and a model for each target that is first compared with PyTorch.

    Running statistics of a path of a supernet are measured on the evaluation data of the run.

    Args:
        weights: the network that the path belongs to.
        path: a path, or the whole network if it has no choices.
        targets: such as "onnx" and "executorch".
        out: folder for the files; it is created.
        cache: of exported models.

    Returns:
        The files, costs and operators as plain data.

    Raises:
        DataError: statistics have to be measured, and the evaluation data cannot be used.
        ExportError: the path cannot be exported for a target.
        FileError: files cannot be read or written.
    """
    run, network, state = weights.run, weights.network, weights.state
    supernet = not network.is_path(network.full_architecture())
    if supernet and network.config.norm == "batch":
        _, data, _ = read_evaluation_data(run)
        state = recalibrate(network, state, path, torch.split(torch.from_numpy(data.inputs.copy()), _BATCH_SIZE))
    alone = network_of(specialise_family(network, path)) if supernet else network
    cost = estimate_cost(network, path, batch_size=1)
    content = save({name: state[name].contiguous() for name in alone.tensors})
    weights_file = _write(out / "weights.safetensors", content)
    files, differences = dict[str, str](), dict[str, float | None]()
    with ExportPool(cache, workers=1) as pool:
        for target in targets:
            request = InferRequest(
                model=alone.config,
                architecture=alone.full_architecture(),
                target=target,
                weights_sha256=hashlib.sha256(content).hexdigest(),
                classes=run.data.classes,
                objective=run.training.objective.name,
                transform=run.data.transform,
            )
            exported = pool.submit(request, weights_path=weights_file).result()
            files[target] = str(_write(out / f"model{exported.suffix}", exported.read_bytes()))
            differences[target] = read_figures(exported)["max_abs_diff"]
    return {
        "operators": {choice: operators[0] for choice, operators in path.choices},
        "parameters": cost.parameters,
        "forward_macs": cost.forward_macs,
        "weights": str(weights_file),
        "files": files,
        "max_abs_diff": differences,
    }


def show_path(written: Row) -> None:
    """Print what `write_path` has written."""
    typer.echo(f"{written['forward_macs']} multiplications a sample, {written['parameters']} parameters:")
    for choice, operator in written["operators"].items():
        typer.echo(f"  {choice}: {operator}")
    typer.echo(f"Its weights are in {written['weights']}")
    for target, file in written["files"].items():
        difference = written["max_abs_diff"][target]
        deviation = "an unknown amount" if difference is None else f"{difference:.1e}"
        typer.echo(f"{file} for {target} differs from PyTorch by {deviation}")


def _write(path: Path, content: bytes) -> Path:
    with explain_os_errors(f"{path} cannot be written", "name another folder with --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return path
