"""A run with all that its emulated fleet works with in memory: profiles, logs and samples."""

from dataclasses import dataclass, field

from subfleet.device_profiles import DeviceProfile, ResourceLog
from subfleet.protocol.errors import ConfigError
from subfleet.settings.attacks import Attack
from subfleet.settings.run import Run
from subfleet.tasks import Dataset
from subfleet.transport.in_memory import Faults

__all__ = ["EmulatedDevice", "GatheredRun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """One device of an emulated fleet.

    Attributes:
        client_id: its name in tables and topics.
        profile: the device profile that it follows; its fraction of free memory is the client's memory budget, and
            its architecture is what the client declares.
        data: its own samples.
        log: the resource log that it replays, read at the time that the round's announcement names.
        runtime: the program target that it runs.
        test: its own held-out samples, on which its own submodel is evaluated; None: it is not.
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
class GatheredRun:
    """A run of an emulated fleet.

    Attributes:
        run: its settings. What they say of data and devices was read: `evaluation` and `devices` stand in its place.
        devices: one or more, with different ids.
        evaluation: the server's held-out samples.
        faults: what the transport does to messages in a batch; nothing by default.

    Raises:
        ConfigError: ids repeat, there are fewer devices than a round needs, or there is no logical clock.
    """

    run: Run
    devices: tuple[EmulatedDevice, ...]
    evaluation: Dataset
    faults: Faults = field(default_factory=Faults)

    @property
    def told_by(self) -> Dataset:
        """Of the server's held-out samples those that all that is told of the model goes by: none for validation."""
        count = self.run.data.validation_samples
        return self.evaluation.split_off(count)[0] if count else self.evaluation

    def __post_init__(self) -> None:
        names = [device.client_id for device in self.devices]
        if len(set(names)) != len(names):
            repeated = sorted(name for name in set(names) if names.count(name) > 1)
            raise ConfigError(f"client ids are {repeated} more than once, but each client needs an id of its own")
        if len(names) < self.run.min_clients:
            raise ConfigError(
                f"there are {len(names)} clients, but a round needs {self.run.min_clients}; add devices to the fleet, "
                "or lower min_clients"
            )
        if self.run.clock is None:
            raise ConfigError("clock is missing, but replayed logs are read by no other time; add a table [clock]")
