"""Segments of recorded programs, put together to the programs of other subnets."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from subfleet.export.memory.liveness import GIVEN_BACK
from subfleet.export.pricing.fitting import Sizes, segment_at
from subfleet.export.pricing.layers import Layer
from subfleet.export.pricing.recording import (
    GIVE,
    GIVE_KEPT,
    START,
    TAKE_KEPT,
    TAKE_TOLD,
    Recording,
    Segment,
    phase_of,
    resolved,
)

__all__ = ["Library", "Request", "requests_of"]

_REACH = 2
"""A segment follows from so many layers on either side, from more where recordings show it, and from those whose nodes
run in it; the start from the first and the last layers, as the loss is among them."""

Request = tuple[int, int]
"""A block, and its size; or `GIVEN_BACK`."""
_Where = tuple[int, str]
"""A phase and a layer."""
_Key = tuple[int, tuple[str, ...], tuple[tuple[int, ...], ...]]


class Library:
    """What is known of segments."""

    def __init__(self) -> None:
        self._recordings: list[Recording] = []
        self._known: dict[_Key, dict[Sizes, Segment]] = {}
        self._told: dict[tuple[_Key, Sizes], Segment] = {}
        self._reach: dict[_Where, int] = {}
        self._owners: defaultdict[_Where, set[str]] = defaultdict(set)

    @property
    def recordings(self) -> Sequence[Recording]:
        """All of them, in the order in which they came."""
        return self._recordings

    def add(self, recording: Recording) -> None:
        """Learn from one more recording."""
        self._recordings.append(recording)
        self._told.clear()
        clashes = self._learn_again() if self._see_owners(recording) else self._learn(recording)
        while clashes:
            self._reach.update((where, self._reach.get(where, _REACH) + _REACH) for where in clashes)
            clashes = self._learn_again()

    def segments(self, layers: Sequence[Layer]) -> list[Segment] | None:
        """The segments of a subnet; None where one is not known."""
        found = []
        for key, sizes in self._places(layers):
            segment = self._told.get((key, sizes))
            if segment is None:
                segment = segment_at(self._known.get(key, {}), sizes)
                if segment is None:
                    return None
                self._told[key, sizes] = segment
            found.append(segment)
        return found

    def _see_owners(self, recording: Recording) -> bool:
        """Note whose nodes run in which segment; whether any is new."""
        before = sum(map(len, self._owners.values()))
        names = [layer.name for layer in recording.layers]
        for at, segment in enumerate(recording.segments):
            phase, layer = phase_of(at, len(names))
            if phase == START:  # its nodes are constants, of all layers
                continue
            self._owners[phase, names[layer]].update(names[owner] for owner in segment.layers)
        return sum(map(len, self._owners.values())) > before

    def _learn_again(self) -> set[_Where]:
        """Learn from all recordings, as segments are looked up by other layers now."""
        self._known.clear()
        return set().union(*(self._learn(known) for known in self._recordings))

    def _learn(self, recording: Recording) -> set[_Where]:
        """Add a recording's segments; the phases and layers whose segments do not follow from their neighbours."""
        layers = recording.layers
        clashes = set()
        for at, (key, sizes) in enumerate(self._places(layers)):
            known = self._known.setdefault(key, {})
            segment = recording.segments[at]
            phase, layer = phase_of(at, len(layers))
            where = phase, layers[layer].name
            if known.setdefault(sizes, segment) != segment and self._reach.get(where, _REACH) < len(layers):
                clashes.add(where)
        return clashes

    def _places(self, layers: Sequence[Layer]) -> Iterator[tuple[_Key, Sizes]]:
        """What each segment of a subnet is looked up by."""
        names = tuple(layer.name for layer in layers)
        for at in range(1 + 3 * len(layers)):
            phase, layer = phase_of(at, len(layers))
            where = phase, names[layer]
            reach, owners = self._reach.get(where, _REACH), self._owners.get(where, ())
            last = len(layers) - 1 - reach if phase == START else len(layers)
            at_hand = [
                one
                for place, one in enumerate(layers)
                if abs(place - layer) <= reach or place >= last or one.name in owners
            ]
            key = phase, (names[layer], *(one.name for one in at_hand)), tuple(one.kind for one in at_hand)
            yield key, tuple(size for one in at_hand for size in one.sizes)


def requests_of(segments: Sequence[Segment]) -> list[Request] | None:
    """What a program asks of its memory, in order; None where the segments do not fit together."""
    layer_count = len(segments) // 3
    kept: dict[tuple[int, int], int] = {}
    requests: list[Request] = []
    block = 0
    for at, segment in enumerate(segments):
        own: dict[int, int] = {}
        sizes, formulas = iter(segment.sizes), iter(segment.formulas)
        for event in segment.events:
            if event[0] == GIVE:
                requests.append((own.pop(event[1]), GIVEN_BACK))
            elif event[0] == GIVE_KEPT:
                given = kept.pop(resolved(at, event, layer_count), None)
                if given is None:
                    return None
                requests.append((given, GIVEN_BACK))
            else:
                if event[0] == TAKE_KEPT:
                    kept[at, event[1]] = block
                else:
                    own[event[1]] = block
                requests.append((block, next(formulas).size_bytes if event[0] == TAKE_TOLD else next(sizes)))
                block += 1
    return None if kept else requests
