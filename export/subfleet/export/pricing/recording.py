"""One planned program, cut into segments that depend on a few neighbouring layers only.

A training step runs the layers forwards, then backwards, and may update their tensors at the end. Where a layer's own
part begins is told from the flow of data alone: a node on the way from the batch to the loss belongs to the last layer
whose tensors it depends on; one behind the loss to the last layer whose new tensors depend on it. All that happens
between two such places is one segment: the memory that it takes and gives back, in order. What a segment does follows
from the sizes of its own and the neighbouring layers, so segments of different programs can be put together to the
program of another subnet.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from subfleet.export.memory.formulas import Formula
from subfleet.export.pricing.layers import Layer

__all__ = [
    "BACKWARD",
    "FORWARD",
    "START",
    "UPDATE",
    "Event",
    "Node",
    "PlannedStep",
    "Recording",
    "Segment",
    "segments_of",
]

START, FORWARD, BACKWARD, UPDATE = 0, 1, 2, 3
"""Phases of a step: before the first layer; the layers forwards; backwards; and forwards again, once nothing that is
left to do serves more than one layer."""

_NONE = 2**31
_NEAR = 3
TAKE, TAKE_KEPT, GIVE, GIVE_KEPT, TAKE_TOLD = 0, 1, 2, 3, 4

Event = tuple[int, ...]
"""(TAKE, place), (TAKE_TOLD, place, kind of formula), (TAKE_KEPT, place), (GIVE, place), (GIVE_KEPT, phase, layers
away, 0, place) with layers counted from here, or (GIVE_KEPT, phase, layers away, 1, place) from the network's end.

A block that is kept beyond its segment is counted apart from those that are not, so that its place does not change
with what a segment takes for itself.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One kernel that runs.

    Attributes:
        inputs: names of values.
        outputs: names of values.
        requests: blocks that are taken, with their size, and given back (-1), in order, by name.
        weight: its share of the runtime's objects, in a unit of the target's: 1, or bytes where kinds of nodes differ.
        formulas: of the blocks for the node alone whose size is no product of axes, by name.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    requests: tuple[tuple[str, int], ...]
    weight: int = 1
    formulas: Mapping[str, Formula] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A program as it runs.

    Attributes:
        nodes: in order.
        held: the subnet's tensor that an input belongs to, by the input's name.
        given: the trained tensor that a result belongs to, by the result's name.
        batch: name of the input with the samples.
        loss: name of the result with the loss.
        objects_bytes: counted for the runtime's objects, before the plan rounded it up; 0 where they were not counted.
    """

    nodes: tuple[Node, ...]
    held: Mapping[str, str]
    given: Mapping[str, str]
    batch: str
    loss: str
    objects_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What happens in one phase of one layer.

    Attributes:
        events: in order.
        sizes: bytes of the blocks that it takes, but for those below, in the order of their first mention.
        weight: of the nodes that belong to the layer in this phase.
        formulas: of the blocks whose size is no product of axes, in that order.
        layers: numbers of the layers that the nodes belong to that run in it.
    """

    events: tuple[Event, ...]
    sizes: tuple[int, ...]
    weight: int
    formulas: tuple[Formula, ...] = ()
    layers: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The segments of one subnet's program, and what was planned for it as a whole.

    Attributes:
        layers: of the subnet.
        tensor_count: of the subnet.
        segments: the start, then every layer forwards, backwards, and in the update.
        parameter_copies: how many times the parameters are held, with optimiser states and whatever grows with them.
        buffer_copies: the same of buffers.
        fed_bytes: of all other values that a step takes and gives.
        passing_bytes: planned for activations and workspace.
        runtime_bytes: planned for the program and the runtime, without what was counted.
        objects_bytes: counted for the runtime's objects, before the plan rounded it up.
    """

    layers: tuple[Layer, ...]
    tensor_count: int
    segments: tuple[Segment, ...]
    parameter_copies: float
    buffer_copies: int
    fed_bytes: int
    passing_bytes: int
    runtime_bytes: int
    objects_bytes: int


def place_of(phase: int, layer: int, layer_count: int) -> int:
    """Where a segment stands in a recording."""
    return (0, 1 + layer, 2 * layer_count - layer, 1 + 2 * layer_count + layer)[phase]


def phase_of(at: int, layer_count: int) -> tuple[int, int]:
    """The phase and the layer of a segment, by where it stands in a recording."""
    if at == 0:
        return START, 0
    round_, layer = divmod(at - 1, layer_count)
    return 1 + round_, layer_count - 1 - layer if 1 + round_ == BACKWARD else layer


class _Flow:
    """On what every node of a step depends, and what depends on it."""

    def __init__(self, step: PlannedStep, layer_of: Mapping[str, int]) -> None:
        self._last_held = {name: layer_of[tensor] for name, tensor in step.held.items()}
        self._of_batch = {step.batch}
        for node in step.nodes:
            last = max((self._last_held.get(name, -1) for name in node.inputs), default=-1)
            self._last_held.update(dict.fromkeys(node.outputs, last))
            if not self._of_batch.isdisjoint(node.inputs):
                self._of_batch.update(node.outputs)
        self._last_given = {name: layer_of[tensor] for name, tensor in step.given.items()}
        self._first_given = dict(self._last_given)
        self._to_loss = {step.loss}
        for node in reversed(step.nodes):
            first, last = self.given(node)
            for name in node.inputs:
                self._last_given[name] = max(self._last_given.get(name, -1), last)
                self._first_given[name] = min(self._first_given.get(name, _NONE), first)
            if self.is_forward(node):
                self._to_loss.update(node.inputs)

    def is_forward(self, node: Node) -> bool:
        """Whether the loss depends on it."""
        return not self._to_loss.isdisjoint(node.outputs)

    def is_of_batch(self, node: Node) -> bool:
        """Whether it depends on the samples."""
        return not self._of_batch.isdisjoint(node.outputs)

    def held(self, node: Node) -> int:
        """The last layer that it depends on; -1 for none."""
        return max((self._last_held[name] for name in node.outputs), default=-1)

    def given(self, node: Node) -> tuple[int, int]:
        """The first and the last layer whose new tensors depend on it; the last is -1 for none."""
        first = min((self._first_given.get(name, _NONE) for name in node.outputs), default=_NONE)
        return first, max((self._last_given.get(name, -1) for name in node.outputs), default=-1)


def segments_of(step: PlannedStep, layers: Sequence[Sequence[str]]) -> tuple[Segment, ...]:
    """Cut a step into segments.

    Args:
        step: as it runs.
        layers: names of the tensors of each layer, in network order.
    """
    layer_of = {tensor: place for place, tensors in enumerate(layers) for tensor in tensors}
    flow = _Flow(step, layer_of)
    requests: list[list[tuple[str, int]]] = [[] for _ in range(1 + 3 * len(layers))]
    weights = [0] * len(requests)
    owners: list[set[int]] = [set() for _ in requests]
    for node, (phase, layer) in zip(step.nodes, _places(step.nodes, flow), strict=True):
        at = place_of(phase, layer, len(layers))
        requests[at].extend(node.requests)
        forward = flow.is_forward(node)
        owner = max(flow.held(node) if forward else flow.given(node)[1], 0)
        owners[at].add(owner)
        weights[place_of(FORWARD if forward else BACKWARD, owner, len(layers))] += node.weight
    formulas = {name: formula for node in step.nodes for name, formula in node.formulas.items()}
    segments = _encoded(requests, weights, formulas)
    return tuple(replace(one, layers=tuple(sorted(own))) for one, own in zip(segments, owners, strict=True))


def _places(nodes: Sequence[Node], flow: _Flow) -> Iterator[tuple[int, int]]:
    """The phase and the layer in which each node runs."""
    shared = [at for at, node in enumerate(nodes) if flow.is_of_batch(node) and _serves_several(flow.given(node))]
    phase, layer = START, 0
    for at, node in enumerate(nodes):
        forward, given = flow.is_forward(node), flow.given(node)[1]
        if flow.is_of_batch(node) and forward and phase in {START, FORWARD}:
            phase, layer = FORWARD, max(layer, flow.held(node))
        elif flow.is_of_batch(node) and not forward and given >= 0:
            if phase == UPDATE or (shared and at > shared[-1]):
                phase, layer = UPDATE, max(layer, given) if phase == UPDATE else given
            else:
                phase, layer = BACKWARD, min(layer, given) if phase == BACKWARD else given
        yield phase, layer


def _serves_several(given: tuple[int, int]) -> bool:
    first, last = given
    return last > first


def _encoded(
    requests: Sequence[Sequence[tuple[str, int]]], weights: Sequence[int], formulas: Mapping[str, Formula]
) -> tuple[Segment, ...]:
    layer_count = len(requests) // 3
    ends = {name: at for at, some in enumerate(requests) for name, size in some if size < 0}
    kept: dict[str, tuple[int, int]] = {}
    segments = []
    for at, some in enumerate(requests):
        own: dict[str, int] = {}
        kept_count = 0
        events: list[Event] = []
        for name, size in some:
            if size >= 0 and ends.get(name) == at:
                own[name] = len(own)
                formula = formulas.get(name)
                events.append((TAKE_TOLD, own[name], formula.kind) if formula else (TAKE, own[name]))
            elif size >= 0:
                kept[name] = at, kept_count
                events.append((TAKE_KEPT, kept_count))
                kept_count += 1
            elif name in own:
                events.append((GIVE, own[name]))
            else:
                events.append((GIVE_KEPT, *_reference(at, kept[name][0], layer_count), kept[name][1]))
        taken = [(name, size) for name, size in some if size >= 0]
        segment = Segment(
            events=tuple(events),
            sizes=tuple(size for name, size in taken if name not in formulas),
            weight=weights[at],
            formulas=tuple(formulas[name] for name, _ in taken if name in formulas),
        )
        segments.append(segment)
    return tuple(segments)


def _reference(at: int, taken_at: int, layer_count: int) -> tuple[int, int, int]:
    """An earlier segment as seen from another one: its phase, and its layer from here, or from the network's end."""
    phase, layer = phase_of(taken_at, layer_count)
    away = layer - phase_of(at, layer_count)[1]
    if phase == START:
        return phase, 0, 0
    from_end = layer_count - 1 - layer
    return (phase, from_end, 1) if from_end <= 1 and away > _NEAR else (phase, away, 0)


def resolved(at: int, event: Event, layer_count: int) -> tuple[int, int]:
    """The segment in which a kept block was taken that another segment gives back, and its place there."""
    _, phase, distance, from_end, place = event
    layer = layer_count - 1 - distance if from_end else phase_of(at, layer_count)[1] + distance
    return place_of(phase, 0 if phase == START else layer, layer_count), place
