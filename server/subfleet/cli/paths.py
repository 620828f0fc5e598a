"""What `subfleet runs path` writes, with its weights: any path of a supernet, or a network that was found in it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from subfleet.aggregation.evaluation_data import with_evaluation
from subfleet.elastic.building import network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.model_state import unpack_state
from subfleet.elastic.network import Network
from subfleet.elastic.running_statistics import recalibrate
from subfleet.elastic.supernets import path_architecture, specialise_family
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.export.requests import InferRequest
from subfleet.methods.assigner import stream_of
from subfleet.programs.supply import read_figures
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.submodel import Architecture
from subfleet.settings.kept import MODEL, SUPERNET, kept_run
from subfleet.settings.run import Run
from subfleet.settings.taking import networks_of

__all__ = ["KeptWeights", "chosen_path", "found_network", "supernet_of", "write_path"]

_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """A network of a run that is over.

    Attributes:
        run: its settings.
        network: the supernet, or one that was found in it.
        state: its tensors by name, of a supernet as they were when it was searched, or where it never was, in the end.
    """

    run: Run
    network: Network
    state: Mapping[str, Tensor]


def supernet_of(folder: Path) -> KeptWeights:
    """The supernet of a run.

    Raises:
        FileError: there is no run, it is not over, or its files cannot be read.
        ConfigError: it had no supernet.
    """
    run = kept_run(folder)
    network = network_of(run.model)
    if not network.choices:
        raise ConfigError(f"the run {folder} has no supernet: its model, a {run.model.TYPE!r}, has no choices")
    path = next((one for one in (folder / SUPERNET, folder / MODEL) if one.exists()), None)
    if path is None:
        raise FileError(f"the run {folder} is not over: there is no {MODEL} in it; let it end first")
    return KeptWeights(run=run, network=network, state=_state_of(path, ""))


def found_network(folder: Path, name: str) -> KeptWeights:
    """A network as it was in the end of a run, such as "t1", which was found for its lowest tier.

    Raises:
        FileError: there is no run, or its files cannot be read.
        ConfigError: it is not over, or it ended without such a network.
        ProtocolError: its model's file is damaged.
    """
    networks = networks_of(folder)
    found = next((one for one in networks if one.name == name), None)
    if found is None:
        names = [one.name for one in networks]
        raise ConfigError(f"the run {folder} ended without a network {name!r:.80}; name one of {names}")
    state = _state_of(folder / MODEL, found.id)
    return KeptWeights(run=kept_run(folder), network=network_of(found.config), state=state)


def _state_of(path: Path, network_id: str) -> Mapping[str, Tensor]:
    try:
        return unpack_state(load(path.read_bytes())).of(network_id).shared
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error


def chosen_path(network: Network, operators: Sequence[str], seed: int | None) -> Architecture:
    """The path with these operators, in the order of the choices; or one that is drawn, all equally likely.

    Raises:
        ConfigError: neither was asked for, or the operators are no path.
    """
    if operators:
        return path_architecture(network, operators)
    if seed is None:
        known = "; ".join(f"{name}: {', '.join(choice.operators)}" for name, choice in network.choices.items())
        raise ConfigError(f"name the operator of each choice with --operator, or draw a path with --random; {known}")
    chance = stream_of(f"{seed}/path")
    return path_architecture(network, [chance.choice(choice.operators) for choice in network.choices.values()])


def write_path(
    kept: KeptWeights, path: Architecture, targets: Sequence[str], out: Path, *, cache: CacheFolder
) -> dict[str, Any]:
    """Write a path's weights, and a model of it for each target; each is verified against PyTorch first.

    Running statistics are those of the path: of a supernet they are measured on the run's evaluation data.

    Args:
        kept: the network that the path is of.
        path: to write; of a network without choices the whole of it.
        targets: such as "onnx" and "executorch".
        out: folder of the files, which is made.
        cache: where exported models are kept.

    Returns:
        What was written, as plain data.

    Raises:
        DataError: statistics have to be measured, and the evaluation data cannot be used.
        ExportError: the path cannot be written for a target.
        FileError: files cannot be read or written.
    """
    run, network, state = kept.run, kept.network, kept.state
    supernet = not network.is_path(network.full_architecture())
    if supernet and network.config.norm == "batch":
        _, data, _ = with_evaluation(run)
        state = recalibrate(network, state, path, torch.split(torch.from_numpy(data.inputs.copy()), _BATCH_SIZE))
    alone = network_of(specialise_family(network, path)) if supernet else network
    own = {name: state[name].contiguous() for name in alone.tensors}
    cost = estimate_cost(network, path, batch_size=1)
    content = save(own)
    weights = _written(out / "weights.safetensors", content)
    digest = hashlib.sha256(content).hexdigest()
    files, differences = dict[str, str](), dict[str, float | None]()
    with ExportPool(cache, workers=1) as pool:
        for target in targets:
            request = InferRequest(
                model=alone.config,
                architecture=alone.full_architecture(),
                target=target,
                weights_sha256=digest,
                classes=run.data.classes,
                objective=run.training.objective.name,
                transform=run.data.transform,
            )
            exported = pool.submit_inference(request, weights).result()
            files[target] = str(_written(out / f"model{exported.suffix}", exported.read_bytes()))
            differences[target] = read_figures(exported)["max_abs_diff"]
    return {
        "operators": {choice: own[0] for choice, own in path.choices},
        "parameters": cost.parameters,
        "forward_macs": cost.forward_macs,
        "weights": str(weights),
        "files": files,
        "max_abs_diff": differences,
    }


def _written(path: Path, content: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}; name another folder with --out") from error
    return path
