"""From a configuration to what a run works with: the network, its search space, the state folder."""

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subfleet.elastic.families import network_of
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.server.assignment import ordered
from subfleet.server.config import ServerConfig
from subfleet.server.methods.norms import with_norms
from subfleet.server.pricing import price_list
from subfleet.server.rounds import Plan

__all__ = ["Places", "plan_of"]


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

    Args:
        config: of the run.
        run_id: its name and a part that no other run has.

    Raises:
        ConfigError: the model's description is wrong, there is nothing to choose from, or the model's inputs are no
            images, which alone can be augmented.
    """
    network = network_of(config.model)
    problem = config.training.augmentation.problem_with(config.model.input_shape)
    if problem is not None:
        raise ConfigError(problem)
    policies = with_norms(config.method.policies(), config.norms)
    price = price_list(config, network, planned=policies.planned_prices)
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
