"""From a configuration to what a run works with: the network, its search space, the state folder."""

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.families import network_of
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.server.assignment import Candidate, ordered
from subfleet.server.config import ServerConfig

__all__ = ["Places", "candidates_of", "network_for"]


@dataclass(frozen=True, slots=True)
class Places:
    """Where a server keeps things in its state folder."""

    folder: Path

    @property
    def blobs(self) -> Path:
        """Programs, weights and updates, by digest."""
        return self.folder / "blobs"

    @property
    def checkpoints(self) -> Path:
        """The whole model after each round."""
        return self.folder / "checkpoints"

    @property
    def models(self) -> Path:
        """Each client's own models for inference."""
        return self.folder / "models"

    def make(self) -> None:
        """Make the folders.

        Raises:
            FileError: they cannot be made.
        """
        try:
            for place in (self.blobs, self.checkpoints, self.models):
                place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"state folder {self.folder} cannot be made: {error.strerror}; choose another one"
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the lock ends with the process, however it ends.

        Raises:
            FileError: another server holds it.
        """
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FileError(
                    f"state folder {self.folder} is in use by another server; stop that one, or choose another name"
                ) from None
            yield


def network_for(config: ServerConfig) -> Network:
    """The declared network.

    Raises:
        ConfigError: the model's description is wrong.
    """
    return network_of(config.model)


def candidates_of(config: ServerConfig, network: Network) -> tuple[Candidate, ...]:
    """The method's search space with its costs, from smallest to largest.

    Raises:
        ConfigError: there is nothing to choose from.
    """
    candidates = []
    for spec in config.method.space(network, config.rates):
        cost = estimate_cost(network, spec, batch_size=config.training.program_batch_size)
        # The estimate counts every activation. How few are left when blocks are computed twice only the program knows.
        least_bytes = 2 * cost.weight_bytes if config.training.recompute else cost.training_memory_bytes
        memory = {target: least_bytes + config.memory_overhead_bytes.get(target, 0) for target in config.targets}
        candidates.append(
            Candidate(
                spec=spec,
                parameters=cost.parameters,
                forward_macs=cost.forward_macs,
                weight_bytes=cost.weight_bytes,
                training_memory_bytes=MappingProxyType(memory),
            )
        )
    if not candidates:
        raise ConfigError("the method's space of subnets is empty; name one or more width rates")
    return ordered(candidates)
