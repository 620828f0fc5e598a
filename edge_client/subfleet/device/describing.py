"""What a device tells of itself: who it is, what its profile says, and what is installed on it."""

import platform
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from subfleet.device.meters import Meter
from subfleet.device.monitor import LiveMeter
from subfleet.device_profiles import DeviceProfile, load_profile, own_packing_width
from subfleet.protocol.errors import ConfigError, FileError, ProtocolError
from subfleet.protocol.jobs import DataSummary
from subfleet.protocol.memory import PackingWidth
from subfleet.protocol.messages import Profile, check_client_id, new_message_id
from subfleet.protocol.schema import canonical_json, parse_json
from subfleet.protocol.submodel import MAX_ARCHITECTURE_BYTES, parse_architecture

__all__ = [
    "announced_profile",
    "default_client_id",
    "description",
    "packing_width_of",
    "profile_with",
    "with_declaration",
]

_SOFTWARE = ("subfleet", "onnxruntime", "onnxruntime-gpu", "subfleet-executorch", "executorch", "numpy", "paho-mqtt")


def default_client_id(client_id: str | None, user: str | None) -> str:
    """The device's id: as given, else the user that it signs in as, else the host's name.

    Raises:
        ConfigError: the device signs in as a user of another name.
        ProtocolError: the id cannot stand in a topic.
    """
    if client_id and user and client_id != user:
        raise ConfigError(
            f"the id is {client_id!r:.80}, but the broker's address names the user {user!r:.80}; the broker's access "
            "list goes by the user, so they must be the same: leave --id out, or say --shared-user where many devices "
            "sign in as one user"
        )
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", platform.node())[:64]
    return check_client_id(client_id or user or host or "device")


def profile_with(
    name_or_path: str,
    *,
    memory_fraction: float | None = None,
    memory_limit: str | None = None,
    disk_limit: str | None = None,
    threads: int | None = None,
) -> DeviceProfile:
    """A device profile with what the command line says in place of its own.

    Raises:
        ConfigError: there is no such profile, or a value is out of its range.
    """
    profile = load_profile(name_or_path)
    try:
        return replace(
            profile,
            memory_fraction=profile.memory_fraction if memory_fraction is None else memory_fraction,
            memory_limit=profile.memory_limit if memory_limit is None else memory_limit,
            disk_limit=profile.disk_limit if disk_limit is None else disk_limit,
            threads=profile.threads if threads is None else threads,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def with_declaration(profile: DeviceProfile, text_or_path: str) -> DeviceProfile:
    """The profile of a device that declares what `--architecture` says: JSON, or the path of a file with it.

    With a `family` or a `preset` it is the settings of a network of the device's own, and else a submodel of the run's
    network. Which networks there are the server knows.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is no submodel, and names no network.
    """
    text = text_or_path.encode(errors="surrogateescape")
    if not text_or_path.lstrip().startswith("{"):
        try:
            text = Path(text_or_path).read_bytes()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise FileError(
                f"the architecture {text_or_path!r:.200} cannot be read ({reason}); name a file with a submodel as JSON"
            ) from error
    try:
        plain = parse_json(text, max_bytes=MAX_ARCHITECTURE_BYTES)
        if isinstance(plain, dict) and plain.keys() & {"family", "preset"}:
            return replace(profile, architecture=None, network=canonical_json(plain).decode())
        return replace(profile, architecture=parse_architecture(text), network="")
    except ProtocolError as error:
        raise ConfigError(
            f"the architecture cannot be used: {error}; `subfleet preflight --json` tells some"
        ) from error


def packing_width_of(profile: DeviceProfile) -> PackingWidth:
    """The wider of a profile's and of this machine's: an emulated device runs on the kernels that are here."""
    return max(profile.packing_width or 4, own_packing_width())


def description(
    client_id: str,
    profile: DeviceProfile,
    target: str,
    summary: DataSummary,
    meter: Meter,
    *,
    held_out: DataSummary | None = None,
) -> Profile:
    """What the device tells the server when it joins.

    Args:
        client_id: of the device.
        profile: of the device, with what the command line said.
        target: of the programs that it runs.
        summary: of the data that it trains on.
        held_out: of the data that it evaluates on; None where there are none.
        meter: that the agent reads; a replayed log does not say how much memory there is altogether.

    Raises:
        ConfigError: the profile says what no server would keep.
    """
    if profile.memory_total_bytes is None:
        live = meter if isinstance(meter, LiveMeter) else LiveMeter()
        profile = replace(profile, memory_total_bytes=live.memory_total_bytes())
    session_id = new_message_id()
    try:
        told = announced_profile(client_id, session_id, profile, target, summary, held_out)
    except ValueError as error:
        raise ConfigError(f"this device cannot be announced: {error}; correct its device profile") from error
    return replace(told, software={"python": platform.python_version(), **_versions()})


def announced_profile(
    client_id: str,
    session_id: str,
    profile: DeviceProfile,
    target: str,
    summary: DataSummary,
    held_out: DataSummary | None,
) -> Profile:
    """What a device tells the server of itself, but for its software: it follows from these alone.

    Raises:
        ValueError: the profile says what no server would keep.
    """
    return Profile(
        client_id=client_id,
        session_id=session_id,
        device=profile.name,
        runtimes=(target,),
        sample_count=summary.sample_count,
        class_counts=summary.class_counts,
        input_shape=summary.input_shape,
        memory_total_bytes=profile.memory_total_bytes or 0,
        memory_fraction=profile.memory_fraction,
        max_training_bytes=profile.max_training_bytes,
        message_id=f"profile.{session_id}",
        operators=profile.operators,
        macs_per_s=profile.macs_per_s,
        architecture=profile.architecture,
        network=profile.network,
        class_names=summary.class_names,
        other_input_shapes=summary.other_input_shapes,
        packing_width=packing_width_of(profile),
        held_out_count=0 if held_out is None else held_out.sample_count,
        inputs=summary.inputs,
        sizes_differ=summary.sizes_differ,
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
