"""Virtual fleets: clients, what each has to give, data and server configuration, all in memory."""

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from subfleet.device_profiles import DeviceProfile, ResourceLog
from subfleet.emulation.attacks import Attack
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.schema import canonical_json
from subfleet.settings.config import ServerConfig
from subfleet.tasks import Dataset
from subfleet.transport.memory import FaultPlan

__all__ = ["VirtualClient", "VirtualExperiment", "fingerprint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualClient:
    """One client of a virtual fleet.

    Attributes:
        client_id: its name in tables and topics.
        profile: the device profile that it follows; its share of free memory is the client's memory budget, and
            its architecture is what the client declares.
        data: its own samples.
        log: the resource log that it replays, read at the time that the round's announcement names.
        runtime: the program target that it runs, a name in `subfleet.emulation.virtual.hosting.TRAINERS`.
        test: its own held-out samples, on which its own subnet is evaluated; None: it is not.
        tier: the kind of device under which its results are summed up.
        attack: what it does to what it sends; None is an honest client.
    """

    client_id: str
    profile: DeviceProfile
    data: Dataset
    log: ResourceLog
    runtime: str = "onnx"
    test: Dataset | None = None
    tier: str = ""
    attack: Attack | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualExperiment:
    """A run of a virtual fleet.

    Attributes:
        config: the server's side. Its deadlines count logical seconds; its `evaluation_data` is replaced by
            `evaluation`; its seed is the run's.
        clients: one or more, with different ids.
        evaluation: the server's held-out samples.
        faults: what the transport does to messages; nothing by default.
        turns_per_round: how often every party may act in one round, on average over the run, before the run is given
            up; a quiet round takes about ten.

    Raises:
        ConfigError: ids repeat, there are fewer clients than a round needs, or there is no logical clock.
    """

    config: ServerConfig
    clients: tuple[VirtualClient, ...]
    evaluation: Dataset
    faults: FaultPlan = field(default_factory=FaultPlan)
    turns_per_round: int = 5000

    def __post_init__(self) -> None:
        names = [client.client_id for client in self.clients]
        if len(set(names)) != len(names):
            repeated = sorted(name for name in set(names) if names.count(name) > 1)
            raise ConfigError(f"client ids are {repeated} more than once, but each client needs an id of its own")
        if len(names) < self.config.min_clients:
            raise ConfigError(
                f"there are {len(names)} clients, but a round needs {self.config.min_clients}; add clients or lower "
                "min_clients"
            )
        if self.config.clock is None:
            raise ConfigError("config.clock is missing, but a virtual fleet has no other time; name a LogClock")
        if self.turns_per_round < 1:
            raise ConfigError(f"turns_per_round is {self.turns_per_round}, but must be 1 or more")


def fingerprint(experiment: VirtualExperiment) -> str:
    """SHA-256 of everything that takes part in the outcome, the samples included."""
    config = replace(experiment.config, evaluation_data="")
    clients = [
        [
            client.client_id,
            client.profile,
            client.log,
            client.runtime,
            client.tier,
            client.attack,
            *map(_digest, _data(client)),
        ]
        for client in experiment.clients
    ]
    return hashlib.sha256(
        canonical_json([config, clients, _digest(experiment.evaluation), experiment.faults])
    ).hexdigest()


def _data(client: VirtualClient) -> tuple[Dataset, ...]:
    return (client.data,) if client.test is None else (client.data, client.test)


def _digest(data: Dataset) -> str:
    digest = hashlib.sha256()
    for array in (data.inputs, data.labels):
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
