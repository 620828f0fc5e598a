"""Finds residual blocks: layers that add something to their input, which a submodel can leave out."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn

from subfleet.elastic.recording.calls import Call, LayerSpan
from subfleet.elastic.recording.dimensions import resolve
from subfleet.elastic.recording.following import DimensionFollower
from subfleet.elastic.recording.functions import SUMS
from subfleet.elastic.recording.markers import Markers
from subfleet.elastic.recording.run import ModuleRun
from subfleet.protocol.errors import ConfigError

_PASSING = frozenset(
    f"torch.{name}"
    for name in (
        "Tensor.contiguous", "nn.functional.batch_norm", "nn.functional.dropout", "nn.functional.group_norm",
        "nn.functional.layer_norm", "nn.functional.relu", "nn.functional.relu6", "nn.functional.relu_",
        "nn.functional.rms_norm", "relu", "relu_",
    )
)  # fmt: skip
"""Functions that pass an input on that they have passed on before, or that may follow a sum."""


def list_spans(
    module: nn.Module, run: ModuleRun, follower: DimensionFollower, markers: Markers
) -> tuple[LayerSpan, ...]:
    """The calls of each block, in order. The markers name the blocks; without markers, residual blocks are found.

    Raises:
        ConfigError: a block that the markers name is no layer, runs several times, or has several inputs.
    """
    if markers.sections is None:
        return _find_blocks(module, run, follower)
    names, spans = [*chain.from_iterable(markers.sections)], list[LayerSpan]()
    if unknown := sorted(markers.kept - set(names)):
        raise ConfigError(f"the markers keep the block {unknown[0]!r}, but their sections have the blocks {names}")
    for name in names:
        own = [span for span in run.spans if span.layer == name]
        if len(own) != 1 or len(own[0].inputs) != 1 or not isinstance(own[0].out, Tensor):
            raise ConfigError(
                f"the markers say that layer {name!r} is a block, but it is none: a block is a layer that runs once, "
                "with one input and one output"
            )
        spans += own
    return tuple(spans)


def _find_blocks(module: nn.Module, run: ModuleRun, follower: DimensionFollower) -> tuple[LayerSpan, ...]:
    """The innermost layers with parameters whose result is their input plus something, in order.

    A layer that runs several times, as in ALBERT, is no block: its calls lie in several places.
    """
    counts = Counter(span.layer for span in run.spans)
    once = (span for span in run.spans if counts[span.layer] == 1)
    spans = [span for span in once if _is_residual(module, run, follower, span)]
    innermost = [span for span in spans if not any(_is_inside(other, span) for other in spans)]
    return tuple(sorted(innermost, key=lambda span: span.start))


def _is_inside(inner: LayerSpan, outer: LayerSpan) -> bool:
    same = (inner.start, inner.stop) == (outer.start, outer.stop)
    within = outer.start <= inner.start and inner.stop <= outer.stop
    return within and (not same or inner.layer.startswith(f"{outer.layer}."))


def _is_residual(module: nn.Module, run: ModuleRun, follower: DimensionFollower, span: LayerSpan) -> bool:
    if len(span.inputs) != 1 or not isinstance(span.out, Tensor) or span.layer == "":
        return False
    source, result = span.inputs[0], span.out
    if source.shape != result.shape or not any(True for _ in module.get_submodule(span.layer).parameters()):
        return False
    same = all(
        resolve(before) == resolve(after)
        or all(leaf.reason or leaf.is_batch for leaf in (*resolve(before), *resolve(after)))
        for before, after in zip(follower.dims_of(source), follower.dims_of(result), strict=True)
    )
    return same and _passes_on(source, result, run.calls[span.start : span.stop])


def _passes_on(source: Tensor, result: Tensor, calls: tuple[Call, ...]) -> bool:
    """Whether a result is a source plus something, perhaps through an activation or a norm."""
    sums: list[Tensor] = []  # that the source is part of
    for call in calls:
        given = list(_list_given(call))
        part_of = [tensor for tensor in given if any(tensor is own for own in sums)]
        if call.name in SUMS and len(given) == 2:
            if part_of or any(tensor is source for tensor in given):
                sums.append(call.out)
        elif call.name in _PASSING and part_of:
            sums.append(call.out)
    return any(own is result for own in sums)


def _list_given(call: Call) -> Iterator[Tensor]:
    return (item for item in call.args if isinstance(item, Tensor))
