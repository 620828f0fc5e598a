"""Whether a network does in its next run what it did in this one, but for what a step carries.

Two runs are traced one after the other, each on tensors of its own. What the second one gives must be computed from its
own tensors alone, as the first one computes it: then nothing that the network keeps in between matters.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from subfleet.export.canonical.cleaning import clean
from subfleet.export.layers import LayerContext
from subfleet.export.recording import functional_graph
from subfleet.export.steps.holders import Change, Holders
from subfleet.export.steps.module_state import buffers_of, state_of, within
from subfleet.export.steps.network_call import exits_of, prepared
from subfleet.export.steps.watching import changed_state
from subfleet.protocol.errors import ExportError

__all__ = ["check_repeats"]


def check_repeats(
    module: nn.Module, inputs: Tensor, context: LayerContext, changes: Sequence[Change], *, training: bool
) -> None:
    """Make sure that what a run leaves behind does not matter to the next one.

    Args:
        module: as in `training_step`.
        inputs: an example.
        context: not used before.
        changes: what a run leaves behind, and no step carries.
        training: whether it is to be trained.

    Raises:
        ExportError: something of it does.
    """
    state = state_of(module)
    with prepared(module, context, training=training):
        runs = _TwoRuns(module, state, context, training=training)
        if runs.are_alike(inputs):
            return
        named = (change for change in changes if len(changes) > 1 and not runs.are_alike(inputs, change.name))
        found = next(named, changes[0])
    raise ExportError(changed_state(found.name, found.old))


class _TwoRuns:
    """Two runs of a module as it is, one after the other."""

    def __init__(
        self, module: nn.Module, state: Mapping[str, Tensor], context: LayerContext, *, training: bool
    ) -> None:
        self._module, self._state, self._context = module, state, context
        self._buffers = list(buffers_of(module))
        self._training = training

    def are_alike(self, inputs: Tensor, kept: str | None = None) -> bool:
        """Whether both do the same.

        Args:
            inputs: an example.
            kept: the name of what alone the second run finds as the first one left it; None is all.
        """
        own = [inputs, *(tensor.detach() for tensor in self._state.values())]
        before = Holders(self._module)

        def twice(*tensors: Tensor) -> list[Tensor]:
            first = self._run(tensors[: len(own)])
            if kept is not None:
                before.restore(kept=kept)
            return [*first, *self._run(tensors[len(own) :])]

        try:
            graph = functional_graph(twice, [*own, *(tensor.clone() for tensor in own)])
        finally:
            before.restore()
        clean(graph)
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        results: Any = graph.graph.output_node().args[0]
        known: dict[Hashable, int] = {}
        half = len(results) // 2
        one = _numbers(graph, places[: len(own)], results[:half], known)
        return len(results) % 2 == 0 and one == _numbers(graph, places[len(own) :], results[half:], known)

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Logits and new buffers, and gradients, since some layers do on the way back what they do not before."""
        inputs, *values = tensors
        given = dict(zip(self._state, values, strict=True))
        trained = {name: part for name, part in self._module.named_parameters() if self._training}
        leaves = {name: given[name].detach().requires_grad_(part.requires_grad) for name, part in trained.items()}
        given |= leaves | {name: given[name].clone() for name in self._buffers}

        def body() -> list[Tensor]:
            exits = exits_of(self._module, inputs)
            now = dict(self._module.named_buffers())
            buffers = [self._context.buffer(now[name]) for name in self._buffers]
            wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
            differentiable = [logits for logits in exits if logits.requires_grad]
            gradients: Sequence[Tensor | None] = ()
            if differentiable:
                loss = torch.stack([logits.sum() for logits in differentiable]).sum()
                with self._context.going_back():
                    gradients = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True)
            return [*exits, *buffers, *(part for part in gradients if part is not None)]

        with torch.set_grad_enabled(self._training):
            return within(self._module, given, body)


def _numbers(
    graph: fx.GraphModule, own: Sequence[fx.Node], results: Sequence[fx.Node], known: dict[Hashable, int]
) -> list[int]:
    """For each result a number that stands for how it is computed: equal ones are computed alike.

    Args:
        graph: in which no operator changes a tensor.
        own: nodes of the run's own tensors: alike where they have the same place.
        results: its results.
        known: the numbers given so far.
    """
    places = {node: place for place, node in enumerate(own)}
    numbers: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        key: Hashable
        if node.op == "placeholder":
            key = ("own", places[node]) if node in places else ("other", node.name)
        elif node.op == "get_attr":
            key = ("held", _value(getattr(graph, node.target)))
        else:
            given = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: f"%{numbers[part]}")
            key = (str(node.target), repr(given))
        numbers[node] = known.setdefault(key, len(known))
    return [numbers[node] for node in results]


def _value(tensor: Any) -> Hashable:
    """A tensor made anew in each run is the same if its numbers are."""
    if type(tensor) not in {Tensor, nn.Parameter}:
        return id(tensor)
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), hash(bits)
