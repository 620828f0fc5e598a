"""Whether a network does in its next run what it did in this one, but for what a step carries.

Two runs are traced one after the other, each on tensors of its own. What the second one gives must be computed from its
own tensors alone, as the first one computes it: then nothing that the network keeps in between matters. Where it
counts, iterates or draws, it is traced more often: what comes every few runs, or by chance, does not show in two.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from subfleet.export.canonical.cleaning import clean
from subfleet.export.canonical.likeness import are_alike, number_results
from subfleet.export.layers import LayerContext
from subfleet.export.recording import trace_functional, trace_with_pytorch
from subfleet.export.steps.holders import Change, StateSnapshot
from subfleet.export.steps.module_state import buffers_of, call_with_state, state_of
from subfleet.export.steps.network_call import prepare_module, run_exits
from subfleet.export.steps.stirring import SEED_COUNT, SeededRandomness
from subfleet.export.steps.watching import describe_change
from subfleet.protocol.errors import ExportError

__all__ = ["RunEffects", "check_repeats"]

_DRAW = "draw with torch.rand, torch.randn or torch.bernoulli, which each step is given anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEffects:
    """What a run has left behind that no step carries, or has taken from where no step does.

    Attributes:
        changes: of what the network holds.
        sources: names of what it holds, or reads, that gives something else each time.
        drew: whether it took Python's or NumPy's random numbers.
    """

    changes: Sequence[Change] = ()
    sources: Sequence[str] = ()
    drew: bool = False

    @property
    def counts(self) -> bool:
        """Whether something may come out otherwise only after many runs."""
        return self.drew or bool(self.sources) or any(isinstance(change.old, (int, float)) for change in self.changes)


def check_repeats(
    module: nn.Module, inputs: Tensor, context: LayerContext, traces: RunEffects, *, training: bool
) -> None:
    """Make sure that what a run leaves behind does not matter to the next ones.

    Args:
        module: as in `training_step`.
        inputs: an example.
        context: not used before.
        traces: of a run.
        training: whether it is to be trained.

    Raises:
        ExportError: something of it does.
    """
    state, changes = state_of(module), traces.changes
    with prepare_module(module, context, training=training):
        runs = _RepeatedRuns(module, state, context, training=training)
        if changes and not runs.are_alike(inputs):
            named = (change for change in changes if len(changes) > 1 and not runs.are_alike(inputs, change.name))
            culprit = next(named, changes[0])
            raise ExportError(describe_change(culprit.name, culprit.old))
        if not traces.counts or runs.stay_equal(inputs):
            return
    if traces.drew:
        raise ExportError(
            "the network uses Python's or NumPy's random numbers, but a program would repeat one draw in every step; "
            f"{_DRAW}, and multiply by zeros and ones in the place of an if"
        )
    counted = next((effect for effect in changes if isinstance(effect.old, (int, float))), None)
    if counted is not None:
        raise ExportError(describe_change(counted.name, counted.old))
    raise ExportError(
        f"the network takes another value from {traces.sources[0]!r} in each run, but a program would repeat one in "
        f"every step; count in a persistent buffer of torch.float32, or {_DRAW}"
    )


class _RepeatedRuns:
    """Runs of a module as it is, one after the other."""

    def __init__(
        self, module: nn.Module, state: Mapping[str, Tensor], context: LayerContext, *, training: bool
    ) -> None:
        self._module, self._state, self._context = module, state, context
        self._buffers = list(buffers_of(module))
        self._training = training

    def are_alike(self, inputs: Tensor, left: str | None = None) -> bool:
        """Whether both do the same.

        Args:
            inputs: an example.
            left: the name of what alone the second run finds as the first one left it; None is all.
        """
        own = [inputs, *(tensor.detach() for tensor in self._state.values())]
        before = StateSnapshot(self._module)

        def twice(*tensors: Tensor) -> list[Tensor]:
            with SeededRandomness(0):
                first = self._run(tensors[: len(own)])
            if left is not None:
                before.restore(excepted=left)
            with SeededRandomness(0):
                return [*first, *self._run(tensors[len(own) :])]

        try:
            graph = trace_with_pytorch(twice, [*own, *(tensor.clone() for tensor in own)])
        finally:
            before.restore()
        clean(graph)
        inputs_of_graph = [node for node in graph.graph.nodes if node.op == "placeholder"]
        results: Any = graph.graph.output_node().args[0]
        known: dict[Hashable, int] = {}
        half = len(results) // 2
        first_numbers = number_results(graph, inputs_of_graph[: len(own)], results[:half], known)
        return len(results) % 2 == 0 and first_numbers == number_results(
            graph, inputs_of_graph[len(own) :], results[half:], known
        )

    def stay_equal(self, inputs: Tensor) -> bool:
        """Whether many runs, each with other random numbers, all do the same."""
        own = [inputs, *(tensor.detach() for tensor in self._state.values())]
        before = StateSnapshot(self._module)
        try:
            first = self._graph(own, 0, before)
            return all(are_alike(first, self._graph(own, turn, before)) for turn in range(1, SEED_COUNT))
        finally:
            before.restore()

    def _graph(self, own: Sequence[Tensor], turn: int, before: StateSnapshot) -> fx.GraphModule:
        def run(*tensors: Tensor) -> list[Tensor]:
            before.forget_tensors()  # what is left of a run before lies in another graph
            return self._run(tensors)

        with SeededRandomness(turn):
            graph = trace_functional(run, own, lambda: own)
        clean(graph)
        return graph

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Logits and new buffers, and gradients, since some layers do on the way back what they do not before."""
        inputs, *values = tensors
        given = dict(zip(self._state, values, strict=True))
        trained = {name: part for name, part in self._module.named_parameters() if self._training}
        leaves = {name: given[name].detach().requires_grad_(part.requires_grad) for name, part in trained.items()}
        given |= leaves | {name: given[name].clone() for name in self._buffers}

        def body() -> list[Tensor]:
            exits = run_exits(self._module, inputs)
            now = dict(self._module.named_buffers())
            buffers = [self._context.buffer(now[name]) for name in self._buffers]
            trainable = [leaf for leaf in leaves.values() if leaf.requires_grad]
            differentiable = [logits for logits in exits if logits.requires_grad]
            gradients: Sequence[Tensor | None] = ()
            if differentiable:
                loss = torch.stack([logits.sum() for logits in differentiable]).sum()
                with self._context.backward_pass():
                    gradients = torch.autograd.grad(loss, trainable, allow_unused=True, retain_graph=True)
            return [*exits, *buffers, *(part for part in gradients if part is not None)]

        with torch.set_grad_enabled(self._training):
            return call_with_state(self._module, given, body)
