"""Records a module of any code as plain data, from which submodels of any size are built."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from subfleet.elastic.axes import Axis, AxisKind
from subfleet.elastic.recording.blocks import list_spans
from subfleet.elastic.recording.calls import Call, LayerSpan
from subfleet.elastic.recording.comparing import merge_records
from subfleet.elastic.recording.copies import find_uncopied
from subfleet.elastic.recording.cuts import EVERYTHING, Cuts
from subfleet.elastic.recording.dimensions import GROUP, Dim, Leaf, expand_parts, resolve
from subfleet.elastic.recording.encoding import MOST_CONSTANTS, CallEncoder, encode_tensor
from subfleet.elastic.recording.expressions import BATCH
from subfleet.elastic.recording.functions import NORMS, get_argument
from subfleet.elastic.recording.inputs import InputPart, Inputs
from subfleet.elastic.recording.markers import Markers, find_markers
from subfleet.elastic.recording.naming import NamedAxis, name_axes
from subfleet.elastic.recording.positions import count_positions
from subfleet.elastic.recording.record import (
    NetworkRecord,
    RecordedBlock,
    RecordedPlan,
    RecordedProduct,
    RecordedTensor,
)
from subfleet.elastic.recording.run import ModuleRun, ModuleRuns, find_class_dim, keep_joined_whole, run_module
from subfleet.elastic.recording.samples import draw_input, draw_samples
from subfleet.elastic.recording.sizes import express, name_sums
from subfleet.protocol.errors import ConfigError

_BATCHES = (3, 5)
"""Odd sizes, so that no other dimension is likely to have them."""
_PLACES: Mapping[int, Literal["sample", "token", "pixel"]] = MappingProxyType({2: "sample", 3: "token", 4: "pixel"})
"""What logits of so many dimensions are for."""
_CHANCE = 4.0
"""Standard errors."""


def record_module(
    module: nn.Module,
    input_shape: tuple[int, ...],
    *,
    symbols: int = 0,
    inputs: Inputs = MappingProxyType({}),
    cuts: Cuts = EVERYTHING,
) -> NetworkRecord:
    """Record a module.

    It is recorded twice, with other inputs and batch sizes, since a network that computes differently for different
    inputs cannot be recorded.

    Args:
        module: maps a batch of samples to logits (batch, classes), (batch, tokens, classes) or (batch, classes, height,
            width). With markers that say how its first weights are drawn, it may be on PyTorch's meta device.
        input_shape: of one sample.
        symbols: size of the vocabulary if inputs are tokens; 0 if they are numbers.
        inputs: what a sample holds, if the module has several inputs; then the shape and symbols follow from it.
        cuts: what may be cut.

    Raises:
        ConfigError: the module fails, calls something that cannot be recorded, or branches on its data; or a pattern of
            `cuts` fits nothing in it.
    """
    records, markers = [], find_markers(module)
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    for seed, batch in enumerate(_BATCHES):
        generator = torch.Generator().manual_seed(seed)
        only = InputPart(shape=input_shape, symbols=symbols)
        samples = draw_samples(inputs, batch, generator) if inputs else draw_input(only, batch, generator)
        runs = run_module(module, samples.to(device), inputs, kernels=markers.kernels)
        records.append(_write(module, runs, cuts, markers, symbols))
        del runs  # it holds all results, which the next one would come on top of
    first, second = records
    return merge_records(first, second, _BATCHES)


def _write(module: nn.Module, runs: ModuleRuns, cuts: Cuts, markers: Markers, symbols: int) -> NetworkRecord:
    named = name_axes(runs, markers)
    cuts.keep_axes({axis.leaf: axis.name for axis in named})
    keep_joined_whole(runs.follower)
    axes = tuple(axis for axis in named if axis.leaf.kind == GROUP or not axis.leaf.reason)
    leaves = dict(chain.from_iterable(axis.names() for axis in axes))
    joined, sums = name_sums(runs, leaves)
    names = {**leaves, **joined}
    encoders = [CallEncoder(runs, run, names) for run in (runs.training, runs.evaluation)]
    spans = [list_spans(module, run, runs.follower, markers) for run in (runs.training, runs.evaluation)]
    both = [span.layer for span in spans[0] if any(span.layer == other.layer for other in spans[1])]
    chosen = both if markers.sections is not None else cuts.choose_blocks(both)
    blocks = tuple(_write_blocks([span for span in spans[0] if span.layer in chosen], runs, markers, names))
    training, evaluation = (
        _write_plan(run, encoder, [span for span in own if span.layer in chosen])
        for run, encoder, own in zip((runs.training, runs.evaluation), encoders, spans, strict=True)
    )
    return NetworkRecord(
        symbols=symbols,
        class_count=runs.training.logits.shape[find_class_dim(runs.training.logits)],
        predicts=_PLACES[runs.training.logits.dim()],
        axes=tuple(_write_axes(axes, runs, cuts)),
        sums={name: tuple(map(tuple, parts)) for name, parts in sums.items()},
        tensors=_write_tensors(module, runs, names, markers),
        fixed=tuple([name, *encode_tensor(runs.state[name])] for name in runs.fixed),
        blocks=blocks,
        training=training,
        evaluation=evaluation,
        products=tuple(
            RecordedProduct(
                result=tuple(_express_all(product.result, names)),
                summed=tuple(_express_all(product.summed, names)),
                layer=product.layer,
            )
            for product in runs.training.products
            if not product.weight
        ),
        whole=_list_whole(runs),
    )


def _express_all(dims: Iterable[Dim], names: Mapping[Leaf, str]) -> Iterator[Any]:
    """The sizes of a product's dimensions above 1, for one sample.

    Only now is it known which leaves run over samples: a constant that is expanded to the batch is combined with a
    sample later.
    """
    alone = ([leaf for leaf in resolve(dim) if not leaf.is_batch] for dim in dims)
    return (size for size in (express(dim, names) for dim in alone) if size != 1)


def _write_axes(axes: Iterable[NamedAxis], runs: ModuleRuns, cuts: Cuts) -> Iterator[Axis]:
    mixed, averaged = (
        {leaf for dim in dims for product in expand_parts(dim) for leaf in product}
        for dims in (runs.follower.mixed, runs.follower.averaged)
    )
    uncopied = set(find_uncopied(runs)) | mixed
    for axis in axes:
        yield Axis(
            name=axis.name,
            size=axis.size,
            kind=cast("AxisKind", axis.kind),
            mixed=axis.leaf in mixed | averaged,
            granularity=cuts.choose_granularity(axis),
            least=cuts.choose_least(axis),
            copied=axis.leaf.kind == GROUP or axis.leaf not in uncopied,
            evenly=axis.leaf in averaged,
        )


def _write_blocks(
    spans: Iterable[LayerSpan], runs: ModuleRuns, markers: Markers, names: Mapping[Leaf, str]
) -> Iterator[RecordedBlock]:
    """The blocks; without markers, those of one container are a section."""
    sections = dict[str, int]()
    if markers.sections is not None:
        sections = {name: section for section, own in enumerate(markers.sections) for name in own}
    containers = dict[str, int]()
    for span in spans:
        container = span.layer.rpartition(".")[0]
        section = sections.get(span.layer, containers.setdefault(container, len(containers)))
        reads, gives = (
            [express(dim, names) for dim in runs.follower.dims_of(tensor)] for tensor in (span.inputs[0], span.out)
        )
        kept = span.layer in markers.kept
        if not kept and not _passes(reads, gives):
            raise ConfigError(
                f"block {span.layer!r} changes the shape of its input, so a submodel cannot leave it out; name it "
                "among the markers' kept"
            )
        read, given = _find_ends(reads, gives)
        yield RecordedBlock(name=span.layer, section=section, kept=kept, reads=read, gives=given)


def _passes(reads: Sequence[Any], gives: Sequence[Any]) -> bool:
    """Whether the sizes of an input and an output agree, or differ in one axis that can be cut alike."""
    differing = [pair for pair in zip(reads, gives, strict=False) if pair[0] != pair[1]]
    cut = all(isinstance(size, str) for pair in differing for size in pair)
    return len(reads) == len(gives) and len(differing) < 2 and cut


def _find_ends(reads: Sequence[Any], gives: Sequence[Any]) -> tuple[str, str]:
    """The axes of the channels of an input and an output: the two that differ, or one axis that both have."""
    pairs = list(zip(reads, gives, strict=False))
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    same = [pair for pair in pairs if isinstance(pair[0], str) and pair[0] != BATCH]
    read, given = (*differing, *same, ("", ""))[0]
    return read if isinstance(read, str) else "", given if isinstance(given, str) else ""


def _write_plan(run: ModuleRun, encoder: CallEncoder, spans: Iterable[LayerSpan]) -> RecordedPlan:
    calls = encoder.encode_calls()
    blocks = {
        span.layer: (span.start, span.stop, encoder.find_value(span.inputs[0]), encoder.find_value(span.out))
        for span in spans
    }
    return RecordedPlan(calls=calls, out=encoder.find_value(run.logits), blocks=blocks, constants=encoder.constants)


def _write_tensors(
    module: nn.Module, runs: ModuleRuns, names: Mapping[Leaf, str], markers: Markers
) -> tuple[RecordedTensor, ...]:
    positions, multiplied = count_positions(runs), {product.weight for product in runs.training.products}
    parameters, roles = dict(module.named_parameters()), _find_roles(runs)
    # The output layer may have the weight of an embedding.
    roles = {name: role for name, role in roles.items() if role != "embedding" or name not in multiplied}
    roles |= markers.roles
    tensors = []
    for name, tensor in runs.state.items():
        if name in runs.fixed:
            continue
        trained = parameters[name].requires_grad if name in parameters else name in runs.training.changed
        tensors.append(
            RecordedTensor(
                name=name,
                shape=tuple(express(dim, names) for dim in runs.follower.dims_of(tensor)),
                parameter=name in parameters,
                trained=trained,
                role=roles.get(name) or _guess_role(tensor, multiplied=name in multiplied),
                positions=positions.get(name, 1),
                start=None if markers.drawn else _measure_start(tensor),
                values="" if trained or tensor.numel() > MOST_CONSTANTS else encode_tensor(tensor.float())[-1],
            )
        )
    return tuple(tensors)


def _find_roles(runs: ModuleRuns) -> dict[str, str]:
    """Roles that follow from the calls that read a tensor."""
    names, roles = {id(tensor): name for name, tensor in runs.state.items()}, dict[str, str]()

    def find(call: Call, position: int, key: str = "") -> str:
        return names.get(id(get_argument(call.args, call.kwargs, position, key)), "")

    for call in runs.training.calls:
        if call.name == "torch.nn.functional.batch_norm":
            roles |= {find(call, 1): "mean", find(call, 2): "variance"}
        if call.name == "torch.nn.functional.embedding":
            roles[find(call, 1)] = "embedding"
        if call.name in NORMS:
            gain, bias = NORMS[call.name]
            roles |= {find(call, gain, "weight"): "gain", find(call, bias, "bias"): "bias"}
    roles.pop("", None)
    return roles


def _measure_start(tensor: Tensor) -> tuple[float, float]:
    """Mean and standard deviation; a mean that is as small as chance makes it counts as 0."""
    numbers = tensor.detach().double()
    mean, deviation = float(numbers.mean()), float(numbers.std(correction=0)) if numbers.numel() else 0.0
    if deviation and abs(mean) < _CHANCE * deviation / math.sqrt(numbers.numel()):
        mean = 0.0
    return float(f"{mean:.4g}"), float(f"{deviation:.4g}")


def _guess_role(tensor: Tensor, *, multiplied: bool) -> str:
    """The role of a tensor that no norm or embedding reads."""
    if tensor.dim() > 1:
        return "weight" if multiplied else "embedding"
    return "gain" if not tensor.is_meta and bool((tensor == 1).all()) else "bias"


def _list_whole(runs: ModuleRuns) -> dict[str, tuple[str, ...]]:
    """Dimensions of weights that are kept whole, by reason; sides of kernels and sizes of 1 are not listed."""
    whole: dict[str, list[str]] = {}
    for name, tensor in runs.state.items():
        for place, dim in enumerate(runs.follower.dims_of(tensor)[:2]):
            for reason in dict.fromkeys(leaf.reason for leaf in resolve(dim) if leaf.reason and leaf.size > 1):
                whole.setdefault(reason, []).append(f"{name}[{place}]")
    return {reason: tuple(places) for reason, places in whole.items()}
