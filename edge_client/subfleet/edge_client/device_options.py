"""The options that describe a device, which `join` and `doctor` share."""

import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path

from subfleet.device.describing import declare_architecture
from subfleet.device_profiles import DeviceProfile, load_profile
from subfleet.edge_client.store import find_state_folder
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.messages import check_client_id
from subfleet.protocol.topics import DEFAULT_FLEET


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """A device as the command line describes it; None means "not given".

    Attributes:
        client_id: the device's id; by default the user name in the broker's address, else the host's name.
        shared_user: several devices sign in as the address's user, so it is not the device's id.
        fleet: name of the fleet.
        state: the agent's folder.
        profile: name or file of the device profile. The options below override its values.
        memory_fraction: fraction of free memory for training.
        memory_limit: a size such as "300M"; likewise disk_limit.
        threads: number of threads of the runtime.
        runtime: the only runtime to use.
        provider: the runtime's provider.
        architecture: a submodel or a network of the device's own as JSON, or the path of a file with it.
    """

    client_id: str | None = None
    shared_user: bool = False
    fleet: str = DEFAULT_FLEET
    state: Path | None = None
    profile: str = "generic"
    memory_fraction: float | None = None
    memory_limit: str | None = None
    disk_limit: str | None = None
    threads: int | None = None
    runtime: str | None = None
    provider: str | None = None
    architecture: str | None = None

    def choose_client_id(self, user: str | None) -> str:
        """Choose the device's id: the option, else the user that it signs in as, else the host's name.

        Raises:
            ConfigError: the device signs in as a user of another name.
            ProtocolError: the id cannot be part of a topic.
        """
        user, client_id = None if self.shared_user else user, self.client_id
        if client_id and user and client_id != user:
            raise ConfigError(
                f"the id is {client_id!r:.80}, but the broker's address names the user {user!r:.80}; they "
                "must be equal, as the broker's access list names users: omit --id, or use --shared-user if several "
                "devices sign in as one user"
            )
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", platform.node())[:64]
        return check_client_id(client_id or user or host or "device")

    def find_state_folder(self, client_id: str) -> Path:
        """Find the agent's folder; see `subfleet.edge_client.store.find_state_folder` for the errors."""
        return self.state or find_state_folder(self.fleet, client_id)

    def load_profile(self) -> DeviceProfile:
        """Load the device profile, with the values of the command line.

        Raises:
            ConfigError: there is no such profile, or a value is out of its range.
            FileError: a file cannot be read.
        """
        profile = load_profile(self.profile)
        try:
            profile = replace(
                profile,
                memory_fraction=profile.memory_fraction if self.memory_fraction is None else self.memory_fraction,
                memory_limit=self.memory_limit or profile.memory_limit,
                disk_limit=self.disk_limit or profile.disk_limit,
                threads=profile.threads if self.threads is None else self.threads,
                runtimes=(self.runtime,) if self.runtime else profile.runtimes,
                provider=self.provider or profile.provider,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return profile if self.architecture is None else declare_architecture(profile, self.architecture)
