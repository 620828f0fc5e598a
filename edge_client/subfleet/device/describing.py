"""Composes the profile that a device sends: its identity, its device profile and its software."""

import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from subfleet.device.meters import Meter
from subfleet.device.monitor import LiveMeter
from subfleet.device_profiles import DeviceProfile, detect_packing_width
from subfleet.protocol.errors import ConfigError, FileError, ProtocolError
from subfleet.protocol.jobs import DataSummary
from subfleet.protocol.memory_plan import PackingWidth
from subfleet.protocol.messages import Profile, make_message_id
from subfleet.protocol.schema import canonical_json, parse_json
from subfleet.protocol.submodel import MAX_ARCHITECTURE_BYTES, parse_architecture

_SOFTWARE = ("subfleet", "onnxruntime", "onnxruntime-gpu", "subfleet-executorch", "executorch", "numpy", "paho-mqtt")


def declare_architecture(profile: DeviceProfile, text_or_path: str) -> DeviceProfile:
    """Add the architecture that `--architecture` names to a profile: JSON, or the path of a file with it.

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
            f"the architecture cannot be used: {error}; `subfleet preflight --json` lists some"
        ) from error


def find_packing_width(profile: DeviceProfile) -> PackingWidth:
    """Find the wider packing width of a profile and this machine, on whose kernels an emulated device runs."""
    return max(profile.packing_width or 4, detect_packing_width())


def describe_device(
    client_id: str,
    profile: DeviceProfile,
    target: str,
    summary: DataSummary,
    meter: Meter,
    *,
    held_out: DataSummary | None = None,
) -> Profile:
    """Compose the profile that the device sends when it joins.

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
    session_id = make_message_id()
    try:
        announced = make_profile(client_id, session_id, profile, target, summary, held_out)
    except ValueError as error:
        raise ConfigError(f"this device cannot be announced: {error}; correct its device profile") from error
    return replace(announced, software={"python": platform.python_version(), **_list_versions()})


def make_profile(
    client_id: str,
    session_id: str,
    profile: DeviceProfile,
    target: str,
    summary: DataSummary,
    held_out: DataSummary | None,
) -> Profile:
    """Compose a device's profile without its software.

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
        training_watts=profile.training_watts,
        architecture=profile.architecture,
        network=profile.network,
        class_names=summary.class_names,
        other_input_shapes=summary.other_input_shapes,
        packing_width=find_packing_width(profile),
        held_out_count=0 if held_out is None else held_out.sample_count,
        inputs=summary.inputs,
        sizes_differ=summary.sizes_differ,
    )


def _list_versions() -> dict[str, str]:
    versions = {}
    for name in _SOFTWARE:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
