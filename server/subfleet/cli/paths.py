"""What `subfleet runs path` writes: any path of a run's supernet, with the weights that it has there."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from subfleet.elastic.building import network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.model_state import unpacked
from subfleet.elastic.network import Network
from subfleet.elastic.paths import path_spec, realised
from subfleet.elastic.running_statistics import recalibrated
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.export.requests import InferRequest
from subfleet.folding.evaluation_data import with_evaluation
from subfleet.methods.asking import stream_of
from subfleet.programs.supply import figures_of
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.settings.kept import MODEL, SUPERNET, kept_run
from subfleet.settings.run import Run

__all__ = ["KeptSupernet", "chosen_path", "supernet_of", "write_path"]

_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSupernet:
    """The supernet of a run that is over.

    Attributes:
        run: its settings.
        state: the supernet's tensors by name, as they were when it was searched, or where it never was, in the end.
    """

    run: Run
    network: Network
    state: Mapping[str, Tensor]


def supernet_of(folder: Path) -> KeptSupernet:
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
    try:
        state = unpacked(load(path.read_bytes()))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    return KeptSupernet(run=run, network=network, state=state.of("").shared)


def chosen_path(network: Network, operators: Sequence[str], seed: int | None) -> SubnetSpec:
    """The path with these operators, in the order of the choices; or one that is drawn, all equally likely.

    Raises:
        ConfigError: neither was asked for, or the operators are no path.
    """
    if operators:
        return path_spec(network, operators)
    if seed is None:
        known = "; ".join(f"{name}: {', '.join(choice.operators)}" for name, choice in network.choices.items())
        raise ConfigError(f"name the operator of each choice with --operator, or draw a path with --random; {known}")
    chance = stream_of(f"{seed}/path")
    return path_spec(network, [chance.choice(choice.operators) for choice in network.choices.values()])


def write_path(
    supernet: KeptSupernet, path: SubnetSpec, targets: Sequence[str], out: Path, *, cache: CacheFolder
) -> dict[str, Any]:
    """Write a path's weights, and a model of it for each target; each is verified against PyTorch first.

    Running statistics are those of the path: they are measured on the run's evaluation data.

    Args:
        supernet: that the path is of.
        path: to write.
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
    run, network, state = supernet.run, supernet.network, supernet.state
    if network.config.norm == "batch":
        _, data, _ = with_evaluation(run)
        state = recalibrated(network, state, path, torch.split(torch.from_numpy(data.inputs.copy()), _BATCH_SIZE))
    alone = network_of(realised(network, path))
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
                spec=alone.full_spec(),
                target=target,
                weights_sha256=digest,
                classes=run.data.classes,
            )
            exported = pool.submit_inference(request, weights).result()
            files[target] = str(_written(out / f"model{exported.suffix}", exported.read_bytes()))
            differences[target] = figures_of(exported)["max_abs_diff"]
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
