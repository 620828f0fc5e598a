"""Reads the description of a run from a TOML file, and says everything that is wrong with it at once."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from subfleet.elastic.families import FAMILIES, PublishedNorm, preset
from subfleet.protocol.diagnosis import from_written, problems_with, refusal_of
from subfleet.protocol.errors import ConfigError, FileError, ProtocolError
from subfleet.protocol.schema import from_plain, to_plain
from subfleet.protocol.suggestion import did_you_mean
from subfleet.settings.config import ServerConfig
from subfleet.settings.shipped import CONFIGURATIONS, shipped_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["load_config"]


def load_config(name_or_path: str | Path) -> ServerConfig:
    """Read a TOML file, or a shipped configuration by its name; tables and keys are the fields of `ServerConfig`.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is no TOML, or keys are unknown, missing or wrong; the text names all of them.
    """
    what = f"configuration {name_or_path}"
    try:
        named = str(name_or_path) in CONFIGURATIONS
        text = shipped_text(str(name_or_path)) if named else Path(name_or_path).read_text(encoding="utf-8")
        plain: dict[str, Any] = tomllib.loads(text)
    except OSError as error:
        raise FileError(
            f"{what} cannot be read: {error.strerror}; name a file that exists, or one of {sorted(CONFIGURATIONS)}"
            f"{did_you_mean(str(name_or_path), CONFIGURATIONS)}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} is not TOML: {error}; correct that line") from error
    plain, problems = _with_preset(plain)
    if problems:
        raise refusal_of(what, [*problems, *problems_with(ServerConfig, plain)])
    return from_written(ServerConfig, plain, what)


def _with_preset(plain: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The configuration with the published network that `model.preset` names, and what is said of it besides."""
    model = plain.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return plain, []
    named = {key: model[key] for key in model.keys() & _PRESET_KEYS}
    said = {key: value for key, value in model.items() if key != "preset"}
    try:
        asked = from_plain(_Preset, named)
        network = preset(asked.preset, input_shape=asked.input_shape, class_count=asked.class_count, norm=asked.norm)
    except (ConfigError, ProtocolError) as error:
        # Nothing is known of the network then: any other stands in for it, so that the rest of the file is heard.
        stand_in = to_plain(preset("resnet18", input_shape=(3, 32, 32), class_count=10))
        known = {field.name for kind in FAMILIES.values() for field in fields(kind)}
        unknown = {key: value for key, value in said.items() if key not in known | stand_in.keys()}
        return {**plain, "model": stand_in | unknown}, problems_with(_Preset, named, "model") or [f"model: {error}"]
    return {**plain, "model": {**to_plain(network), **said}}, []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    """What names a published network."""

    preset: str
    input_shape: tuple[int, ...]
    class_count: int
    norm: PublishedNorm = "batch"


_PRESET_KEYS = frozenset(field.name for field in fields(_Preset))
