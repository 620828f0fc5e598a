"""Checks that runs of a network change nothing that a step does not carry, and that all runs do the same.

Two runs are traced one after the other, each on its own tensors. The second must be computed from its own tensors only,
exactly as the first: then nothing that the network keeps in between matters. If the network counts, iterates or draws,
it is traced more often: rare or random changes may not show in two runs.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from subfleet.export.canonical.checks import are_alike, number_results
from subfleet.export.canonical.cleaning import clean
from subfleet.export.layers import LayerContext
from subfleet.export.recording import LOOKS, KnownValues, trace_functional, trace_with_pytorch
from subfleet.export.steps.module_calls import buffers_of, call_with_state, prepare_module, run_exits, state_of
from subfleet.export.steps.seeding import SEED_COUNT, SeededRandomness
from subfleet.export.steps.state_snapshot import Change, StateSnapshot
from subfleet.protocol.errors import ExportError


class WriteWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
    """Detects constants that are changed in place, under any name and through any view.

    Args:
        constants: by name.
        carried: tensors that may change; constants that share their memory must not be read.
        mode: the fake tensor mode of the run.
    """

    def __init__(self, constants: Mapping[str, Tensor], carried: Iterable[Tensor], mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, str] = {}
        self._kept: list[_Memory] = []
        for name, tensor in constants.items():
            self._kept.append(_Memory(name, tensor))
            if tensor.is_leaf and not isinstance(tensor, FakeTensor):
                self._kept.append(_Memory(name, mode.from_tensor(tensor)))  # its stand-in in every run
        for memory in reversed(self._kept):
            self._names[memory.address] = memory.name
        for tensor in carried:
            self._names.pop(_address(tensor), None)
        self._written: list[str] = []
        self._known = KnownValues()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and each call would be wrapped

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operator."""
        options = dict(kwargs or {})
        if func in LOOKS and (number := self._known.read(args[0])) is not None:
            return number
        if func._schema.is_mutable and not _is_about_memory(func):  # noqa: SLF001 - no other way to it
            for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
                value = args[index] if index < len(args) else options.get(argument.name)
                if argument.is_write:
                    self._record(value if isinstance(value, (list, tuple)) else (value,))
        result = func(*args, **options)
        self._known.record(func, args, options, result)
        return result

    def _record(self, values: Any) -> None:
        names = [self._names.get(_address(value)) for value in values if isinstance(value, Tensor)]
        self._written.extend(name for name in names if name is not None)

    def check(self) -> None:
        """Check that no constant was changed.

        Raises:
            ExportError: one was.
        """
        replaced = [memory.name for memory in self._kept if memory.is_replaced]
        for name in (*self._written, *replaced):
            raise ExportError(_describe_change(name, torch.zeros(())))


def _is_about_memory(func: Any) -> bool:
    return torch.Tag.inplace_view in func.tags or func is torch.ops.aten.detach_.default


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the only name that a storage without memory has
    return address


class _Memory:
    """The memory of a tensor before a run."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self._tensor, self._storage = tensor, tensor.untyped_storage()
        self.address = _address(tensor)

    @property
    def is_replaced(self) -> bool:
        """Whether the tensor has other memory now."""
        return _address(self._tensor) != self.address


class TensorTies:
    """The names under which a network holds the tensors that are carried.

    Args:
        module: before the run.
        state: the carried tensors, each by one of its names.
        run_tensors: the tensors of the run, by the same names.
    """

    def __init__(self, module: nn.Module, state: Mapping[str, Tensor], run_tensors: Mapping[str, Tensor]) -> None:
        first = {id(tensor): name for name, tensor in state.items()}
        self._first = {name: first[id(tensor)] for name, tensor in _named_tensors(module) if id(tensor) in first}
        self._parameters = {
            name: run_tensors[name] for name, tensor in state.items() if isinstance(tensor, nn.Parameter)
        }
        self._memory = [_Memory(name, tensor) for name, tensor in run_tensors.items()]

    def check(self, module: nn.Module) -> None:
        """Check that a run has left the carried tensors where a step expects them.

        Args:
            module: after the run, within `call_with_state`.

        Raises:
            ExportError: `forward` has replaced a parameter or the data of a tensor, deleted a buffer, or untied two.
        """
        now = dict(_named_tensors(module))
        for name, first in self._first.items():
            if name not in now:
                raise ExportError(
                    f"the network deletes its {name!r} while it runs, but a program carries it from step to step; "
                    f"assign the new value, as in {name.rpartition('.')[2]} = ..., without del"
                )
            if now[name] is not self._parameters.get(first, now[name]):
                raise ExportError(
                    f"the network replaces its parameter {name!r} while it runs, but a program changes parameters as "
                    f"the optimiser does; register {name!r} as a buffer of torch.float32, which forward may replace"
                )
            if now[name] is not now[first]:
                raise ExportError(
                    f"the network replaces its buffer {name!r} while it runs, which is the same tensor as {first!r}, "
                    "but a program keeps them as one; change it in place, as .copy_() does, or register two tensors"
                )
        for memory in self._memory:
            if memory.is_replaced:
                raise ExportError(
                    f"the network sets .data of its {memory.name!r} while it runs, which is not traced; change it in "
                    "place under torch.no_grad(), as .copy_() does"
                )


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _describe_change(name: str, old: Any) -> str:
    """Return the message for state that changes from step to step and is not carried.

    Args:
        name: name of the state.
        old: its value before.
    """
    kind, compute = "state", ", and compute with it as a tensor"
    if isinstance(old, Tensor):
        kind, compute = "tensor", ", and keep layers in nn.ModuleList or nn.ModuleDict" if "[" in name else ""
    elif isinstance(old, (int, float)):
        kind = "number"
        compute = ", such as torch.zeros(()), compute with it as a tensor, and use torch.where instead of if"
    elif old is None:
        compute = " from the start, with a tensor of its shape instead of None"
    return (
        f"the network changes its {kind} {name!r} in forward, but from step to step a program keeps only parameters "
        f"and persistent buffers of torch.float32; make it a buffer with self.register_buffer{compute}, or do not "
        "change it in forward"
    )


_DRAW = "draw with torch.rand, torch.randn or torch.bernoulli, whose numbers are new in each step"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEffects:
    """What a run left behind that no step carries, or took from outside of a step.

    Attributes:
        changes: the changes of what the network holds.
        sources: names of values that it holds or reads and that differ each time.
        drew: whether it drew Python's or NumPy's random numbers.
    """

    changes: Sequence[Change] = ()
    sources: Sequence[str] = ()
    drew: bool = False

    @property
    def counts(self) -> bool:
        """Whether something may only differ after many runs."""
        return self.drew or bool(self.sources) or any(isinstance(change.old, (int, float)) for change in self.changes)


def check_repeats(
    module: nn.Module, inputs: Tensor, context: LayerContext, traces: RunEffects, *, training: bool
) -> None:
    """Check that what a run leaves behind does not affect the next ones.

    Args:
        module: as in `training_step`.
        inputs: an example.
        context: not used before.
        traces: the effects of a run.
        training: whether the module is to be trained.

    Raises:
        ExportError: the next runs are affected.
    """
    state, changes = state_of(module), traces.changes
    with prepare_module(module, context, training=training):
        runs = _RepeatedRuns(module, state, context, training=training)
        if changes and not runs.are_alike(inputs):
            named = (change for change in changes if len(changes) > 1 and not runs.are_alike(inputs, change.name))
            culprit = next(named, changes[0])
            raise ExportError(_describe_change(culprit.name, culprit.old))
        if not traces.counts or runs.stay_equal(inputs):
            return
    if traces.drew:
        raise ExportError(
            "the network uses Python's or NumPy's random numbers, but a program would repeat one draw in every step; "
            f"{_DRAW}, and multiply by zeros and ones instead of an if"
        )
    counted = next((effect for effect in changes if isinstance(effect.old, (int, float))), None)
    if counted is not None:
        raise ExportError(_describe_change(counted.name, counted.old))
    raise ExportError(
        f"the network reads a different value from {traces.sources[0]!r} in each run, but a program would repeat one "
        f"in every step; count in a persistent buffer of torch.float32, or {_DRAW}"
    )


class _RepeatedRuns:
    """Runs of a module, one after the other."""

    def __init__(
        self, module: nn.Module, state: Mapping[str, Tensor], context: LayerContext, *, training: bool
    ) -> None:
        self._module, self._state, self._context = module, state, context
        self._buffers = list(buffers_of(module))
        self._training = training

    def are_alike(self, inputs: Tensor, carried: str | None = None) -> bool:
        """Return whether two runs do the same.

        Args:
            inputs: an example.
            carried: the name of the only state that the second run takes over from the first; None means all state.
        """
        own = [inputs, *(tensor.detach() for tensor in self._state.values())]
        before = StateSnapshot(self._module)

        def run_twice(*tensors: Tensor) -> list[Tensor]:
            with SeededRandomness(0):
                first = self._run(tensors[: len(own)])
            if carried is not None:
                before.restore(excepted=carried)
            with SeededRandomness(0):
                return [*first, *self._run(tensors[len(own) :])]

        try:
            graph = trace_with_pytorch(run_twice, [*own, *(tensor.clone() for tensor in own)])
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
        """Return whether many runs with different random numbers do the same."""
        own = [inputs, *(tensor.detach() for tensor in self._state.values())]
        before = StateSnapshot(self._module)
        try:
            first = self._graph(own, 0, before)
            return all(are_alike(first, self._graph(own, turn, before)) for turn in range(1, SEED_COUNT))
        finally:
            before.restore()

    def _graph(self, own: Sequence[Tensor], turn: int, before: StateSnapshot) -> fx.GraphModule:
        def run(*tensors: Tensor) -> list[Tensor]:
            before.forget_tensors()  # tensors of an earlier run belong to another graph
            return self._run(tensors)

        with SeededRandomness(turn):
            graph = trace_functional(run, own, lambda: own)
        clean(graph)
        return graph

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return logits, new buffers and gradients; some layers only act in the backward pass."""
        inputs, *values = tensors
        carried = dict(zip(self._state, values, strict=True))
        trained = {name: part for name, part in self._module.named_parameters() if self._training}
        leaves = {name: carried[name].detach().requires_grad_(part.requires_grad) for name, part in trained.items()}
        carried |= leaves | {name: carried[name].clone() for name in self._buffers}

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
            return call_with_state(self._module, carried, body)
