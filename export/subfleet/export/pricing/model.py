"""The price of a subnet: what its training program is planned to take of a device's memory, without writing it."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.export.cache import ExportCache
from subfleet.export.jobs import write_atomically
from subfleet.export.memory.values import counted_bytes
from subfleet.export.pricing.layers import Layer, by_layer, layers_of
from subfleet.export.pricing.library import Library, requests_of
from subfleet.export.pricing.recording import Recording, segments_of
from subfleet.export.pricing.running import run_step
from subfleet.export.pricing.runtime_sizes import RuntimeSizes, again_bytes
from subfleet.export.pricing.simulating import SIMULATIONS
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import TrainRequest
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.programs import decode_program
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.protocol.subnet import IndexSet, Prefix, SubnetSpec

__all__ = ["PriceModel"]

logger = logging.getLogger(__name__)

_FLOAT_BYTES = 4
_MARGIN = 0.004
_OPEN = 0.04
"""Such a part of a price may be open: the step in which plans count a runtime's objects, where it is not known."""
_ALIKE = 1.5
"""Activations are of about one size, where they differ by no more than this factor."""
_WHOLE = frozenset({"class", "kernel"})
"""Axes that stay as they are in the largest and the smallest subnet like another."""
_MAX_BYTES = 2**26


class PriceModel:
    """Prices of a network's subnets under fixed settings and for one target; for one thread.

    A price is put together from segments of programs that were recorded before. Where they do not tell it, up to three
    more are recorded, which takes seconds each: the largest and the smallest subnet of the same blocks and kinds of
    layers, and the subnet itself.

    Args:
        network: the declaration.
        request_of: what would be asked of the exporter for a subnet; nothing but its `spec` may vary.
        folder: where recordings are kept between runs; None keeps them here alone.
        programs: of a subnet whose program is there, the program's own plan is the price.
    """

    def __init__(
        self,
        network: Network,
        request_of: Callable[[SubnetSpec], TrainRequest],
        *,
        folder: Path | None = None,
        programs: ExportCache | None = None,
    ) -> None:
        self._network = network
        self._request_of = request_of
        plain = replace(request_of(network.full_spec()), spec=SubnetSpec())
        self._target = plain.target
        self._folder = None if folder is None else folder / plain.program_id
        self._programs = programs
        self._library = Library()
        self._prices: dict[tuple[Layer, ...], int] = {}
        self._simulation = SIMULATIONS[plain.target]
        self._sizes = RuntimeSizes(counts_nodes=self._simulation.counts_nodes)
        self._factors: list[tuple[int, float]] = []
        self._load()

    @property
    def recorded_count(self) -> int:
        """How many programs were recorded so far."""
        return len(self._library.recordings)

    @property
    def library(self) -> Library:
        """What is known of the network's segments."""
        return self._library

    def memory_bytes(self, spec: SubnetSpec) -> int:
        """The planned peak, rarely below that of the exported program and at most some percent above.

        Raises:
            ConfigError: the spec is no subnet of the network.
            ExportError: its program had to be written, and cannot be.
        """
        exact = self._exact(spec)
        if exact is not None:
            return exact
        layers = layers_of(self._network, spec)
        if layers not in self._prices:
            self._prices[layers] = self._price(spec, layers)
        return self._prices[layers]

    def _exact(self, spec: SubnetSpec) -> int | None:
        """The plan of the exported program, where there is one."""
        if self._programs is None:
            return None
        path = self._programs.path(self._request_of(spec))
        try:
            return decode_program(path.read_bytes()).manifest.planned_peak_bytes if path.exists() else None
        except (OSError, ProtocolError):
            return None

    def _price(self, spec: SubnetSpec, layers: tuple[Layer, ...]) -> int:
        price = self._told(spec, layers)
        for candidate in (_largest(self._network, spec), _smallest(self._network, spec), spec):
            if price is not None:
                return price
            if not self._is_recorded(candidate):
                self._record(candidate)
                price = self._told(spec, layers)
        if price is None:
            price = self._own(spec, layers)
        return price

    def _told(self, spec: SubnetSpec, layers: tuple[Layer, ...]) -> int | None:
        """The price by what is recorded."""
        segments = self._library.segments(layers)
        if segments is None:
            return None
        shapes = self._network.shapes(spec)
        requests = requests_of(segments)
        weight = sum(segment.weight for segment in segments)
        written = self._sizes.written_bytes(layers, weight, len(shapes))
        objects = self._sizes.objects_bytes(layers, weight, len(shapes))
        if requests is None or written is None or objects is None:
            return None
        most_bytes = counted_bytes(objects.most)
        passing = self._passing_bytes(self._simulation.peak_bytes(requests))
        price = math.ceil((1 + _MARGIN) * (self._held_bytes(shapes) + passing + written + most_bytes))
        return price if most_bytes - counted_bytes(objects.least) <= _OPEN * price else None

    def _passing_bytes(self, told: int) -> float:
        """What is planned where so much is simulated, by what was planned for recordings of about that size."""
        factors = [factor for known, factor in self._factors if told <= _ALIKE * known <= _ALIKE**2 * told]
        return max([self._simulation.least_factor, *factors]) * told

    def _own(self, spec: SubnetSpec, layers: tuple[Layer, ...]) -> int:
        """The price of a subnet that was recorded, but whose segments are not to be put together."""
        own = next(found for found in self._library.recordings if found.layers == layers)
        logger.warning("a program's segments do not fit together; its subnet is priced by its own plan")
        held_bytes = self._held_bytes(self._network.shapes(spec))
        return held_bytes + own.passing_bytes + own.runtime_bytes + counted_bytes(again_bytes(own.objects_bytes))

    def _held_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        recordings = self._library.recordings
        buffers = (shape for name, shape in shapes.items() if self._network.tensors[name].role in BUFFER_ROLES)
        buffer_bytes = _bytes_of(buffers)
        parameter_bytes = _bytes_of(shapes.values()) - buffer_bytes
        copies = max(recording.parameter_copies for recording in recordings)
        fed_bytes = max(recording.fed_bytes for recording in recordings)
        return math.ceil(copies * parameter_bytes) + recordings[0].buffer_copies * buffer_bytes + fed_bytes

    def _is_recorded(self, spec: SubnetSpec) -> bool:
        layers = layers_of(self._network, spec)
        return any(recording.layers == layers for recording in self._library.recordings)

    def _record(self, spec: SubnetSpec) -> None:
        """Write a subnet's program once and learn from it."""
        request = self._request_of(spec)
        # The target "torch" plans as if activations were kept.
        kept = replace(request, recompute=False) if self._target == "torch" else request
        step = training_step_of(kept)
        planned, plan = run_step(step, self._target)
        shapes = self._network.shapes(spec)
        buffers = [name for name in shapes if self._network.tensors[name].role in BUFFER_ROLES]
        buffer_copies = sum(value.tensor == buffers[0] for value in (*step.inputs, *step.outputs)) if buffers else 0
        buffer_bytes = _bytes_of(shapes[name] for name in buffers)
        held_bytes = plan.weights_bytes + plan.optimiser_bytes - buffer_copies * buffer_bytes
        recording = Recording(
            layers=layers_of(self._network, spec),
            tensor_count=len(shapes),
            segments=segments_of(planned, list(by_layer(shapes).values())),
            parameter_copies=held_bytes / (_bytes_of(shapes.values()) - buffer_bytes),
            buffer_copies=buffer_copies,
            fed_bytes=plan.fed_bytes,
            passing_bytes=plan.activation_bytes + plan.workspace_bytes,
            runtime_bytes=plan.runtime_bytes - counted_bytes(planned.objects_bytes),
            objects_bytes=planned.objects_bytes,
        )
        self._learn(recording)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / f"{request.program_id}.json", canonical_json(recording))

    def _learn(self, recording: Recording) -> None:
        self._library.add(recording)
        self._sizes.add(recording)
        self._prices.clear()
        requests = requests_of(recording.segments)
        if requests:
            told = max(self._simulation.peak_bytes(requests), 1)
            self._factors.append((told, recording.passing_bytes / told))

    def _load(self) -> None:
        for path in sorted(self._folder.glob("*.json")) if self._folder else ():
            try:
                plain = parse_json(path.read_bytes(), max_bytes=_MAX_BYTES)
                self._learn(from_plain(Recording, plain, where=str(path)))
            except (OSError, ProtocolError) as error:
                logger.warning("the recording %s is left out: %s", path, error)


def _bytes_of(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(_FLOAT_BYTES * math.prod(shape) for shape in shapes)


def _largest(network: Network, spec: SubnetSpec) -> SubnetSpec:
    """The same blocks and kinds of layers, and the most of every axis."""
    return _resized(network, spec, {})


def _smallest(network: Network, spec: SubnetSpec) -> SubnetSpec:
    """The same blocks and kinds of layers, and the least of every axis: two groups, where there is not just one."""
    return _resized(network, spec, {name: 2 * axis.granularity for name, axis in network.axes.items()})


def _resized(network: Network, spec: SubnetSpec, sizes: Mapping[str, int]) -> SubnetSpec:
    """Args: sizes: of the axes that are not kept whole; those of one group stay."""
    kept = dict(spec.axes)
    axes: list[tuple[str, IndexSet]] = []
    for name, size in sorted(network.sizes(spec).items()):
        axis = network.axes[name]
        if axis.kind in _WHOLE:
            axes.extend((name, kept[name]) for _ in range(name in kept))
        elif size == axis.granularity:
            axes.append((name, Prefix(size=size)))
        elif sizes.get(name, axis.size) < axis.size:
            axes.append((name, Prefix(size=sizes[name])))
    return replace(spec, axes=tuple(axes), name="")
