"""What subnets' training programs would be planned to take, told of thousands at once from one look at the network."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

import numpy as np

from subfleet.elastic.memory_prices import MemoryPrices
from subfleet.elastic.network import Network
from subfleet.elastic.sizes import Floats, SizeTable
from subfleet.export.memory.blocks import blocks_of
from subfleet.export.memory.values import value_bytes
from subfleet.export.pricing.coding import axes_of, coded
from subfleet.export.pricing.graphs import executorch_program, torch_program
from subfleet.export.pricing.kernels import Program, layers_of
from subfleet.export.pricing.onnx import onnx_program
from subfleet.export.quiet import collecting_later
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import TrainRequest
from subfleet.export.steps.values import Step
from subfleet.protocol.errors import ExportError

__all__ = ["PriceModel"]

_PROGRAMS: Mapping[str, Callable[[Step], Program]] = MappingProxyType(
    {"onnx": onnx_program, "executorch": executorch_program, "torch": torch_program}
)
_SAMPLES, _FILLED = 512, 12
"""Random subnets that decide which moments of a step may be its peak, and for how many of them the allocator is run."""
_Happening = list[tuple[str, int, int]]
"""Blocks in order: the name, the column of its size, and 1 where it is taken or -1 where it is given back."""


class PriceModel:
    """Makes the prices of a network's subnets under fixed settings, for one target, in seconds.

    The whole network's step is traced once, with sizes that tell their axes (`coding`). What a runtime makes of it is
    the same for its subnets but for the sizes, and for blocks that are left out. So memory is a sum of products of axes
    at each moment, and the peak is that of the largest moment. `prices` are these sums.

    Args:
        network: the declaration.
        request: what would be asked of the exporter; its subnet does not matter.

    Raises:
        ExportError: the target is unknown, or cannot train the network.
    """

    @collecting_later()
    def __init__(self, network: Network, request: TrainRequest) -> None:
        if request.target not in _PROGRAMS:
            raise ExportError(f"target is {request.target!r}, but must be one of {sorted(_PROGRAMS)}")
        coding = coded(network, request.batch_size)
        # The target "torch" plans as if activations were kept.
        recompute = request.recompute and request.target != "torch"
        step = training_step_of(replace(request, recompute=recompute), coding.module())
        program = _PROGRAMS[request.target](step)
        self._coding, self._decls, self._sizes = coding, list(network.tensors.values()), SizeTable(network)
        layers = layers_of(program, step, list(network.tensors))
        linear = self._held(network, step, program) + self._objects(program, layers)
        happenings, samples = self._happenings(program, layers), self._sizes.random(_SAMPLES)
        moments = [
            each[np.unique((samples @ each.T).argmax(axis=1))]
            for each in (_moments(one, len(self._sizes)) for one in happenings if one)
        ]
        prices = MemoryPrices(
            columns=self._sizes.columns(),
            held=np.float64(np.bincount([*linear], [*linear.values()], len(self._sizes))),
            peaks=np.concatenate([np.zeros((0, len(self._sizes))), *moments]),
            parts=tuple(len(one) for one in moments),
            factor=program.passing_factor,
            base_bytes=float(program.base_bytes),
        )
        self.prices = prices
        if program.filled is not None:
            few, order = samples[:_FILLED], happenings[0]
            runs = ([(name, int(row[at]) if up > 0 else None) for name, at, up in order if row[at] >= 1] for row in few)
            taken = np.array([program.filled(run) for run in runs])
            rows = np.column_stack([prices.passing(few), np.ones(_FILLED)]) / taken[:, None]
            factor, extra_bytes = np.linalg.lstsq(rows, np.ones(_FILLED))[0]
            base_bytes = prices.base_bytes + float(extra_bytes)
            self.prices = replace(prices, factor=float(factor), base_bytes=base_bytes)

    def _column(self, size: int, tensor: int, *, side: str | None = None, least: int = 0) -> int:
        """The column of a size of the coded program in the layer of a tensor, by its place; -1 for none.

        It occurs for each place of a kernel with the axis `side`, and in convolutions of `least` channels or more.
        """
        decl = self._decls[tensor] if tensor >= 0 else None
        number, powers = self._coding.decoded(size, tensor)
        cut = [axis for axis in self._coding.primes if least and decl is not None and axis in decl.axes[:2]]
        block = None if decl is None else decl.part
        return self._sizes.column(number, powers | ({side: 2} if side else {}), block, channels=cut, least=least)

    def _held(self, network: Network, step: Step, program: Program) -> Counter[int]:
        """What the caller holds: weights and states, what is fed and given; and the runtime for each of these."""
        places = {name: place for place, name in enumerate(network.tensors)}
        found: Counter[int] = Counter()
        for value in (*step.inputs, *step.outputs):
            place, factor = places.get(value.tensor, -1), program.held_factors.get(value.role, 1)
            found[self._column(value_bytes([value]), place)] += factor  # type: ignore[assignment]
            found[self._column(1, place)] += program.value_bytes
        return found

    def _objects(self, program: Program, layers: Sequence[int]) -> Counter[int]:
        """What the runtime holds for its kernels, layer by layer, and of constants."""
        of_layer, found = Counter[int](), Counter[int]()
        for call, layer in zip(program.calls, layers, strict=True):
            of_layer[layer] += call.object_bytes
            side, places = self._kernel_of(layer)
            if call.constant_bytes % places == 0 < call.constant_bytes and not program.unrolls:
                found[self._column(call.constant_bytes // places, layer, side=side)] += 1
            elif call.constant_bytes:
                found[self._column(call.constant_bytes, layer)] += 1
        for layer, object_bytes in of_layer.items():
            side, places = self._kernel_of(layer) if program.unrolls else (None, 1)
            shape = self._decls[layer].shape if layer >= 0 else ()
            crosses = len(shape) > 2 and shape[1] > 1  # not channel by channel
            wide_bytes = max(object_bytes - program.narrow_bytes, 0) if crosses else 0
            if wide_bytes:
                found[self._column(1, layer, side=side, least=program.narrow_channels)] += wide_bytes // places
            found[self._column(1, layer, side=side)] += (object_bytes - wide_bytes) // places
        return found

    def _kernel_of(self, layer: int) -> tuple[str | None, int]:
        """The axis of a layer's kernel, and how many places it has."""
        axes = self._coding.network.axes
        of_decl = axes_of(self._decls[layer]) if layer >= 0 else set()
        side = next((axis for axis in of_decl if axes[axis].kind == "kernel"), None)
        return side, 1 if side is None else axes[side].size ** 2

    def _happenings(self, program: Program, layers: Sequence[int]) -> list[_Happening]:
        """What happens to the blocks of the memory, and to those that outlive a part of the program."""
        blocks = blocks_of(program.calls, set(program.names.values()))
        columns, parts, lasting = dict[str, int](), dict[str, int](), set[str]()
        for call, layer, requests in zip(program.calls, layers, blocks, strict=True):
            taken = [(name, size) for name, size in requests if size is not None]
            columns.update((name, self._column(size, layer)) for name, size in taken)
            parts.update((name, call.part) for name, _ in taken)
            lasting.update(name for name, size in requests if size is None and call.part > parts[name])
        found: list[_Happening] = [[], []]
        for name, size in chain.from_iterable(blocks):
            found[name in lasting].append((name, columns[name], -1 if size is None else 1))
        return found


def _moments(happening: _Happening, length: int) -> Floats:
    """How many blocks of each size are in use, wherever what happens next is that one is given back."""
    steps = np.zeros((len(happening) + 1, length))
    for at, (_, column, step) in enumerate(happening):
        steps[at, column] = step
    last = [at for at, (_, _, step) in enumerate(happening) if step > 0 and steps[at + 1].min() < 0]
    in_use: Floats = steps.cumsum(axis=0)[[*last, -1]]
    return in_use
