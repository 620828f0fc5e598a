"""The fleet of a run: its name, what its devices may use, and for an emulated one its devices and where they run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from subfleet.elastic.families import AnyFamily
from subfleet.protocol.bounds import checked
from subfleet.protocol.identifiers import ClientId
from subfleet.protocol.limits import Positive
from subfleet.protocol.memory_size import MaybeSize, Size, parse_bytes
from subfleet.protocol.readings import Reading
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.topics import DEFAULT_FLEET, FleetName
from subfleet.settings.attacks import Attack
from subfleet.settings.parts import NO_PART

__all__ = ["DeviceSettings", "FleetSettings", "HostKind", "HostSettings", "MemoryLimits"]

HostKind = Literal["processes", "batch"]
"""Where the devices of an emulated fleet are: "processes", one for each, with a real broker; or "batch", all in the
server's process, under a logical clock and without a network."""


def _check_resources(log: str, population: str, steady: Reading | None, profile: str) -> Iterator[str]:
    if not (log or population or steady):
        yield "log is missing, but must name the log that is replayed; or name population, or steady"
    if log and (population or steady):
        yield f"log is {log!r} beside population or steady, which take its place; leave one out"
    if population and profile != "generic":
        yield f"profile is {profile!r} beside population, which has its own; leave one out"


def _check_architecture(architecture: Architecture | None, network: AnyFamily | None) -> Iterator[str]:
    if network is not None and architecture is not None:
        yield "architecture stands beside network, but a device declares one of both; leave one out"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_resources, _check_architecture)
class DeviceSettings:
    """One emulated device, or several that are alike.

    Attributes:
        id: its name in tables and topics; of several, what their names begin with: "phone" gives "phone-1" and so on.
        count: how many there are, 1 or more.
        profile: of the kind of device: a shipped profile's name, or a TOML file.
        log: the resource log that it replays: a shipped log's name, or a CSV file. Of several, each begins at another
            point of it, equal parts apart, and goes on at its beginning.
        population: in place of `profile` and `log`: a shipped population's name, or a TOML file, from which they are
            taken, by the run's seed and `id` where it is one that is drawn.
        steady: what the device has at all times, in place of any log.
        runtime: the program target that it runs.
        data: its own samples, in place of a part of the run's: a source as `DataSettings.test` names one.
        tier: under which its results are summed up; empty takes the profile's name, or that of the population's kind.
        architecture: the submodel that it declares, in place of the profile's.
        disk_limit: the most that its folder may hold, a size such as "500M", in place of the profile's.
        network: in place of that a network of its own, by its settings or as `{ preset = "vgg16" }`; inputs and classes
            that it does not say are those of `[model]`.
        attack: what it does to what it sends; None is an honest device.

    Raises:
        ValueError: it is not said what the device has, or twice, or a number is out of its range.
    """

    id: ClientId
    profile: str = "generic"
    log: str = ""
    count: Positive = 1
    runtime: str = "onnx"
    data: str = ""
    tier: str = ""
    architecture: Architecture | None = None
    population: str = field(default="", metadata=ADDED_LATER)
    steady: Reading | None = field(default=None, metadata=ADDED_LATER)
    attack: Attack | None = field(default=None, metadata=ADDED_LATER)
    network: AnyFamily | None = field(default=None, metadata=ADDED_LATER)
    disk_limit: MaybeSize = field(default="", metadata=ADDED_LATER)

    def each(self) -> "Iterator[DeviceSettings]":
        """The devices one by one."""
        if self.count == 1:
            yield self
            return
        for number in range(1, self.count + 1):
            yield replace(self, id=f"{self.id}-{number}", count=1)


def _check_ids(devices: tuple[DeviceSettings, ...]) -> Iterator[str]:
    ids = [one.id for device in devices for one in device.each()]
    if repeated := sorted({name for name in ids if ids.count(name) > 1}):
        yield f"devices are named {repeated} more than once, but each needs an id of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_ids)
class FleetSettings:
    """Who takes part.

    Attributes:
        name: a part of every topic; devices name it with `--fleet`.
        devices: of an emulated fleet.

    Raises:
        ValueError: two devices have the same name.
    """

    name: FleetName = field(default=DEFAULT_FLEET, metadata=NO_PART)
    devices: tuple[DeviceSettings, ...] = ()

    def each(self) -> tuple[DeviceSettings, ...]:
        """The devices one by one."""
        return tuple(one for device in self.devices for one in device.each())


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class HostSettings:
    """How an emulated fleet is run.

    Attributes:
        type: where its devices are.
        turns_per_round: of a batch: how often every party may act in one round, on average over the run, before the
            run is given up; a quiet round takes about ten.

    Raises:
        ValueError: a number is out of its range.
    """

    type: HostKind = "processes"
    turns_per_round: Positive = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class MemoryLimits:
    """Limits as sizes such as "300M"; the closest one counts: of the client, else of its device, else of every device.

    Attributes:
        every_device: of each device that no other limit names; None is none.
        devices: by the name of a device profile, such as "raspberry_pi_4".
        clients: by the id of a client.
    """

    every_device: Size | None = None
    devices: Mapping[str, Size] = field(default_factory=lambda: MappingProxyType({}))
    clients: Mapping[str, Size] = field(default_factory=lambda: MappingProxyType({}))

    def bounded(self, offered_bytes: int, *, device: str, client_id: str) -> int:
        """What of a device's offer a run may use.

        Args:
            offered_bytes: the device's own budget.
            device: the name of its profile.
            client_id: its id.
        """
        limit = self.clients.get(client_id) or self.devices.get(device) or self.every_device
        return offered_bytes if limit is None else min(offered_bytes, parse_bytes(limit))
