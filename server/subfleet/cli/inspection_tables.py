"""Prints how a network can be cut, and what its submodels cost."""

import math
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from subfleet.cli.console import show_table, to_text
from subfleet.cli.inspection import AxisDescription, NetworkDescription, SubmodelDescription, describe_network
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.network import BUFFER_ROLES, Network

_BAR = 16
_MEGA = 1e6
_MOST_NAMES = 2


def show_network(network: Network, console: Console) -> None:
    """Print a drawing of a network's layers, its axes and blocks, and what is kept whole."""
    described = describe_network(network)
    numbers = {axis.name: number for number, axis in enumerate(described.axes, 1)}
    whole = network.full_architecture()
    cost = estimate_cost(network, whole, batch_size=1)
    shape = " x ".join(map(str, described.input_shape))
    console.print(
        to_text(
            f"{described.family}: {cost.parameters:,} parameters, {cost.forward_macs / _MEGA:,.1f} million "
            f"multiplications for a sample of {shape}, {described.class_count} outputs"
        )
    )
    _draw_layers(network, numbers, console)
    _show_axes(described, numbers, console)
    if described.blocks:
        console.print(to_text(f"A submodel can leave out {len(described.blocks)} parts: {', '.join(described.blocks)}"))
    for reason, tensors in described.whole.items():
        console.print(to_text(f"Kept whole ({reason}): {_shorten(tensors)}"))


def _draw_layers(network: Network, numbers: Mapping[str, int], console: Console) -> None:
    """Print each layer with the sizes of its weight, the numbers of their axes, and a bar of its parameters."""
    weights = [decl for decl in network.tensors.values() if len(decl.shape) > 1 and decl.role not in BUFFER_ROLES]
    most = max((math.prod(decl.shape) for decl in weights), default=1)
    rows = list[list[str | Text]]()
    for decl in weights:
        count = math.prod(decl.shape)
        bar = Text("█" * max(1, round(_BAR * math.sqrt(count / most))), style="cyan")
        dims = zip(decl.shape, decl.factors, strict=True)
        sizes = " x ".join(_format_size(network, size, own, numbers) for size, own in dims)
        rows.append([decl.name.removesuffix(".weight"), sizes, f"{count:,}", bar, "yes" if decl.part else ""])
    titles = ("layer", "size [axes]", "parameters", "", "can be left out")
    show_table(
        console, titles, rows, left=("layer", "size [axes]", "", "can be left out"), unwrapped=("parameters", "")
    )


def _format_size(network: Network, size: int, factors: tuple[str | int, ...], numbers: Mapping[str, int]) -> str:
    named = [factor for factor in factors if isinstance(factor, str)]
    if not named:
        return str(size)
    parts = [
        "+".join(str(numbers[own]) for part in network.sums[name] for own in part if isinstance(own, str))
        if name in network.sums
        else str(numbers[name])
        for name in named
    ]
    return f"{size}[{'·'.join(parts)}]"


def _show_axes(described: NetworkDescription, numbers: Mapping[str, int], console: Console) -> None:
    titles = ("axis", "name", "size", "kind", "tensors")
    rows = [
        [
            str(numbers[axis.name]),
            axis.name,
            str(axis.size),
            _describe_kind(axis),
            _shorten(axis.tensors),
        ]
        for axis in described.axes
    ]
    show_table(console, titles, rows, left=("name", "kind", "tensors"))
    if any(axis.mixed for axis in described.axes):
        console.print(
            to_text(
                "The indices of a mixed axis are combined, for example by a layer norm: a submodel that lacks some "
                "computes something else than the whole network with zeros in their place."
            )
        )


def _describe_kind(axis: AxisDescription) -> str:
    if axis.kind == "class":
        return "class, never cut"
    groups = f", in groups of {axis.granularity}" if axis.granularity > 1 else ""
    return f"{axis.kind}{groups}{', mixed' if axis.mixed else ''}"


def show_submodels(submodels: list[SubmodelDescription], console: Console) -> None:
    """Print the costs of submodels on each runtime, and why some cannot be trained."""
    titles = ("submodel", "parameters", "MB", "M MACs", "runtime", "program", "memory", "step")
    rows = []
    for submodel in submodels:
        start = (
            submodel.name,
            f"{submodel.parameters:,}",
            f"{submodel.weight_bytes / _MEGA:.2f}",
            f"{submodel.forward_macs / _MEGA:,.1f}",
        )
        for target, trial in submodel.runtimes.items():
            both = (trial.program_bytes, trial.planned_peak_bytes)
            sizes = [f"{size / _MEGA:.1f} MB" if size else "" for size in both]
            step = "" if trial.step_s is None else f"{1000 * trial.step_s:.1f} ms"
            cells = (*start, target, *sizes, step)
            rows.append([to_text(cell, "red" if trial.problem else "") for cell in cells])
            start = ("", "", "", "")
    show_table(console, titles, rows, left=("submodel", "runtime"), unwrapped=titles)
    for submodel in submodels:
        for target, trial in submodel.runtimes.items():
            if trial.problem:
                console.print(to_text(f"{submodel.name} on {target}: {trial.problem}"))


def _shorten(names: tuple[str, ...]) -> str:
    shown = names[:1] if len(names) > _MOST_NAMES else names
    return f"{', '.join(shown)} and {len(names) - 1} more" if len(names) > _MOST_NAMES else ", ".join(shown)
