"""Reads the description of a run from a TOML file, and says everything that is wrong with it at once."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from subfleet.elastic.families import FAMILIES
from subfleet.protocol.errors import ConfigError, FileError, Problem, ProtocolError, Refused
from subfleet.protocol.schema import problems_with, validate
from subfleet.protocol.suggestion import explain_unknown_key, suggest
from subfleet.protocol.toml import parse_toml
from subfleet.settings.overrides import merged, parsed, with_override
from subfleet.settings.published import Published, brought, published
from subfleet.settings.run import Run
from subfleet.settings.shipped import shipped_names, shipped_text
from subfleet.settings.sweeping import swept

__all__ = ["read_run", "read_runs"]


def read_run(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Read the one run of a file; see `read_runs`.

    Raises:
        FileError: the file cannot be read.
        ConfigError: as `read_runs`, or the file is a sweep over several runs.
    """
    runs = read_runs(name_or_path, overrides)
    if len(runs) > 1:
        raise ConfigError(
            f"run {name_or_path} is a sweep over {len(runs)} runs, but one is wanted; leave [[sweep]] out"
        )
    return runs[0]


def read_runs(name_or_path: str | Path, overrides: Sequence[str] = (), seeds: Sequence[int] = ()) -> tuple[Run, ...]:
    """Read a TOML file, or a shipped one by its name; tables and keys are the fields of `Run`, and `[[sweep]]`.

    Args:
        name_or_path: a file, or a name of `shipped_names`.
        overrides: values in place of the file's, such as "training.learning_rate=0.1"; see `overrides`.
        seeds: in place of the file's; each is a run of its own.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is no TOML, or keys are unknown, missing or wrong; the text names all of them.
    """
    what = f"run {name_or_path}"
    plain = _plain(name_or_path, what)
    for keys, value in map(parsed, overrides):
        plain = with_override(plain, keys, value)
    return tuple(_checked(one, what) for one in swept(plain, seeds))


def _plain(name_or_path: str | Path, what: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The plain settings of a file, upon those of the file that it is based on."""
    named = str(name_or_path) in shipped_names()
    try:
        text = shipped_text(str(name_or_path)) if named else Path(name_or_path).read_text(encoding="utf-8")
        plain: dict[str, Any] = parse_toml(text)
    except OSError as error:
        raise FileError(
            f"{what} cannot be read: {error.strerror}; name a file that exists, or one of {sorted(shipped_names())}"
            f"{suggest(str(name_or_path), shipped_names())}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{what} is not TOML: {error}; correct that line") from error
    base = plain.pop("base", None)
    if base is None:
        return plain
    here = (*seen, str(name_or_path))
    if not isinstance(base, str) or base in here:
        raise ConfigError(f"{what}: base is {base!r:.80}, but must name another file, or a run that we ship")
    path = base if base in shipped_names() or named else Path(name_or_path).parent / base
    return merged(_plain(path, f"{what}, base {base}", here), plain)


def _checked(plain: dict[str, Any], what: str) -> Run:
    return validate(Run, _with_networks(_with_preset(plain)), what)


def _with_preset(plain: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the published network that `model.preset` names."""
    model = plain.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return plain
    try:
        return {**plain, "model": published(model)}
    except (ConfigError, ProtocolError) as error:
        own = {field.name for field in fields(Published)}
        known = own.union(field.name for kind in FAMILIES.values() for field in fields(kind))
        problems = problems_with(Published, {key: model[key] for key in model.keys() & own})
        unnamed = Problem(text=str(error), is_sentence=True)
        unknown = (explain_unknown_key(key, known) for key in sorted(model.keys() - known))
        return {**plain, "model": Refused(problems=(*(problems or [unnamed]), *unknown))}


def _with_networks(plain: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what its devices leave open of networks of their own."""
    fleet, model = plain.get("fleet"), plain.get("model")
    devices = fleet.get("devices") if isinstance(fleet, dict) else None
    if not isinstance(fleet, dict) or not isinstance(model, dict) or not isinstance(devices, list):
        return plain
    return {**plain, "fleet": {**fleet, "devices": [_with_network(device, model) for device in devices]}}


def _with_network(device: Any, model: dict[str, Any]) -> Any:
    if not isinstance(device, dict) or not isinstance(device.get("network"), dict):
        return device
    try:
        return {**device, "network": brought(device["network"], model)}
    except ConfigError as error:
        return {**device, "network": Refused(problems=(Problem(text=str(error), is_sentence=True),))}
