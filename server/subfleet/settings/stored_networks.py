"""The networks of a finished run, which can be the model of another run."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from subfleet.elastic.lineage import Lineage
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.schema import from_plain, parse_json
from subfleet.protocol.submodel import Architecture, parse_architecture
from subfleet.protocol.suggestion import suggest
from subfleet.settings.run import Run
from subfleet.settings.run_folder import MODEL, SUMMARY, read_description
from subfleet.settings.sections import FIRST, FirstWeights, ModelOf

_LINEAGE, _MODEL = "lineage/json", "model/json"
_POSITIONS: Mapping[str, float] = MappingProxyType({"smallest": 0.0, "middle": 0.5, "largest": 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNetwork:
    """A network that was in use when its run ended.

    Attributes:
        lineage: its id, settings and origin.
        element_count: number of its values, including running statistics.
        model: the submodel that devices have trained and that was evaluated as the model of the run; None for the
            whole network, or if each device has its own.
    """

    lineage: Lineage
    element_count: int
    model: Architecture | None = None

    @property
    def name(self) -> str:
        """The name by which settings refer to it."""
        return self.lineage.id or FIRST


def resolve_model(run: Run, runs: Path) -> Run:
    """The run with `model_of` replaced by the settings, and on request the weights, of that network.

    Args:
        run: as it was read.
        runs: folder that contains the folders of runs.

    Raises:
        FileError: files of the other run are missing or cannot be read.
        ConfigError: the other run is not finished, has no such network, or its model does not fit this run.
    """
    model_of = run.model_of
    if model_of is None:
        return run
    folder = Path(model_of.run) if "/" in model_of.run else runs / model_of.run
    stored = _choose(read_networks(folder), model_of, folder)
    weights = None
    if model_of.weights:
        path = folder / MODEL
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        weights = FirstWeights(file=str(path.resolve()), sha256=sha256, network=stored.lineage.id)
    try:
        return replace(run, model=stored.lineage.config, model_of=None, first_weights=weights)
    except ValueError as error:
        raise ConfigError(f"run {run.name!r} cannot take network {stored.name!r} of {folder}: {error}") from error


def read_networks(folder: Path) -> tuple[StoredNetwork, ...]:
    """The networks of a finished run, from the smallest to the largest.

    Raises:
        FileError: there is no run, or its files cannot be read.
        ConfigError: it is not finished.
        ProtocolError: the file of its model is damaged.
    """
    from safetensors import SafetensorError, safe_open

    run = read_description(folder)
    if not (folder / SUMMARY).exists():
        raise ConfigError(f"the run {folder} is not finished, so its networks are not known; let it finish first")
    counts = Counter[str]()
    lineages: dict[str, Lineage] = {}
    models: dict[str, Architecture] = {}
    path = folder / MODEL
    try:
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 - a file of safetensors is no mapping
                network_id, name = _split(key)
                if name == _LINEAGE:
                    content = file.get_tensor(key).tobytes()
                    lineages[network_id] = from_plain(Lineage, parse_json(content, max_bytes=len(content)))
                elif name == _MODEL:
                    models[network_id] = parse_architecture(file.get_tensor(key).tobytes())
                elif "/" not in name:  # not a copy, a moment, or state of a method
                    counts[network_id] += math.prod(file.get_slice(key).get_shape())
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path} cannot be read: {error}; let that run finish, or choose another one") from error
    networks = (
        StoredNetwork(
            lineage=lineages.get(network_id) or Lineage(id=network_id, config=run.model),
            element_count=count,
            model=models.get(network_id),
        )
        for network_id, count in counts.items()
    )
    return tuple(
        sorted(networks, key=lambda stored: (stored.element_count, stored.lineage.born_round, stored.lineage.id))
    )


def _split(path: str) -> tuple[str, str]:
    """The id of the network, and the name of the tensor in it."""
    if not path.startswith("network/"):
        return "", path
    _, network_id, name = path.split("/", maxsplit=2)
    return network_id, name


def _choose(networks: Sequence[StoredNetwork], model_of: ModelOf, folder: Path) -> StoredNetwork:
    position = _POSITIONS.get(model_of.network)
    if position is not None:
        return networks[int(position * (len(networks) - 1))]
    by_name = {stored.name: stored for stored in networks}
    if model_of.network not in by_name:
        names = [*by_name, *_POSITIONS]
        raise ConfigError(
            f"the run {folder} ended without a network {model_of.network!r:.80}; choose one of {names}"
            f"{suggest(model_of.network, names)}"
        )
    return by_name[model_of.network]
