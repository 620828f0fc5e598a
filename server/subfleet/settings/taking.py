"""The model that a run takes from another run, which is over by then."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.lineage import Lineage
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.schema import from_plain, parse_json
from subfleet.protocol.submodel import Architecture, parse_architecture
from subfleet.protocol.suggestion import suggest
from subfleet.settings.first_model import FIRST, FirstWeights, ModelOf
from subfleet.settings.kept import MODEL, kept_run
from subfleet.settings.run import Run
from subfleet.settings.summary import SUMMARY

__all__ = ["KeptNetwork", "networks_of", "with_model"]

_LINEAGE, _MODEL = "lineage/json", "model/json"
_PLACES: Mapping[str, float] = MappingProxyType({"smallest": 0.0, "middle": 0.5, "largest": 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptNetwork:
    """A network that was in use when its run ended.

    Attributes:
        id: empty for the one that the run began with.
        config: its settings.
        element_count: numbers that it holds, running statistics included.
        born_round: after whose aggregation it appeared; 0 for one that the run began with.
        reason: why it appeared; empty where there is nothing to tell.
        model: the submodel of it that devices have trained and that was evaluated as the run's model; None is the
            whole, or what each device has.
    """

    id: str
    config: AnyFamily
    element_count: int
    born_round: int = 0
    reason: str = ""
    model: Architecture | None = None

    @property
    def name(self) -> str:
        """By which settings name it."""
        return self.id or FIRST


def with_model(run: Run, runs: Path) -> Run:
    """The run with the model that it takes from another one, if it does; from then on that is its own.

    Args:
        run: as it was read.
        runs: folder that holds the runs' own folders.

    Raises:
        FileError: the other run is not there, or not to be read.
        ConfigError: it is not over, has no such network, or its model is none for this run.
    """
    wanted = run.model_of
    if wanted is None:
        return run
    folder = Path(wanted.run) if "/" in wanted.run else runs / wanted.run
    found = _chosen(networks_of(folder), wanted, folder)
    weights = _first_weights(folder / MODEL, found.id) if wanted.weights else None
    try:
        return replace(run, model=found.config, model_of=None, first_weights=weights)
    except ValueError as error:
        raise ConfigError(f"run {run.name!r} cannot take network {found.name!r} of {folder}: {error}") from error


def networks_of(folder: Path) -> tuple[KeptNetwork, ...]:
    """The networks of a run that is over, from the smallest to the largest.

    Raises:
        FileError: there is no run, or its files cannot be read.
        ConfigError: it is not over.
        ProtocolError: its model's file is damaged.
    """
    run = kept_run(folder)
    if not (folder / SUMMARY).exists():
        raise ConfigError(f"the run {folder} is not over, so that its networks are not known; let it end first")
    shapes, texts, models = _read(folder / MODEL)
    counts: dict[str, int] = {}
    for path, shape in shapes.items():
        network_id, name = _parted(path)
        if "/" not in name:  # beside copies, moments and what a method keeps
            counts[network_id] = counts.get(network_id, 0) + math.prod(shape)
    read = (from_plain(Lineage, parse_json(text, max_bytes=len(text))) for text in texts)
    lineages = {one.id: one for one in read}
    found = (
        _kept(lineages.get(network_id) or Lineage(id=network_id, config=run.model), count, models.get(network_id))
        for network_id, count in counts.items()
    )
    return tuple(sorted(found, key=lambda one: (one.element_count, one.born_round, one.id)))


def _kept(lineage: Lineage, count: int, model: Architecture | None) -> KeptNetwork:
    return KeptNetwork(
        id=lineage.id,
        config=lineage.config,
        element_count=count,
        born_round=lineage.born_round,
        reason=lineage.reason,
        model=model,
    )


def _read(path: Path) -> tuple[dict[str, Sequence[int]], list[bytes], dict[str, Architecture]]:
    """Shapes of a model's tensors, lineages of its networks as JSON, and by network the submodel that is the model."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            texts = [file.get_tensor(name).tobytes() for name in names if _parted(name)[1] == _LINEAGE]
            models = {
                _parted(name)[0]: parse_architecture(file.get_tensor(name).tobytes())
                for name in names
                if _parted(name)[1] == _MODEL
            }
            return {name: file.get_slice(name).get_shape() for name in names}, texts, models
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path} cannot be read: {error}; let that run end, or take another one") from error


def _parted(path: str) -> tuple[str, str]:
    """The network's id, and the tensor's name in it."""
    if not path.startswith("network/"):
        return "", path
    _, network_id, name = path.split("/", maxsplit=2)
    return network_id, name


def _chosen(networks: Sequence[KeptNetwork], wanted: ModelOf, folder: Path) -> KeptNetwork:
    place = _PLACES.get(wanted.network)
    if place is not None:
        return networks[int(place * (len(networks) - 1))]
    found = next((one for one in networks if one.name == wanted.network), None)
    if found is None:
        names = [*(one.name for one in networks), *_PLACES]
        raise ConfigError(
            f"the run {folder} ended without a network {wanted.network!r:.80}; choose one of {names}"
            f"{suggest(wanted.network, names)}"
        )
    return found


def _first_weights(path: Path, network_id: str) -> FirstWeights:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return FirstWeights(file=str(path.resolve()), sha256=sha256, network=network_id)
