"""Records a module of any code as plain data, from which submodels of any size are built."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from subfleet.elastic.recording.blocks import find_blocks
from subfleet.elastic.recording.comparing import merge_records
from subfleet.elastic.recording.copies import find_uncopied
from subfleet.elastic.recording.cuts import EVERYTHING, Cuts
from subfleet.elastic.recording.dimensions import Leaf, expand_parts, measure, resolve
from subfleet.elastic.recording.encoding import MOST_CONSTANTS, CallEncoder, encode_tensor
from subfleet.elastic.recording.inputs import InputPart, Inputs
from subfleet.elastic.recording.record import (
    NetworkRecord,
    RecordedAxis,
    RecordedPlan,
    RecordedProduct,
    RecordedTensor,
)
from subfleet.elastic.recording.run import ModuleRun, ModuleRuns, find_class_dim, keep_joined_whole, run_module
from subfleet.elastic.recording.samples import draw_input, draw_samples
from subfleet.elastic.recording.sizes import express, name_axes, name_sums

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
            width).
        input_shape: of one sample.
        symbols: size of the vocabulary if inputs are tokens; 0 if they are numbers.
        inputs: what a sample holds, if the module has several inputs; then the shape and symbols follow from it.
        cuts: what may be cut.

    Raises:
        ConfigError: the module fails, calls something that cannot be recorded, or branches on its data; or a pattern of
            `cuts` fits nothing in it.
    """
    records = []
    for seed, batch in enumerate(_BATCHES):
        generator = torch.Generator().manual_seed(seed)
        only = InputPart(shape=input_shape, symbols=symbols)
        samples = draw_samples(inputs, batch, generator) if inputs else draw_input(only, batch, generator)
        records.append(_write(module, run_module(module, samples, inputs), cuts))
    first, second = records
    return merge_records(first, second, _BATCHES)


def _write(module: nn.Module, runs: ModuleRuns, cuts: Cuts) -> NetworkRecord:
    named = name_axes(runs)
    cuts.keep_axes(named)
    keep_joined_whole(runs.follower)
    axes = {leaf: name for leaf, name in named.items() if not leaf.reason}
    joined, sums = name_sums(runs, axes)
    names = {**axes, **joined}
    encoders = [CallEncoder(runs, run, names) for run in (runs.training, runs.evaluation)]
    training, evaluation = (
        _write_plan(module, runs, run, encoder)
        for run, encoder in zip((runs.training, runs.evaluation), encoders, strict=True)
    )
    blocks = cuts.choose_blocks(name for name in training.blocks if name in evaluation.blocks)
    containers: dict[str, list[str]] = {}
    for name in blocks:
        containers.setdefault(name.rpartition(".")[0], []).append(name)
    follower = runs.follower
    mixed = {axes.get(leaf) for dim in follower.mixed for product in expand_parts(dim) for leaf in product}
    uncopied = {axes.get(leaf) for leaf in find_uncopied(runs)} | mixed
    return NetworkRecord(
        class_count=runs.training.logits.shape[find_class_dim(runs.training.logits)],
        predicts=_PLACES[runs.training.logits.dim()],
        axes=tuple(
            RecordedAxis(
                name=name,
                size=leaf.size,
                kind=leaf.kind or "channel",
                mixed=name in mixed,
                granularity=cuts.choose_granularity(leaf),
                least=cuts.choose_least(leaf),
                copied=name not in uncopied,
            )
            for leaf, name in axes.items()
        ),
        sums={name: tuple(map(tuple, parts)) for name, parts in sums.items()},
        tensors=_write_tensors(module, runs, names),
        fixed=tuple([name, *encode_tensor(runs.state[name])] for name in runs.fixed),
        sections=tuple(map(tuple, containers.values())),
        training=replace(training, blocks={name: training.blocks[name] for name in blocks}),
        evaluation=replace(evaluation, blocks={name: evaluation.blocks[name] for name in blocks}),
        products=tuple(
            RecordedProduct(
                result=tuple(express(dim, names) for dim in product.result),
                summed=tuple(express(dim, names) for dim in product.summed),
                layer=product.layer,
            )
            for product in runs.training.products
            if not product.weight
        ),
        whole=_list_whole(runs),
    )


def _write_plan(module: nn.Module, runs: ModuleRuns, run: ModuleRun, encoder: CallEncoder) -> RecordedPlan:
    calls = encoder.encode_calls()
    blocks = {
        span.layer: (span.start, span.stop, encoder.find_value(span.inputs[0]), encoder.find_value(span.out))
        for span in find_blocks(module, run, runs.follower)
    }
    return RecordedPlan(calls=calls, out=encoder.find_value(run.logits), blocks=blocks, constants=encoder.constants)


def _write_tensors(module: nn.Module, runs: ModuleRuns, names: Mapping[Leaf, str]) -> tuple[RecordedTensor, ...]:
    positions = _count_positions(runs)
    parameters, roles = dict(module.named_parameters()), _find_roles(runs)
    # The output layer may have the weight of an embedding.
    roles = {name: role for name, role in roles.items() if role != "embedding" or name not in positions}
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
                role=roles.get(name) or _guess_role(tensor, multiplied=name in positions),
                positions=positions.get(name, 1),
                start=_measure_start(tensor),
                values="" if trained or tensor.numel() > MOST_CONSTANTS else encode_tensor(tensor.float())[-1],
            )
        )
    return tuple(tensors)


def _count_positions(runs: ModuleRuns) -> dict[str, int]:
    """The number of places of a sample at which each weight is multiplied, over all layers that share it."""
    multiplications = Counter[str]()
    for product in runs.training.products:
        multiplications[product.weight] += math.prod(measure(dim) for dim in (*product.result, *product.summed))
    counts = {name: count for name, count in multiplications.items() if name in runs.state}
    return {name: max(1, count // runs.state[name].numel()) for name, count in counts.items()}


_NORMS = {"torch.nn.functional.batch_norm": (3, 4), "torch.nn.functional.layer_norm": (2, 3),
          "torch.nn.functional.group_norm": (2, 3)}  # fmt: skip


def _find_roles(runs: ModuleRuns) -> dict[str, str]:
    """Roles that follow from the calls that read a tensor."""
    names, roles = {id(tensor): name for name, tensor in runs.state.items()}, dict[str, str]()
    for call in runs.training.calls:
        given = [names.get(id(item), "") if isinstance(item, Tensor) else "" for item in call.args]
        given += [""] * 5
        if call.name == "torch.nn.functional.batch_norm":
            roles |= {given[1]: "mean", given[2]: "variance"}
        if call.name == "torch.nn.functional.embedding":
            roles[given[1]] = "embedding"
        if call.name in _NORMS:
            keys = {"weight": call.kwargs.get("weight"), "bias": call.kwargs.get("bias")}
            gain, bias = _NORMS[call.name]
            roles |= {given[gain] or names.get(id(keys["weight"]), ""): "gain"}
            roles |= {given[bias] or names.get(id(keys["bias"]), ""): "bias"}
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
    return "gain" if bool((tensor == 1).all()) else "bias"


def _list_whole(runs: ModuleRuns) -> dict[str, tuple[str, ...]]:
    """Dimensions of weights that are kept whole, by reason; sides of kernels and sizes of 1 are not listed."""
    whole: dict[str, list[str]] = {}
    for name, tensor in runs.state.items():
        for place, dim in enumerate(runs.follower.dims_of(tensor)[:2]):
            for reason in dict.fromkeys(leaf.reason for leaf in resolve(dim) if leaf.reason and leaf.size > 1):
                whole.setdefault(reason, []).append(f"{name}[{place}]")
    return {reason: tuple(places) for reason, places in whole.items()}
