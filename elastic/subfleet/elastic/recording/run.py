"""One run of a module: its calls, and what each dimension runs over."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from subfleet.elastic.recording.calls import Call, CallLog, LayerSpan, LoggingMode
from subfleet.elastic.recording.dimensions import Leaf, expand_parts, keep_whole, make_whole_dim, may_be_cut, resolve
from subfleet.elastic.recording.following import DimensionFollower, FollowingMode, Product, list_tensors
from subfleet.elastic.recording.inputs import Inputs
from subfleet.elastic.recording.live_calls import keep_live_calls
from subfleet.elastic.recording.rules import RULES
from subfleet.elastic.recording.samples import call_module
from subfleet.protocol.errors import ConfigError, SubfleetError

_LOGITS = ("logits", "out")
"""Names of the logits among several results."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleRun:
    """What a run of a module shows.

    Attributes:
        logits: its result.
        calls: the calls of functions that the result depends on or that change the module, in order.
        spans: the calls of each layer.
        products: the matrix products and convolutions of these calls, in order.
        changed: names of the tensors of the module that the run changed, such as running statistics.
    """

    logits: Tensor
    calls: tuple[Call, ...]
    spans: tuple[LayerSpan, ...]
    products: tuple[Product, ...]
    changed: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleRuns:
    """A run of a module in training and one in evaluation.

    Attributes:
        state: the module's parameters and buffers by name that its results depend on.
        fixed: names of the buffers that are not in the module's saved state, or are not finite floating-point numbers.
        inputs: the input of both, with the batch first.
        training: the run in training.
        evaluation: the run in evaluation.
        follower: what each dimension of both runs over.
    """

    state: Mapping[str, Tensor]
    fixed: tuple[str, ...]
    inputs: Tensor
    training: ModuleRun
    evaluation: ModuleRun
    follower: DimensionFollower


def run_module(
    module: nn.Module, samples: Tensor, inputs: Inputs, *, kernels: frozenset[str] = frozenset()
) -> ModuleRuns:
    """Run a module in training and in evaluation, and follow what it computes.

    It is unchanged afterwards, except that lazy layers have sizes.

    Args:
        module: maps a batch of samples to logits; see `record_module`.
        samples: a batch of at least two.
        inputs: what each sample holds, if the module has several inputs.
        kernels: weights of convolutions whose kernels may be cut.

    Raises:
        ConfigError: the module fails, or returns no tensor.
    """
    _initialise(module, samples, inputs)
    follower = DimensionFollower(rules=RULES, kernels=kernels)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    ordered = {name: named[name] for name in module.state_dict() if name in named} | named
    state = {name: tensor for name, tensor in ordered.items() if not name.endswith("num_batches_tracked")}
    saved, parameters = module.state_dict().keys(), dict(module.named_parameters())
    fixed = tuple(
        name
        for name, tensor in state.items()
        if name not in parameters and (name not in saved or not _is_finite_number(tensor))
    )
    batch = Leaf(len(samples), is_batch=True)
    follower.assign(samples, [(batch,), *(make_whole_dim(size, "the shape of a sample") for size in samples.shape[1:])])
    follower.mark_computed(samples)
    for name, tensor in state.items():
        follower.dims_of(tensor)
        follower.name_weight(tensor, name)
        if name in fixed:
            for dim in follower.dims_of(tensor):
                keep_whole(dim, "a buffer of constants")
    with _unchanged_parameters(module):
        training, evaluation = (_run_once(module, samples, inputs, follower, training=mode) for mode in (True, False))
    for run in (training, evaluation):
        _keep_constants_whole(follower, run, [samples, *state.values()])
        _name_classes(follower, run.logits)
    keep_joined_whole(follower)
    used = {
        id(tensor)
        for run in (training, evaluation)
        for call in run.calls
        for tensor in list_tensors((call.args, call.kwargs))
    }
    state = {name: tensor for name, tensor in state.items() if id(tensor) in used}
    fixed = tuple(name for name in fixed if name in state)
    return ModuleRuns(
        state=state, fixed=fixed, inputs=samples, training=training, evaluation=evaluation, follower=follower
    )


def _is_finite_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and (tensor.is_meta or bool(tensor.isfinite().all()))


def _initialise(module: nn.Module, samples: Tensor, inputs: Inputs) -> None:
    """Let lazy layers find their sizes."""
    if not any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        return
    modes = {layer: layer.training for layer in module.modules()}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)  # noqa: TID251 - layers draw their first weights
            call_module(module.eval(), samples, inputs)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"the network fails for inputs of shape {tuple(samples.shape)}, from which its lazy layers take their "
            f"sizes: {error}"
        ) from error
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def _run_once(
    module: nn.Module, samples: Tensor, inputs: Inputs, follower: DimensionFollower, *, training: bool
) -> ModuleRun:
    log, state = CallLog(follower=follower), [*module.parameters(), *module.buffers()]
    buffers = dict(module.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in buffers.items()}
    with _unchanged(module, before, training=training), torch.random.fork_rng(devices=[]), torch.no_grad():
        stop_watching = log.watch(module)
        try:
            with LoggingMode(log), FollowingMode(follower):
                out = call_module(module, samples, inputs)
        except SubfleetError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise ConfigError(
                f"the network fails in layer {follower.layer!r} for inputs of shape {tuple(samples.shape)}: {error}"
            ) from error
        finally:
            stop_watching()
        changed = {
            name for name, tensor in buffers.items() if not tensor.is_meta and not torch.equal(tensor, before[name])
        }
        changed |= _list_measured(log.calls, buffers)
    logits = _find_logits(out)
    calls, spans = keep_live_calls(log.calls, log.spans, logits, state)
    return ModuleRun(
        logits=logits,
        calls=calls,
        spans=spans,
        products=tuple(product for call in calls for product in call.products),
        changed=frozenset(changed),
    )


def _list_measured(calls: Sequence[Call], buffers: Mapping[str, Tensor]) -> set[str]:
    """The running statistics that norms measure."""
    names, measured = {id(tensor): name for name, tensor in buffers.items()}, set[str]()
    for call in calls:
        if call.name == "torch.nn.functional.batch_norm" and call.kwargs.get("training", call.args[5:6] == (True,)):
            measured |= {names[id(tensor)] for tensor in list_tensors(call.args[1:3]) if id(tensor) in names}
    return measured


def _find_logits(out: Any) -> Tensor:
    """The logits among the results: the only tensor, or the one named so."""
    named = [out.get(name) if isinstance(out, Mapping) else getattr(out, name, None) for name in _LOGITS]
    out = next((result for result in named if isinstance(result, Tensor)), out)
    if isinstance(out, Tensor) and 1 < out.dim() < 5:
        return out
    what = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    raise ConfigError(
        f"the network returns {what}, but must return a tensor of logits, (batch, classes), (batch, tokens, classes) "
        f"or (batch, classes, height, width), or several results with logits under one of the names {list(_LOGITS)}"
    )


def find_class_dim(logits: Tensor) -> int:
    """The dimension of the classes: the last one for tokens, else the one after the batch."""
    return 2 if logits.dim() == 3 else 1


def _keep_constants_whole(follower: DimensionFollower, run: ModuleRun, known: Sequence[Tensor]) -> None:
    """Keep tensors whole that are neither given to the module, nor part of its state, nor computed by it."""
    seen = set(map(id, known))
    for call in run.calls:
        for tensor in list_tensors((call.args, call.kwargs)):
            if id(tensor) not in seen:
                for dim in follower.dims_of(tensor):
                    keep_whole(dim, "a constant of the network's code")
        seen.update(map(id, list_tensors(call.out)))


def _name_classes(follower: DimensionFollower, logits: Tensor) -> None:
    """Keep the results whole; the classes are an axis that is never cut."""
    for place, dim in enumerate(follower.dims_of(logits)):
        leaves = resolve(dim)
        if place == find_class_dim(logits) and len(leaves) == 1 and not leaves[0].reason and not leaves[0].parts:
            leaves[0].kind = "class"
        else:
            keep_whole(dim, "the shape of the network's results")


def keep_joined_whole(follower: DimensionFollower) -> None:
    """Keep concatenations whole that are not sums of products of axes, or have no part that may be cut."""
    joined = {leaf: None for dim in follower.list_dims() for leaf in resolve(dim) if leaf.parts}
    kept = -1
    while kept != (kept := sum(bool(leaf.reason) for leaf in joined)):  # a part that is kept may be one of another
        for leaf in joined:
            products = expand_parts((leaf,))
            if any(factor.is_batch or (factor.parts and not factor.reason) for own in products for factor in own):
                keep_whole((leaf,), "a concatenation of concatenations or samples")
            elif not any(map(may_be_cut, products)):
                keep_whole((leaf,), "it joins parts that are kept whole")


@contextmanager
def _unchanged_parameters(module: nn.Module) -> Iterator[None]:
    """Restore the parameters, which some layers normalise in place."""
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(before[name])


@contextmanager
def _unchanged(module: nn.Module, before: Mapping[str, Tensor], *, training: bool) -> Iterator[None]:
    """Set the mode of all layers; restore modes, buffers and counters at the end.

    Layers with frozen parameters alone are in evaluation: their statistics are frozen, too.
    """
    modes = {layer: layer.training for layer in module.modules()}
    counters = {layer: layer.num_batches_tracked for layer in module.modules() if isinstance(layer, _BatchNorm)}
    module.train(training)
    for layer in module.modules():
        own = list(layer.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            layer.training = False
    for norm in counters:
        norm.num_batches_tracked = None  # otherwise the layer works as before
    try:
        yield
    finally:
        for norm, counter in counters.items():
            norm.num_batches_tracked = counter
        with torch.no_grad():
            for name, tensor in module.named_buffers():
                tensor.copy_(before[name])
        for layer, mode in modes.items():
            layer.training = mode
