"""Parts of a module that training leaves as they are."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from subfleet.protocol.errors import ConfigError


def freeze_parameters(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze some parameters of a module, see `list_parameters`.

    Raises:
        ConfigError: a pattern fits nothing, or everything is frozen.
    """
    names = dict(module.named_parameters())
    for pattern in patterns:
        for name in list_parameters(module, pattern, "freeze"):
            names[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in names.values()):
        raise ConfigError(f"freeze names {list(patterns)}, which leave nothing to train; leave some layers out")


def list_parameters(module: nn.Module, pattern: str, key: str) -> list[str]:
    """Names of the parameters that fit a pattern such as "layer4.*" themselves, or that are in a layer that fits it.

    Args:
        module: the module.
        pattern: with the wildcards of files.
        key: the setting that has it.

    Raises:
        ConfigError: it fits nothing.
    """
    names = [name for name, _ in module.named_parameters()]
    fitting = [name for name in names if any(fnmatchcase(own, pattern) for own in _list_layers(name))]
    if not fitting:
        layers = [name for name, layer in module.named_children() if any(True for _ in layer.parameters())]
        raise ConfigError(f"{key} names {pattern!r:.80}, but the network has the layers {layers}; name some of these")
    return fitting


def _list_layers(name: str) -> Iterator[str]:
    """The name of a parameter and of all layers that contain it."""
    return accumulate(name.split("."), lambda before, own: f"{before}.{own}")
