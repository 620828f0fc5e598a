"""The blocks of memory that a program's kernels take, and when they are freed."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["BlockRequest", "KernelCall", "blocks_of", "peak_bytes"]

BlockRequest = tuple[str, int | None]
"""A block's name with its size when it is taken, or with None when it is freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """A call of a kernel.

    Attributes:
        inputs: names of values.
        outputs: names of values, with their bytes.
        shares: whether its first output is its first input with another shape.
        overwrites: inputs that its first output may overwrite, if it is as large and nothing else reads them.
        before_bytes: blocks taken while it runs, before its outputs.
        after_bytes: blocks taken while it runs, after its outputs.
        constant_bytes: of constants that it is the last to read.
        object_bytes: of the runtime's objects.
        part: of the program; blocks that outlive their part are in a memory of their own.
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


def blocks_of(calls: Sequence[KernelCall], held: Collection[str]) -> list[list[BlockRequest]]:
    """Return the blocks that each call takes, and those that are freed after it.

    Args:
        calls: in order.
        held: values that the caller holds.
    """
    owners = _owners(calls, held)
    ends = {owner: at for at, call in enumerate(calls) for owner in _owners_of(call, owners)}
    requests = []
    for at, call in enumerate(calls):
        own: list[BlockRequest] = [(name, size) for name, size in call.outputs.items() if owners.get(name) == name]
        before: list[BlockRequest] = [(f"{at}/<{index}", size) for index, size in enumerate(call.before_bytes)]
        after: list[BlockRequest] = [(f"{at}/>{index}", size) for index, size in enumerate(call.after_bytes)]
        ended = sorted(owner for owner in _owners_of(call, owners) if ends[owner] == at)
        gone = [*(name for name, _ in (*before, *after)), *ended]
        requests.append([*before, *own, *after, *((name, None) for name in gone)])
    return requests


def peak_bytes(requests: Iterable[BlockRequest]) -> int:
    """Return the largest number of bytes that are taken at once."""
    sizes: dict[str, int] = {}
    alive = peak = 0
    for name, size in requests:
        if size is not None:
            sizes[name] = size
        alive += sizes[name] if size is not None else -sizes[name]
        peak = max(peak, alive)
    return peak


def _owners_of(call: KernelCall, owners: Mapping[str, str]) -> set[str]:
    return {owners[name] for name in (*call.inputs, *call.outputs) if name in owners}


def _owners(calls: Sequence[KernelCall], held: Collection[str]) -> Mapping[str, str]:
    """Return the value that owns the block of each value, without values that the caller holds."""
    uses = Counter(name for call in calls for name in (*call.inputs, *call.outputs))
    sizes = {name: size for call in calls for name, size in call.outputs.items()}
    owners: dict[str, str] = {}
    for call in calls:
        for index, (name, size) in enumerate(call.outputs.items()):
            if not size or name in held or (call.shares and index == 0 and call.inputs[0] not in owners):
                continue
            fitting = (
                name_of_input
                for name_of_input in call.overwrites
                if name_of_input in owners and sizes[name_of_input] == size
            )
            last = (name_of_input for name_of_input in fitting if uses[owners[name_of_input]] == 1)
            shared = call.inputs[0] if call.shares else next(last, None)
            owners[name] = name if shared is None or index else owners[shared]
            if owners[name] != name:
                uses[owners[name]] += uses[name]
        for name in (*call.inputs, *call.outputs):
            uses[owners.get(name, name)] -= 1
    return owners
