"""Estimates the planned memory of the training programs of thousands of submodels from a single traced program."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from math import prod
from types import MappingProxyType

import numpy as np

from subfleet.elastic.memory_estimates import MemoryEstimates
from subfleet.elastic.network import Network
from subfleet.elastic.size_table import Floats, SizeTable
from subfleet.export.estimation.coding import code_axes
from subfleet.export.estimation.target_programs import (
    STRIPE_COLUMNS,
    TracedProgram,
    executorch_program,
    layers_of,
    onnx_program,
    torch_program,
)
from subfleet.export.memory.blocks import KernelCall, blocks_of
from subfleet.export.memory.step_bytes import COUNTED_STEP_BYTES, GAPS, value_bytes
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import TrainRequest
from subfleet.export.steps.step import Step
from subfleet.export.tools import pause_garbage_collection
from subfleet.protocol.errors import ExportError
from subfleet.protocol.tensors import DTYPE_BYTES

_PROGRAMS: Mapping[str, Callable[[Step], TracedProgram]] = MappingProxyType(
    {"onnx": onnx_program, "executorch": executorch_program, "torch": torch_program}
)
_SAMPLES, _FILLED = 512, 12
"""Number of random submodels that determine the possible peaks of a step, and of those for which the allocator is
simulated."""
_INPUTS = slice(1, 2)
"""The dimension of a convolution's weights that runs over its inputs."""
_NOWHERE: Mapping[str, int] = MappingProxyType({})
"""For a layer without a kernel."""
_BlockKind = tuple[int, int, bool, bool | None]
"""The size and the layer's tensor; `pads` and `narrow` of the call that takes the block."""
_BlockEvents = list[tuple[str, _BlockKind, int]]
"""Blocks in order: the name, the kind, and 1 when it is taken or -1 when it is freed."""


class EstimateModel:
    """Makes the cost estimates of a network's submodels under fixed settings, for one target, in seconds.

    The step of the whole network is traced once, with sizes that identify their axes (`coding`). The program of a
    submodel only differs in sizes and missing blocks. So memory is a sum of products of axes at each moment, and the
    peak is the largest moment. `estimates` are these sums.

    Args:
        network: the declaration.
        request: a request for one of the submodels; its submodel does not matter.

    Raises:
        ExportError: the target is unknown, or cannot train the network.
    """

    @pause_garbage_collection()
    def __init__(self, network: Network, request: TrainRequest) -> None:
        if request.target not in _PROGRAMS:
            raise ExportError(f"target is {request.target!r}, but must be one of {sorted(_PROGRAMS)}")
        coding = code_axes(network, request.batch_size)
        # The target "torch" plans as if activations were kept.
        recompute = request.recompute and request.target != "torch"
        step = training_step_of(replace(request, recompute=recompute), coding.build_module())
        program = _PROGRAMS[request.target](step)
        self._coding, self._decls, self._sizes = coding, list(network.tensors.values()), SizeTable(network)
        shapes = coding.local_shapes.tensors
        self._shapes, self._batch_size = [shapes[name] for name in network.tensors], request.batch_size
        layers = layers_of(program, step, list(network.tensors))
        linear = self._count_held(network, step, program)
        linear.update(self._objects(program, layers))  # a sum of counters would leave out negative ones
        if program.unrolls:
            program, layers = self._add_columns(program, layers)
        events_by_memory = block_events(program, layers)
        in_use = [self._blocks_in_use(column_counts, program) for column_counts in events_by_memory if column_counts]
        samples = self._sizes.random(_SAMPLES)
        rows_by_memory = [
            each[np.unique((samples @ each.T).argmax(axis=1))]
            for each in (_tabulate(column_counts, len(self._sizes)) for column_counts in in_use)
        ]
        estimates = MemoryEstimates(
            columns=self._sizes.columns(),
            held=np.float64(np.bincount([*linear], [*linear.values()], len(self._sizes))),
            peaks=np.concatenate([np.zeros((0, len(self._sizes))), *rows_by_memory]),
            parts=tuple(len(column_counts) for column_counts in rows_by_memory),
            lines=np.array(program.lines) + np.array([0, program.base_bytes]),
        )
        if program.measure_arena is not None:
            few, blocks = (
                samples[:_FILLED],
                [(name, self._column(*kind[:2]), up) for name, kind, up in events_by_memory[0]],
            )
            runs = (
                [(name, int(row[at]) if up > 0 else None) for name, at, up in blocks if row[at] >= 1] for row in few
            )
            taken = np.array([program.measure_arena(run) for run in runs])
            rows = np.column_stack([estimates.measure_peaks(few), np.ones(_FILLED)]) / taken[:, None]
            line = np.linalg.lstsq(rows, np.ones(_FILLED))[0]
            estimates = replace(estimates, lines=line[None] + np.array([0, program.base_bytes]))
        self.estimates = _add_gaps(estimates, request.target, program.holes)

    def _column(
        self,
        size: int,
        tensor: int,
        *,
        places: Mapping[str, int] = _NOWHERE,
        least: Mapping[str, int] = _NOWHERE,
    ) -> int:
        """Return the column of a size of the coded program in the layer of a tensor; -1 for none.

        The size occurs for each of a kernel's `places`, and where the axes of `least` keep so much or more. A size as
        large as the tensor itself is a copy of it or its gradient, and has the positions of its kernel.
        """
        decl = self._decls[tensor] if tensor >= 0 else None
        if decl is not None and size == prod(self._shapes[tensor]) * DTYPE_BYTES["F32"]:
            places, count = self._kernel_of(tensor)
            size //= count
        number, powers = self._coding.decode(size, tensor)
        block = None if decl is None else decl.part
        return self._sizes.column(number, {**powers, **places}, block, least=least)

    def _count_held(self, network: Network, step: Step, program: TracedProgram) -> Counter[int]:
        """Return what the caller holds: weights, states, inputs and outputs, and the runtime's objects for each."""
        positions = {name: position for position, name in enumerate(network.tensors)}
        held: Counter[int] = Counter()
        for value in (*step.inputs, *step.outputs):
            position, factor = positions.get(value.tensor, -1), program.held_factors.get(value.role, 1)
            held[self._column(value_bytes([value]), position)] += factor  # type: ignore[assignment]
            held[self._column(1, position)] += program.value_bytes
        return held

    def _objects(self, program: TracedProgram, layers: Sequence[int]) -> Counter[int]:
        """Return what the runtime holds for its kernels, by layer, and for constants."""
        by_layer, objects = dict[int, list[KernelCall]](), Counter[int]()
        for call, layer in zip(program.calls, layers, strict=True):
            by_layer.setdefault(layer, []).append(call)
            places, count = self._kernel_of(layer)
            for size, columns in call.constants:
                if columns == count > 1:
                    for first in range(0, count, STRIPE_COLUMNS):
                        least = _least_sides(places, first + 1)
                        objects[self._column(size // -(-count // STRIPE_COLUMNS), layer, least=least)] += 1
                elif size % count or program.unrolls:
                    objects[self._column(size, layer)] += 1
                else:
                    objects[self._column(size // count, layer, places=places)] += 1
        for layer, calls in by_layer.items():
            is_wide = self._is_wide(layer)
            if program.unrolls and not is_wide and self._kernel_of(layer)[1] > 1:
                objects.update(self._unrolled_objects(program, layer, calls))
                continue
            places, count = self._kernel_of(layer) if program.unrolls else (_NOWHERE, 1)
            object_bytes = sum(call.object_bytes for call in calls)
            ends = [0, *(min(end, object_bytes) for end in program.narrow_bytes if is_wide), object_bytes]
            wide = (self._cut_axes(layer, dims) for dims in (slice(0), _INPUTS, slice(2)))
            leasts = [dict.fromkeys(*each) for each in zip(wide, (0, *program.narrow_channels), strict=True)]
            for begin, end, least in zip(ends, ends[1:], leasts, strict=False):
                single = 0 if begin else min(program.single_bytes, end)
                each = (end - begin - single) // max(count - 1, 1)
                objects[self._column(1, layer, least=least)] += end - begin - each * count
                objects[self._column(1, layer, places=places, least=least)] += each
        return objects

    def _unrolled_objects(self, program: TracedProgram, layer: int, calls: Sequence[KernelCall]) -> Counter[int]:
        """Return what is held for a convolution: calls that occur as often as its kernel has positions, and others.

        If the numbers under its kernel are few, its taps are laid side by side, and only the gradient of its input has
        calls for each position. The network's own input, which no submodel cuts, has no gradient.
        """
        (places, count), objects = self._kernel_of(layer), Counter[int]()
        alike = Counter((call.object_bytes, *call.outputs.values()) for call in calls)
        each = sum(object_bytes * round(times / count) for (object_bytes, *_), times in alike.items())
        each += sum(call.object_bytes // count for call in calls if len(call.inputs) == count)  # one joins the results
        objects[self._column(1, layer)] = sum(call.object_bytes for call in calls) - count * each
        fewest, cut, depth = program.narrow_channels[0], self._cut_axes(layer, _INPUTS), self._decls[layer].shape[1]
        joined = int(each * (program.joined if cut else 1)) if depth > 1 else 0
        objects[self._column(1, layer, places=places)] += each - joined
        objects[self._column(1, layer)] += joined
        channels, sides = dict.fromkeys(cut, fewest), _least_sides(places, 10)
        either = ((channels, 1), (sides, 1), ({**channels, **sides}, -1))  # channels enough, or positions
        for least, sign in either if cut else (({} if depth >= fewest else sides, 1),):
            objects[self._column(1, layer, places=places, least=least)] += sign * joined
            objects[self._column(1, layer, least=least)] -= sign * joined
        return objects

    def _add_columns(self, program: TracedProgram, layers: Sequence[int]) -> tuple[TracedProgram, list[int]]:
        """Add what 3x3 convolutions with few inputs have instead of parts of these: those of all taps, side by side.

        Their output and the gradient of their weights have one each (`lowerings.taps`).
        """
        calls, added, computed = list[KernelCall](), list[int](), set[str]()
        inputs, joined = dict[int, str](), dict[str, str]()  # by layer, and by part of its input
        for call, layer in zip(program.calls, layers, strict=True):
            own, given = {joined[name] for name in call.inputs if name in joined}, call.inputs[0] if call.pads else ""
            cut = self._is_wide(layer) and self._cut_axes(layer, _INPUTS)
            if cut and given in computed and inputs.setdefault(layer, given) == given:
                count = self._batch_size * self._decls[layer].positions * prod(self._shapes[layer][1:])
                own, size = {f"taps {len(calls)}"}, count * DTYPE_BYTES["F32"]
                outputs = dict.fromkeys(own, size)
                calls.append(KernelCall(inputs=(), outputs=outputs, after_bytes=(size,), part=call.part, narrow=True))
                added.append(layer)
            cuts = call.passes_on and bool(own)
            joined.update(dict.fromkeys(call.outputs, min(own)) if cuts else {})
            calls.append(replace(call, inputs=(*call.inputs, *sorted(own)), narrow=False if cuts else None))
            added.append(layer)
            computed.update(call.outputs)
        return replace(program, calls=tuple(calls)), added

    def _is_wide(self, layer: int) -> bool:
        """Whether a layer is a 3x3 convolution, but not channel by channel."""
        shape = self._decls[layer].shape if layer >= 0 else ()
        return shape[2:] == (3, 3) and shape[1] > 1

    def _cut_axes(self, layer: int, dims: slice) -> list[str]:
        """Return the axes of some dimensions of a layer's tensor that submodels cut."""
        return [axis for axis in self._coding.primes if layer >= 0 and axis in self._decls[layer].axes[dims]]

    def _kernel_of(self, layer: int) -> tuple[Mapping[str, int], int]:
        """Return the kernel axis of a layer with the number of its dimensions, and the number of kernel positions."""
        if layer < 0:
            return _NOWHERE, 1
        axes = self._coding.network.axes
        sides = Counter(
            axis
            for axis in self._decls[layer].axes
            if isinstance(axis, str) and axis in axes and axes[axis].kind == "kernel"
        )
        return sides, prod(axes[axis].size ** power for axis, power in sides.items())

    def _blocks_in_use(self, events: _BlockEvents, program: TracedProgram) -> list[tuple[int, Floats]]:
        """Return how many blocks are in use before each block is freed, by columns of sizes.

        If there are as many as an unrolled kernel has positions, or most of these, there is one for each position. A
        kernel of one position needs no border around its input, and no taps side by side.
        """
        kinds = {kind: at for at, kind in enumerate(dict.fromkeys(kind for _, kind, _ in events))}
        steps = np.zeros((len(events) + 1, len(kinds)))
        for at, (_, kind, step) in enumerate(events):
            steps[at, kinds[kind]] = step
        last = [at for at, (_, _, step) in enumerate(events) if step > 0 and steps[at + 1].min() < 0]
        columns = list[tuple[int, Floats]]()
        for (size, layer, pads, narrow), counts in zip(kinds, steps.cumsum(axis=0)[[*last, -1]].T, strict=True):
            places, count = self._kernel_of(layer) if program.unrolls else (_NOWHERE, 1)
            sides = _least_sides(places, 2) if places else _NOWHERE
            inputs = dict.fromkeys(self._cut_axes(layer, _INPUTS), program.narrow_channels[0])
            if narrow:
                columns.append((self._column(size, layer, least=sides), counts))
                columns.append((self._column(size, layer, least={**sides, **inputs}), -counts))
                continue
            least = {**(sides if pads else {}), **(inputs if narrow is False else {})}
            rest = np.where(2 * (counts % count) > count, 0, counts % count) if places else counts
            columns.append((self._column(size, layer, least=least), rest))
            if places:
                columns.append((self._column(size, layer, places=places, least=least), (counts - rest) / count))
        return columns


def _least_sides(places: Mapping[str, int], positions: int) -> Mapping[str, int]:
    """Return the least sizes of the axes of a kernel that has so many positions."""
    return dict.fromkeys(places, next(side for side in count(1) if side ** sum(places.values()) >= positions))


def _add_gaps(estimates: MemoryEstimates, target: str, holes: float) -> MemoryEstimates:
    """Add holes in planned buffers, and what a plan has for gaps in the heap, which is rounded up."""
    if target not in GAPS:
        return estimates
    factor = 1 + GAPS[target]
    first, *others = np.split(estimates.peaks, np.cumsum(estimates.parts)[:-1])
    return replace(
        estimates,
        held=factor * estimates.held,
        peaks=np.concatenate([first, *(factor * holes * moments for moments in others)]),
        lines=factor * estimates.lines + np.array([0, COUNTED_STEP_BYTES // 2]),
    )


def _tabulate(in_use: Sequence[tuple[int, Floats]], length: int) -> Floats:
    """Return moments with the blocks of each column: (moments, columns)."""
    table = np.zeros((len(in_use[0][1]), length))
    for column, counts in in_use:
        table[:, column] += counts
    return table


def block_events(program: TracedProgram, layers: Sequence[int]) -> list[_BlockEvents]:
    """Return the events of the blocks in memory, and of the blocks that outlive a part of the program."""
    blocks = blocks_of(program.calls, set(program.names.values()))
    kinds, parts, lasting = dict[str, _BlockKind](), dict[str, int](), set[str]()
    for call, layer, requests in zip(program.calls, layers, blocks, strict=True):
        taken = [(name, size) for name, size in requests if size is not None]
        kinds.update((name, (size, layer, call.pads, call.narrow)) for name, size in taken)
        parts.update((name, call.part) for name, _ in taken)
        lasting.update(name for name, size in requests if size is None and call.part > parts[name])
    events: list[_BlockEvents] = [[], []]
    for name, size in chain.from_iterable(blocks):
        events[name in lasting].append((name, kinds[name], -1 if size is None else 1))
    return events
