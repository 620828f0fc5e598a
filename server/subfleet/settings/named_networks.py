"""Networks as plain settings: published networks by name (presets), and the networks that clients declare."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, cast

from subfleet.elastic.families import AnyFamily, preset
from subfleet.elastic.families.records.fields import ReplaceableNorm
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.network import Family
from subfleet.elastic.recording.inputs import InputPart
from subfleet.elastic.recording.tuning import LoraSettings, Tuning
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.schema import canonical_json, from_plain, parse_json, read_plain, to_plain

_MAX_CHARACTERS = 4096
_MAX_NUMBER = 65_536
"""Limits of a client's network: no width or image is larger."""
_MAX_BLOCKS = 128
_MAX_SIDE = 256
_SIDES = ("kernels", "patch", "strides", "stem_stride")
"""Settings that are sides of kernels or patches; every submodel has them in full."""
_TASK = ("input_shape", "class_count")
"""Settings that all networks of a run share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetSettings:
    """The keys that select a published network; see `subfleet.elastic.families.preset`."""

    preset: str
    input_shape: tuple[int, ...]
    class_count: int
    norm: ReplaceableNorm = "batch"


_KEYS = frozenset(field.name for field in fields(PresetSettings))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSettings:
    """The keys that name a PyTorch module as the network.

    Attributes:
        module: a function that returns a `torch.nn.Module`, or its class, such as "torchvision.models:resnet18".
        input_shape: shape of one sample; empty if `inputs` says it.
        symbols: size of the vocabulary if inputs are tokens; 0 if they are numbers.
        inputs: several inputs by the names of the module's arguments, which a sample holds one after another.
        keep: patterns of axes that stay whole.
        blocks: patterns of the blocks that a submodel can leave out.
        granularity: size of the groups of channels that are kept or dropped together.
        min_width: the fewest channels that a submodel keeps of an axis.
        freeze: patterns of layers or parameters that training leaves as they are.
        lora: adapters, which are trained in place of everything else; None trains the module itself.
        loss: a function of outputs and labels that returns the loss of each label, such as "my_net:focal_loss"; empty
            takes that of the objective.
    """

    module: str
    input_shape: tuple[int, ...] = ()
    symbols: int = 0
    inputs: Mapping[str, InputPart] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ("*",)
    granularity: int = 1
    min_width: int = 1
    freeze: tuple[str, ...] = ()
    lora: LoraSettings | None = None
    loss: str = ""


def record_settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the network that a table's `module` names, which is imported and recorded.

    Its table `arguments` has the named arguments of the function.

    Raises:
        ConfigError: keys are unknown, missing or wrong, or the module cannot be imported or recorded.
    """
    from subfleet.elastic.recording.cuts import Cuts
    from subfleet.elastic.recording.loading import make_loss, make_module, record_network

    chosen = read_plain(ModuleSettings, {key: value for key, value in table.items() if key != "arguments"})
    arguments = table.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ConfigError(f"arguments is {arguments!r:.80}, but must be a table of named arguments")
    if bool(chosen.input_shape) == bool(chosen.inputs):
        raise ConfigError("a module needs either input_shape, or inputs if it has several; set one of the two")
    if chosen.inputs and chosen.symbols:
        raise ConfigError(f"symbols is {chosen.symbols}, but each of several inputs has its own; set them in inputs")
    cuts = Cuts(keep=chosen.keep, blocks=chosen.blocks, granularity=chosen.granularity, min_width=chosen.min_width)
    module = make_module(chosen.module, arguments, tuning=Tuning(freeze=chosen.freeze, lora=chosen.lora))
    loss = make_loss(chosen.loss) if chosen.loss else None
    recorded = record_network(
        module, chosen.input_shape, symbols=chosen.symbols, inputs=chosen.inputs, cuts=cuts, loss=loss
    )
    plain: dict[str, Any] = to_plain(recorded)
    return plain


def expand_preset(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the network that a table's `preset` names, overridden by the other keys of the table.

    Raises:
        ConfigError: there is no such network, or a key of `PresetSettings` is missing or wrong.
    """
    chosen = read_plain(PresetSettings, {key: table[key] for key in table.keys() & _KEYS})
    network = preset(chosen.preset, input_shape=chosen.input_shape, class_count=chosen.class_count, norm=chosen.norm)
    return {**to_plain(network), **{key: value for key, value in table.items() if key != "preset"}}


def complete_network(table: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a device's network; missing inputs and classes are taken from `[model]`.

    Raises:
        ConfigError: it names a published network that does not exist, or its keys are wrong.
    """
    whole = {**{key: model[key] for key in _TASK if key in model}, **table}
    return expand_preset(whole) if "preset" in whole else whole


def declare_network(network: Family, named: Mapping[str, Family]) -> str:
    """A network as a client declares it: by the name that the run's file gives it, or else by its settings."""
    name = next((own for own, known in named.items() if known == network), None)
    return canonical_json(network if name is None else {"name": name}).decode()


def find_client_network(text: str, model: Family, named: Mapping[str, AnyFamily]) -> AnyFamily:
    """The network that a client declares.

    Args:
        text: a JSON object with the keys of `[model]`, or with the `name` of one of the run's `[networks]`.
        model: of the run; inputs and classes must agree.
        named: the run's `[networks]`.

    Raises:
        ConfigError: it is not a network, has other inputs or classes, or is too large.
    """
    return next(
        (network for name, network in named.items() if canonical_json({"name": name}).decode() == text), None
    ) or parse_client_network(text, model)


@lru_cache(maxsize=2**12)  # every heartbeat of a client repeats it
def parse_client_network(text: str, model: Family) -> AnyFamily:
    """The network whose settings a client declares. Its numbers are checked before anything is built.

    Args:
        text: a JSON object with the keys of `[model]`.
        model: of the run; inputs and classes must agree.

    Raises:
        ConfigError: it is not a network, has other inputs or classes, or is too large.
    """
    try:
        plain = parse_json(text.encode(), max_bytes=4 * _MAX_CHARACTERS)
        if not isinstance(plain, dict):
            raise ConfigError("a network of a client's own must be a JSON object with the keys of [model]")
        if max(_list_numbers(plain), default=0) > _MAX_NUMBER:
            raise ConfigError(f"a client's network has a number above the limit of {_MAX_NUMBER}")
        plain = complete_network(plain, to_plain(model))
        family: AnyFamily = from_plain(cast("Any", AnyFamily), plain, "a client's network")
    except ProtocolError as error:
        raise ConfigError(str(error)) from error
    if isinstance(family, Recorded):  # its calls would run here, with sizes that a client chooses
        raise ConfigError(
            "a client's network is a recorded module, but these are declared by the name of one of the run's "
            '[networks], such as {"name": "small"}'
        )
    blocks = sum(getattr(family, "depths", ()))
    if blocks > _MAX_BLOCKS:
        raise ConfigError(f"a client's network has {blocks} blocks, but may have at most {_MAX_BLOCKS}")
    for key in _SIDES:
        side = max(_list_numbers(to_plain(getattr(family, key, 0))), default=0)
        if side > _MAX_SIDE:
            raise ConfigError(f"a client's network has {key} of {side}, but may have at most {_MAX_SIDE}")
    for key in _TASK:
        if getattr(family, key) != getattr(model, key):
            raise ConfigError(
                f"a client's network has {key} {getattr(family, key)}, but the run has {getattr(model, key)}; leave "
                f"{key} out"
            )
    return family


def _list_numbers(plain: Any) -> Iterator[float]:
    if isinstance(plain, Mapping):
        plain = list(plain.values())
    if isinstance(plain, (list, tuple)):
        for item in plain:
            yield from _list_numbers(item)
    elif isinstance(plain, int | float) and not isinstance(plain, bool):
        yield plain
