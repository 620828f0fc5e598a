"""Leaves out the calls of a run that its result does not depend on, such as those of auxiliary heads."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from subfleet.elastic.recording.calls import Call, LayerSpan
from subfleet.elastic.recording.following import list_tensors


def keep_live_calls(
    calls: Sequence[Call], spans: Sequence[LayerSpan], out: Tensor, state: Iterable[Tensor]
) -> tuple[tuple[Call, ...], tuple[LayerSpan, ...]]:
    """The calls that a result depends on or that change the module, and the spans of layers among them.

    Args:
        calls: in order.
        spans: of layers.
        out: the result.
        state: the module's parameters and buffers.
    """
    needed, storages = {id(out)}, {_storage(out), *map(_storage, state)}
    live = [False] * len(calls)
    for position in reversed(range(len(calls))):
        call = calls[position]
        gives = any(id(tensor) in needed for tensor in list_tensors(call.out))
        if not gives and not (_changes_argument(call) and _storage(call.args[0]) in storages):
            continue
        live[position] = True
        for tensor in list_tensors((call.args, call.kwargs)):
            needed.add(id(tensor))
            storages.add(_storage(tensor))
    before = [0, *accumulate(live)]
    return (
        tuple(call for call, is_live in zip(calls, live, strict=True) if is_live),
        tuple(replace(span, start=before[span.start], stop=before[span.stop]) for span in spans),
    )


def _changes_argument(call: Call) -> bool:
    """Whether a call changes its first argument."""
    name = call.name.rpartition(".")[2]
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    flagged = bool(call.kwargs.get("inplace")) or any(argument is True for argument in call.args)
    return bool(call.args) and isinstance(call.args[0], Tensor) and (in_place or flagged)


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - PyTorch's; unlike its address, without memory too
    return identity
