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
from subfleet.protocol.subnet import SubnetSpec
from subfleet.server.assignment import Candidate, ordered
from subfleet.server.config import ServerConfig
from subfleet.server.methods.norms import with_norms
from subfleet.server.rounds import Plan
from subfleet.server.search.query import PriceList

__all__ = ["Places", "plan_of", "price_list"]


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


def plan_of(config: ServerConfig, run_id: str) -> Plan:
    """Everything about a run that does not change.

    Raises:
        ConfigError: the model's description is wrong, or there is nothing to choose from.
    """
    network = network_of(config.model)
    policies = with_norms(config.method.policies(), config.norms)
    price = price_list(config, network)
    candidates = [price(spec) for spec in policies.space(network, config.rates)]
    if not candidates:
        raise ConfigError("the method's space of subnets is empty; name one or more width rates")
    return Plan(
        config=config,
        run_id=run_id,
        network=network,
        policies=policies,
        candidates=ordered(candidates),
        price=price,
    )


def price_list(config: ServerConfig, network: Network) -> PriceList:
    """What any subnet costs; each is priced once.

    The function that is returned raises ConfigError where the spec is no subnet of the network.
    """
    known: dict[str, Candidate] = {}

    def price(spec: SubnetSpec) -> Candidate:
        key = spec.spec_id
        if key not in known:
            known[key] = _priced(config, network, spec)
        return known[key]

    return price


def _priced(config: ServerConfig, network: Network, spec: SubnetSpec) -> Candidate:
    cost = estimate_cost(network, spec, batch_size=config.training.program_batch_size)
    # The estimate counts every activation. How few are left when blocks are computed twice only the program knows.
    least_bytes = 2 * cost.weight_bytes if config.training.recompute else cost.training_memory_bytes
    memory = {target: least_bytes + config.memory_overhead_bytes.get(target, 0) for target in config.targets}
    return Candidate(
        spec=spec,
        parameters=cost.parameters,
        forward_macs=cost.forward_macs,
        weight_bytes=cost.weight_bytes,
        training_memory_bytes=MappingProxyType(memory),
    )
