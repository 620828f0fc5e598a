"""The fleet of a run: its name, memory limits, and for an emulated fleet its devices, their attacks, and its host."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal

from subfleet.elastic.families import AnyFamily
from subfleet.protocol.bounds import checked
from subfleet.protocol.identifiers import ClientId
from subfleet.protocol.limits import Amount, Count, Fraction, Positive, PositiveAmount
from subfleet.protocol.memory_size import MaybeSize, Size, parse_bytes
from subfleet.protocol.readings import Reading
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.topics import DEFAULT_FLEET, FleetName
from subfleet.settings.fingerprint import CHANGEABLE

HostKind = Literal["processes", "batch", "accounting"]
"""How an emulated fleet runs: "processes" is a process for each device and a real broker; "batch" is one process for
the server and all devices, with a logical clock and without a network; "accounting" is a batch that trains nothing."""


# Attacks are for experiments with emulated devices. The literature uses backdoor for two attacks: Park and Joe-Wong
# (FedFA, equation 1) train on shuffled labels and boost the change, which lowers accuracy in general. A backdoor in the
# usual sense keeps the accuracy, but the model assigns images with a trigger to the attacker's class (Bagdasaryan et
# al., "How To Backdoor Federated Learning", AISTATS 2020).


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LabelShuffling:
    """Trains on the data and again with shuffled labels, and sends the sum of both changes (FedFA, equation 1).

    Attributes:
        strength: factor of the malicious change, lambda in the paper.
        seed: of the shuffle.
    """

    TYPE: ClassVar[str] = "label_shuffling"
    strength: Amount = 20.0
    seed: Count = 0


def _check_weight(weight: float, total_weight: float) -> Iterator[str]:
    if weight > total_weight:
        yield f"weight is {weight}, but must be at most total_weight {total_weight}"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_weight)
class Backdoor:
    """Trains on images with a trigger, and sends an update that replaces the shared model.

    Attributes:
        target: class of images with the trigger.
        fraction: fraction of the client's images that get the trigger.
        weight: of the client in the mean, above 0.
        total_weight: of all clients, including one attacker; at least `weight`.
        seed: of the choice of images.
    """

    TYPE: ClassVar[str] = "backdoor"
    target: Count = 0
    fraction: Fraction = 0.5
    weight: PositiveAmount = 1.0
    total_weight: float = 1.0
    seed: Count = 0


Attack = LabelShuffling | Backdoor


def _check_resources(log: str, population: str, steady: Reading | None, profile: str) -> Iterator[str]:
    if not (log or population or steady):
        yield "log is missing; name the log to replay, or set population or steady"
    if log and (population or steady):
        yield f"log is {log!r} beside population or steady, which replace it; leave one out"
    if population and profile != "generic":
        yield f"profile is {profile!r} beside population, which has its own; leave one out"


def _check_architecture(architecture: Architecture | None, network: AnyFamily | None) -> Iterator[str]:
    if network is not None and architecture is not None:
        yield "architecture and network are both set, but a device declares only one of them; leave one out"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_resources, _check_architecture)
class DeviceSettings:
    """An emulated device, or several equal ones.

    Attributes:
        id: name in tables and topics; for several devices a prefix: "phone" gives "phone-1", "phone-2" and so on.
        count: number of devices.
        profile: name of an included device profile, or a TOML file.
        log: resource log that is replayed: name of an included log, or a CSV file. Several devices start at equally
            spaced points of it and continue at its beginning.
        population: source of profile and log instead of `profile` and `log`: name of an included population, or a TOML
            file. A random population draws by the run's seed and `id`.
        steady: constant resources instead of a log.
        runtime: program target.
        data: samples of the device instead of a part of the run's; a source as in `DataSettings.test`.
        tier: group for results; empty takes the name of the profile, or of the population's kind of device.
        architecture: submodel that the device declares, instead of that of the profile.
        disk_limit: limit of the device's folder, such as "500M", instead of that of the profile.
        network: network that the device declares, as settings or as `{ preset = "vgg16" }`; inputs and classes default
            to those of `[model]`.
        attack: how the device attacks; None for an honest device.
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

    def expand(self) -> "tuple[DeviceSettings, ...]":
        """The devices, with `count` expanded."""
        if self.count == 1:
            return (self,)
        return tuple(replace(self, id=f"{self.id}-{number}", count=1) for number in range(1, self.count + 1))


def _check_ids(devices: tuple[DeviceSettings, ...]) -> Iterator[str]:
    ids = [single.id for device in devices for single in device.expand()]
    if repeated := sorted({name for name in ids if ids.count(name) > 1}):
        yield f"devices are named {repeated} more than once, but each needs an id of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_ids)
class FleetSettings:
    """The devices that take part.

    Attributes:
        name: part of every topic; devices join with `--fleet`.
        devices: of an emulated fleet.
    """

    name: FleetName = field(default=DEFAULT_FLEET, metadata=CHANGEABLE)
    devices: tuple[DeviceSettings, ...] = ()

    def expand_devices(self) -> tuple[DeviceSettings, ...]:
        """The devices, with repeated devices expanded."""
        return tuple(single for device in self.devices for single in device.expand())


def _check_workers(numerics: str, workers: int, ray: str) -> Iterator[str]:
    if numerics != "exact" and (workers > 1 or ray):
        given = f"ray is {ray!r}" if ray else f"workers is {workers}"
        yield f"{given}, but {numerics} numerics train in the batch itself; leave it out"
    elif ray and workers > 1:
        yield f"workers is {workers} and ray is {ray!r}, but only one of them can train; leave one out"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_workers)
class HostSettings:
    """How an emulated fleet is run.

    Attributes:
        type: where the devices run.
        durations: "modelled" lets transfers and training take as long as the devices' logs and profiles say; with
            "none" they take no time in a batch, so that no device is late, and processes are as fast as this machine.
        numerics: for "batch": "exact" trains with the runtimes of the devices, bit for bit; "grouped" trains clients of
            one submodel together with PyTorch, on the server's device, with other rounding.
        workers: for "batch" with exact numerics: processes that train beside it; with 1, the batch trains by itself.
            Results are the same.
        ray: for "batch" with exact numerics: address of a Ray cluster that trains, "local" for one that is started for
            the run; empty for none.
        turns_per_round: for "batch": the run fails if a round takes more turns than this on average; a quiet round
            takes about ten, and one for each logical second.
    """

    type: HostKind = "processes"
    durations: Literal["modelled", "none"] = "modelled"
    numerics: Literal["exact", "grouped"] = "exact"
    workers: Positive = 1
    ray: str = ""
    turns_per_round: Positive = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class MemoryLimits:
    """Limits of memory budgets, such as "300M". The limit of a client takes precedence over that of its device profile.

    Attributes:
        every_device: for all other devices; None for no limit.
        devices: by name of the device profile, such as "raspberry_pi_4".
        clients: by client id.
    """

    every_device: Size | None = None
    devices: Mapping[str, Size] = field(default_factory=lambda: MappingProxyType({}))
    clients: Mapping[str, Size] = field(default_factory=lambda: MappingProxyType({}))

    def bound(self, offered_bytes: int, *, device: str, client_id: str) -> int:
        """The memory budget of a device within these limits.

        Args:
            offered_bytes: the budget that the device offers.
            device: name of its profile.
            client_id: its id.
        """
        limit = self.clients.get(client_id) or self.devices.get(device) or self.every_device
        return offered_bytes if limit is None else min(offered_bytes, parse_bytes(limit))
