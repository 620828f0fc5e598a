"""Device profiles: TOML files with units in the names of keys, and sources of the figures."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from subfleet.protocol.bounds import Each, Length, checked
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.identifiers import Shown
from subfleet.protocol.limits import Positive, PositiveAmount, PositiveFraction
from subfleet.protocol.memory_plan import PackingWidth
from subfleet.protocol.memory_size import Size, parse_bytes
from subfleet.protocol.readings import Reading
from subfleet.protocol.schema import ADDED_LATER, to_plain, validate
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.suggestion import suggest
from subfleet.protocol.toml import parse_toml

PROFILES: Mapping[str, str] = MappingProxyType(
    {
        name: f"{name}.toml"
        for name in (
            "android_phone",
            "generic",
            "jetson_orin_nano",
            "laptop",
            "raspberry_pi_4",
            "raspberry_pi_zero_2_w",
        )
    }
)
"""The shipped profiles: name to file in the package's `data` folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class DeviceProfile:
    """A kind of device.

    Attributes:
        name: display name, at least 1 character.
        title: a description in words.
        memory_fraction: fraction of free memory that the device gives to training, above 0 and at most 1. Whoever runs
            the device chooses it.
        memory_limit: upper limit of the memory for training, such as "300M"; None for no limit.
        disk_limit: upper limit of the device's folder, such as "500M", with programs, weights, updates and models. The
            folder never takes more than half of the free disk either.
        runtimes: program targets to try, the preferred one first.
        threads: of the runtime in training.
        provider: "cpu", or "cuda" with a build of the runtime that supports it.
        memory_total_bytes: of the device; None measures it.
        cores: of the device; None counts them.
        macs_per_s: multiply-accumulates per second in training, above 0; None if unknown, for no limit.
        training_watts: power that training takes beyond that of an idle device, above 0; None if unknown.
        operators: that its runtimes support, by their names in program manifests, for builds that leave operators out;
            empty assumes all.
        architecture: declared submodel, for methods that use declarations; None declares none.
        network: declared network instead of a submodel, as a JSON object; see `subfleet.protocol.messages.Profile`.
        packing_width: outputs that the processor's product kernels compute at once: in XNNPACK 8 on Arm and with SSE,
            16 with AVX, 32 with AVX-512. Memory plans count the padding. An agent takes the width of its own machine
            if that is larger, or if this is None; without an agent, None is 16.
        sources: of the figures.
    """

    name: Annotated[str, Length(least=1)]
    title: str
    memory_fraction: PositiveFraction
    runtimes: Annotated[tuple[str, ...], Length(least=1), Each()]
    threads: Positive = 1
    provider: str = "cpu"
    memory_total_bytes: Positive | None = None
    cores: Positive | None = None
    macs_per_s: PositiveAmount | None = None
    training_watts: PositiveAmount | None = field(default=None, metadata=ADDED_LATER)
    memory_limit: Size | None = None
    disk_limit: Size = field(default="2G", metadata=ADDED_LATER)
    operators: tuple[Annotated[str, Shown], ...] = ()
    architecture: Architecture | None = field(default=None, metadata=ADDED_LATER)
    packing_width: PackingWidth | None = field(default=None, metadata=ADDED_LATER)
    sources: tuple[str, ...] = ()
    network: str = field(default="", metadata=ADDED_LATER)

    @property
    def max_training_bytes(self) -> int | None:
        """Upper limit of the memory for training; None for no limit."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    @property
    def disk_limit_bytes(self) -> int:
        """Upper limit of the device's folder."""
        return parse_bytes(self.disk_limit)


def compute_memory_budget(
    reading: Reading, memory_fraction: float, *, limit_bytes: int | None = None, data_bytes: int = 0
) -> int:
    """Compute the memory budget of training: a fraction of free memory, at most the limit; 0 if unknown.

    Args:
        reading: of the device, without a training in progress.
        memory_fraction: of the profile.
        limit_bytes: of the profile; None for no limit.
        data_bytes: memory of the samples, which is subtracted from free memory first.
    """
    share_bytes = int(max((reading.memory_free_bytes or 0) - data_bytes, 0) * memory_fraction)
    return share_bytes if limit_bytes is None else min(share_bytes, limit_bytes)


def parse_profile(text: str, where: str) -> DeviceProfile:
    """Read a profile from TOML text; `where` names it in errors.

    Raises:
        ConfigError: the text is not TOML, or fields are missing, unknown, of a wrong type or out of range; the message
            lists all of them.
    """
    try:
        plain = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"the device profile {where} is not valid TOML: {error}") from error
    return validate(DeviceProfile, plain, f"the device profile {where}")


def format_profile(profile: DeviceProfile) -> str:
    """Format a profile without a declared architecture as the TOML text that `parse_profile` reads."""
    plain = {key: value for key, value in to_plain(profile).items() if value is not None}
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in plain.items())


def load_profile(name_or_path: str) -> DeviceProfile:
    """Load a shipped profile by name, or any profile by the path of its TOML file.

    Raises:
        ConfigError: there is no such profile, or it is invalid.
        FileError: the file cannot be read.
    """
    if name_or_path in PROFILES:
        shipped = resources.files("subfleet.device_profiles") / "data" / PROFILES[name_or_path]
        return parse_profile(shipped.read_text(encoding="utf-8"), PROFILES[name_or_path])
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise ConfigError(
            f"the device profile is {name_or_path!r}, but must be one of {sorted(PROFILES)} or the path of a .toml file"
            f"{suggest(name_or_path, PROFILES)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"the device profile {name_or_path!r} cannot be read: {error}") from error
    return parse_profile(text, name_or_path)
