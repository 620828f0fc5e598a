"""Reads the description of a run: a TOML file, or one of the runs that are included in the package (folder `runs`)."""

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from subfleet.elastic.families import FAMILIES
from subfleet.protocol.errors import ConfigError, InvalidError, Problem, explain_os_errors
from subfleet.protocol.schema import validate
from subfleet.protocol.suggestion import explain_unknown_key, suggest
from subfleet.protocol.toml import parse_toml
from subfleet.settings.named_networks import PresetSettings, complete_network, expand_preset, record_settings
from subfleet.settings.overrides import apply_override, merge_settings, parse_override
from subfleet.settings.run import Run
from subfleet.settings.sweeps import expand_sweeps

__all__ = ["list_included_runs", "read_included_run", "read_run", "read_runs"]


@cache
def list_included_runs() -> tuple[str, ...]:
    """The names of the included runs: "quickstart", then the others in alphabetical order."""
    files = (file.name for file in (resources.files("subfleet.settings") / "runs").iterdir())
    names = (name.removesuffix(".toml") for name in files if name.endswith(".toml"))
    return tuple(sorted(names, key=lambda name: (name != "quickstart", name)))


def read_included_run(name: str) -> str:
    """The text of an included run.

    Raises:
        ConfigError: there is no such run.
    """
    known = list_included_runs()
    if name not in known:
        raise ConfigError(f"there is no run {name!r:.80}; choose one of {sorted(known)}{suggest(name, known)}")
    return (resources.files("subfleet.settings") / "runs" / f"{name}.toml").read_text(encoding="utf-8")


def read_run(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Read a file with one run; see `read_runs`.

    Raises:
        FileError: the file cannot be read.
        ConfigError: as `read_runs`, or the file is a sweep with several runs.
    """
    runs = read_runs(name_or_path, overrides)
    if len(runs) > 1:
        raise ConfigError(
            f"run {name_or_path} is a sweep over {len(runs)} runs, but a single run is needed; leave [[sweep]] out"
        )
    return runs[0]


def read_runs(name_or_path: str | Path, overrides: Sequence[str] = (), seeds: Sequence[int] = ()) -> tuple[Run, ...]:
    """Read all runs of a file. Its tables and keys are the fields of `Run`, and `[[sweep]]`.

    Args:
        name_or_path: a TOML file, or the name of an included run.
        overrides: replace values of the file, such as "training.learning_rate=0.1"; see `overrides`.
        seeds: replace the seeds of the file; each seed is a run.

    Raises:
        FileError: the file cannot be read.
        ConfigError: the file is not TOML, or keys are unknown, missing or wrong; the message lists all of them.
    """
    what = f"run {name_or_path}"
    plain = _read(name_or_path, what)
    for keys, value in map(parse_override, overrides):
        plain = apply_override(plain, keys, value)
    return tuple(
        validate(Run, _complete_devices(_complete_networks(_complete_model(run))), what)
        for run in expand_sweeps(plain, seeds)
    )


def _read(name_or_path: str | Path, what: str, visited: tuple[str, ...] = ()) -> dict[str, Any]:
    """The plain settings of a file, merged into those of its `base`."""
    included = list_included_runs()
    name = str(name_or_path)
    remedy = f"name a file that exists, or one of {sorted(included)}{suggest(name, included)}"
    try:
        with explain_os_errors(f"{what} cannot be read", remedy):
            text = read_included_run(name) if name in included else Path(name_or_path).read_text(encoding="utf-8")
        plain: dict[str, Any] = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{what} is not TOML: {error}; correct that line") from error
    base = plain.pop("base", None)
    if base is None:
        return plain
    visited = (*visited, name)
    if not isinstance(base, str) or base in visited:
        raise ConfigError(f"{what}: base is {base!r:.80}, but must name another file, or an included run")
    path = base if base in included or name in included else Path(name_or_path).parent / base
    return merge_settings(_read(path, f"{what}, base {base}", visited), plain)


def _complete_model(plain: dict[str, Any]) -> dict[str, Any]:
    """The settings with `model.preset` or `model.module` replaced by the settings of that network."""
    model = plain.get("model")
    if isinstance(model, dict) and "module" in model:
        return _complete_module(plain, model)
    if not isinstance(model, dict) or "preset" not in model:
        return plain
    try:
        return {**plain, "model": expand_preset(model)}
    except ConfigError as error:
        kinds: list[type] = [PresetSettings, *FAMILIES.values()]
        known = {field.name for kind in kinds for field in fields(kind)}
        problems = [Problem(text=explain_unknown_key(key, known), keys=(key,)) for key in sorted(model.keys() - known)]
        return {**plain, "model": InvalidError([*InvalidError.of(error).problems, *problems])}


def _complete_module(plain: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The settings with a module recorded; its `weights` are the first weights of the run, in their `order`."""
    named = {key: value for key, value in model.items() if key not in ("weights", "order")}
    completed = {**plain, "model": _record_model(named)}
    if "weights" not in model:
        if "order" in model:
            completed["model"] = InvalidError.of(ConfigError("order sorts given weights; name a file as weights"))
        return completed
    path = Path(str(model["weights"]))
    with explain_os_errors(f"model.weights {path} cannot be read", "name a safetensors file"):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    ordered = {"order": model["order"]} if "order" in model else {}
    return {**completed, "first_weights": {"file": str(path.resolve()), "sha256": sha256, **ordered}}


def _record_model(model: dict[str, Any]) -> Any:
    try:
        return record_settings(model)
    except ConfigError as error:
        return InvalidError.of(error)


def _complete_devices(plain: dict[str, Any]) -> dict[str, Any]:
    """The settings with the networks of devices completed by inputs and classes of the model."""
    fleet, model = plain.get("fleet"), plain.get("model")
    devices = fleet.get("devices") if isinstance(fleet, dict) else None
    if not isinstance(fleet, dict) or not isinstance(model, dict) or not isinstance(devices, list):
        return plain
    named = plain.get("networks", {})
    return {**plain, "fleet": {**fleet, "devices": [_complete_device(device, model, named) for device in devices]}}


def _complete_device(device: Any, model: dict[str, Any], named: dict[str, Any]) -> Any:
    if not isinstance(device, dict) or not isinstance(device.get("network"), dict):
        return device
    own = device["network"]
    return {**device, "network": _find_named(own, named) if "name" in own else _complete_network(own, model)}


def _find_named(own: dict[str, Any], named: dict[str, Any]) -> Any:
    name = own["name"]
    if name in named and len(own) == 1:
        return named[name]
    return InvalidError.of(
        ConfigError(
            f"network has the name {name!r:.80}, but the run has the networks {sorted(named)}; name one of these"
        )
    )


def _complete_networks(plain: dict[str, Any]) -> dict[str, Any]:
    """The settings with the named networks completed by inputs and classes of the model."""
    model, named = plain.get("model"), plain.get("networks")
    if not isinstance(model, dict) or not isinstance(named, dict):
        return plain
    tables = {
        name: _complete_named(table, model) if isinstance(table, dict) else table for name, table in named.items()
    }
    return {**plain, "networks": tables}


def _complete_named(table: dict[str, Any], model: dict[str, Any]) -> Any:
    """A named network, which may be a module: the run's file alone makes code run."""
    if "module" not in table:
        return _complete_network(table, model)
    return _record_model({"input_shape": model.get("input_shape"), **table})


def _complete_network(table: dict[str, Any], model: dict[str, Any]) -> Any:
    try:
        return complete_network(table, model)
    except ConfigError as error:
        return InvalidError.of(error)
