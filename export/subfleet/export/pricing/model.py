"""The price of a subnet: what its training program is planned to take of a device's memory, without writing it."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from subfleet.elastic.network import BUFFER_ROLES, Network
from subfleet.export.cache import ExportCache
from subfleet.export.jobs import write_atomically
from subfleet.export.memory.values import counted_bytes
from subfleet.export.pricing.library import Library, layers_of, requests_of
from subfleet.export.pricing.recording import Recording, Segment, segments_of
from subfleet.export.pricing.running import run_step
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
_UNSTEADY_BYTES = 24 * 2**10
"""So much more than was counted for a runtime's objects another time may be counted for a program with the same nodes.
Measured: 13 kB more or less between programs, 2 kB for one."""
_MARGIN = 0.004
_ALIKE = 1.5
"""Activations are of about one size, where they differ by no more than this factor."""
_WHOLE = frozenset({"class", "kernel"})
"""Axes that the smallest subnet of given blocks keeps as they are."""
_MAX_BYTES = 2**26

Shapes = Mapping[str, tuple[int, ...]]
_Floats = npt.NDArray[np.float64]


class PriceModel:
    """Prices of a network's subnets under fixed settings and for one target; for one thread.

    A price is put together from segments of programs that were recorded before. Where they do not tell it, up to three
    more are recorded, which takes seconds each: the largest and the smallest subnet of the same blocks, and the subnet
    itself.

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
        self._prices: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
        self._simulation = SIMULATIONS[plain.target]
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
        shapes = self._network.shapes(spec)
        key = tuple(shapes.items())
        if key not in self._prices:
            self._prices[key] = self._price(spec, shapes)
        return self._prices[key]

    def _exact(self, spec: SubnetSpec) -> int | None:
        """The plan of the exported program, where there is one."""
        if self._programs is None:
            return None
        path = self._programs.path(self._request_of(spec))
        try:
            return decode_program(path.read_bytes()).manifest.planned_peak_bytes if path.exists() else None
        except (OSError, ProtocolError):
            return None

    def _price(self, spec: SubnetSpec, shapes: Shapes) -> int:
        price = self._told(shapes)
        for candidate in (_largest(self._network, spec), _smallest(self._network, spec), spec):
            if price is not None:
                return price
            if not self._is_recorded(candidate):
                self._record(candidate)
                price = self._told(shapes)
        if price is None:
            price = self._own(shapes)
        return price

    def _told(self, shapes: Shapes) -> int | None:
        """The price by what is recorded."""
        segments = self._library.segments(shapes)
        if segments is None:
            return None
        requests = requests_of(segments)
        runtime = self._runtime_bytes(segments, len(shapes))
        if requests is None or runtime is None:
            return None
        passing = self._passing_bytes(self._simulation.peak_bytes(requests))
        return math.ceil((1 + _MARGIN) * (self._held_bytes(shapes) + passing + runtime))

    def _passing_bytes(self, told: int) -> float:
        """What is planned where so much is simulated, by what was planned for recordings of about that size."""
        factors = [factor for known, factor in self._factors if told <= _ALIKE * known <= _ALIKE**2 * told]
        return max([self._simulation.least_factor, *factors]) * told

    def _own(self, shapes: Shapes) -> int:
        """The price of a subnet that was recorded, but whose segments are not to be put together."""
        own = next(found for found in self._library.recordings if dict(found.shapes) == dict(shapes))
        logger.warning("a program's segments do not fit together; its subnet is priced by its own plan")
        return self._held_bytes(shapes) + own.passing_bytes + own.runtime_bytes + _counted(own.objects_bytes)

    def _held_bytes(self, shapes: Shapes) -> int:
        recordings = self._library.recordings
        buffers = (shape for name, shape in shapes.items() if self._network.tensors[name].role in BUFFER_ROLES)
        buffer_bytes = _bytes_of(buffers)
        parameter_bytes = _bytes_of(shapes.values()) - buffer_bytes
        copies = max(recording.parameter_copies for recording in recordings)
        fed_bytes = max(recording.fed_bytes for recording in recordings)
        return math.ceil(copies * parameter_bytes) + recordings[0].buffer_copies * buffer_bytes + fed_bytes

    def _runtime_bytes(self, segments: Sequence[Segment], tensor_count: int) -> int | None:
        """The program and the runtime's objects, by the weight of nodes and the number of tensors."""
        recordings = self._library.recordings
        wanted = np.array([1.0, sum(segment.weight for segment in segments), tensor_count])
        rows = [(1.0, sum(segment.weight for segment in one.segments), len(one.shapes)) for one in recordings]
        known = np.array(rows, dtype=np.float64)
        written = _told(known, np.array([one.runtime_bytes for one in recordings]), wanted)
        objects = _told(known, np.array([one.objects_bytes for one in recordings]), wanted)
        return None if written is None or objects is None else written + _counted(objects)

    def _is_recorded(self, spec: SubnetSpec) -> bool:
        shapes = tuple(self._network.shapes(spec).items())
        return any(recording.shapes == shapes for recording in self._library.recordings)

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
            shapes=tuple(shapes.items()),
            segments=segments_of(planned, list(layers_of(shapes).values())),
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


def _counted(objects_bytes: int) -> int:
    """What a plan counts where so much was found another time; 0 where a runtime's objects are not counted."""
    return counted_bytes(objects_bytes + _UNSTEADY_BYTES) if objects_bytes > 0 else 0


def _told(known: _Floats, found: npt.NDArray[np.int64], wanted: _Floats) -> int | None:
    """What was found where all features are the same, else what is not below a line through all that was found.

    Args:
        known: (recordings, features).
        found: (recordings,).
        wanted: (features,).
    """
    same = (known == wanted).all(axis=1)
    if same.any():
        return int(np.median(found[same]))
    if len({*known[:, 1]}) < 2:
        return None
    weights = np.linalg.lstsq(known, found, rcond=None)[0]
    return math.ceil(float(wanted @ weights) + max(float((found - known @ weights).max()), 0.0))


def _bytes_of(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(_FLOAT_BYTES * math.prod(shape) for shape in shapes)


def _largest(network: Network, spec: SubnetSpec) -> SubnetSpec:
    """Every index of the axes of width, in the same blocks."""
    return replace(spec, axes=_kept_whole(network, spec), name="")


def _smallest(network: Network, spec: SubnetSpec) -> SubnetSpec:
    """One group of every axis of width, in the same blocks."""
    narrow = [(name, Prefix(size=axis.granularity)) for name, axis in network.axes.items() if axis.kind not in _WHOLE]
    return replace(spec, axes=tuple(sorted([*narrow, *_kept_whole(network, spec)])), name="")


def _kept_whole(network: Network, spec: SubnetSpec) -> tuple[tuple[str, IndexSet], ...]:
    return tuple((name, kept) for name, kept in spec.axes if network.axes[name].kind in _WHOLE)
