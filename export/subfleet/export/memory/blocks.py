"""Which blocks of memory a program's kernels take, and when they are given back."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Call", "blocks_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kernel.

    Attributes:
        inputs: names of values; outputs: and of what it gives, with their bytes.
        shares: its output is its first input under another shape.
        overwrites: its output may lie where an input as large lay that nothing else reads.
        scratch_bytes: taken while it runs; constant_bytes: read and never given back; object_bytes: of the runtime.
        part: of the program; what outlives its part lies in a memory of its own.
    """

    inputs: tuple[str, ...]
    outputs: Mapping[str, int]
    shares: bool = False
    overwrites: bool = False
    scratch_bytes: int = 0
    constant_bytes: int = 0
    object_bytes: int = 0
    part: int = 0


def blocks_of(calls: Sequence[Call], held: Collection[str]) -> tuple[list[tuple[dict[str, int], list[str]]], set[str]]:
    """For each call the blocks that are taken, and those given back after it; and the blocks that outlive their part.

    Args:
        calls: in order.
        held: values that the caller holds.
    """
    readers = Counter(name for call in calls for name in call.inputs)
    sizes = {name: size for call in calls for name, size in call.outputs.items()}
    owners: dict[str, str] = {}
    for call in calls:
        for name, size in call.outputs.items():
            fitting = (one for one in call.inputs if one in owners and readers[one] == 1 and sizes[one] == size)
            over = next(fitting, name) if call.overwrites else name
            owner = owners.get(call.inputs[0]) if call.shares else owners.get(over, name)
            if size and owner is not None and name not in held:
                owners[name] = owner
    begins = {name: at for at, call in enumerate(calls) for name in call.outputs if owners.get(name) == name}
    ends = {
        owners[name]: at for at, call in enumerate(calls) for name in (*call.inputs, *call.outputs) if name in owners
    }
    found = []
    for at, call in enumerate(calls):
        taken = {name: size for name, size in call.outputs.items() if owners.get(name) == name}
        scratch = {f"{at}/": call.scratch_bytes} if call.scratch_bytes else {}
        constant = {f"{at}/constant": call.constant_bytes} if call.constant_bytes else {}
        used = {owners[name] for name in (*call.inputs, *call.outputs) if name in owners}
        found.append(({**taken, **scratch, **constant}, [*scratch, *sorted(one for one in used if ends[one] == at)]))
    return found, {name for name, at in ends.items() if calls[at].part > calls[begins[name]].part}
