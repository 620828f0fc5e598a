"""Which blocks of memory a program's kernels take, and when they are given back."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Call", "Request", "blocks_of", "peak_bytes"]

Request = tuple[str, int | None]
"""A block's name with its bytes where it is taken, and with None where it is given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kernel.

    Attributes:
        inputs: names of values; outputs: and of what it gives, with their bytes.
        shares: its first output is its first input under another shape.
        overwrites: inputs in whose place its first output may lie, if it is as large and nothing else reads them.
        before_bytes: taken while it runs, before its outputs; after_bytes: and after them.
        constant_bytes: of what it is the last to read; object_bytes: of the runtime.
        part: of the program; what outlives its part lies in a memory of its own.
    """

    inputs: tuple[str, ...]
    outputs: Mapping[str, int]
    shares: bool = False
    overwrites: tuple[str, ...] = ()
    before_bytes: tuple[int, ...] = ()
    after_bytes: tuple[int, ...] = ()
    constant_bytes: int = 0
    object_bytes: int = 0
    part: int = 0


def blocks_of(calls: Sequence[Call], held: Collection[str]) -> list[list[Request]]:
    """What each call takes, and what is given back after it.

    Args:
        calls: in order.
        held: values that the caller holds.
    """
    owners = _owners(calls, held)
    ends = {owner: at for at, call in enumerate(calls) for owner in _touched(call, owners)}
    found = []
    for at, call in enumerate(calls):
        own: list[Request] = [(name, size) for name, size in call.outputs.items() if owners.get(name) == name]
        before: list[Request] = [(f"{at}/<{place}", size) for place, size in enumerate(call.before_bytes)]
        after: list[Request] = [(f"{at}/>{place}", size) for place, size in enumerate(call.after_bytes)]
        over = sorted(owner for owner in _touched(call, owners) if ends[owner] == at)
        gone = [*(name for name, _ in (*before, *after)), *over]
        found.append([*before, *own, *after, *((name, None) for name in gone)])
    return found


def peak_bytes(requests: Iterable[Request]) -> int:
    """The most bytes that are taken at once."""
    sizes: dict[str, int] = {}
    alive = peak = 0
    for name, size in requests:
        if size is not None:
            sizes[name] = size
        alive += sizes[name] if size is not None else -sizes[name]
        peak = max(peak, alive)
    return peak


def _touched(call: Call, owners: Mapping[str, str]) -> set[str]:
    return {owners[name] for name in (*call.inputs, *call.outputs) if name in owners}


def _owners(calls: Sequence[Call], held: Collection[str]) -> Mapping[str, str]:
    """The value whose block each value lies in, of those that the caller does not hold."""
    uses = Counter(name for call in calls for name in (*call.inputs, *call.outputs))
    sizes = {name: size for call in calls for name, size in call.outputs.items()}
    owners: dict[str, str] = {}
    for call in calls:
        for place, (name, size) in enumerate(call.outputs.items()):
            if not size or name in held or (call.shares and place == 0 and call.inputs[0] not in owners):
                continue
            alike = (one for one in call.overwrites if one in owners and sizes[one] == size)
            last = (one for one in alike if uses[owners[one]] == 1)
            shared = call.inputs[0] if call.shares else next(last, None)
            owners[name] = name if shared is None or place else owners[shared]
            if owners[name] != name:
                uses[owners[name]] += uses[name]
        for name in (*call.inputs, *call.outputs):
            uses[owners.get(name, name)] -= 1
    return owners
