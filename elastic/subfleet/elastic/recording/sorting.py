"""Sorts what a record lists, so that equal networks have equal records."""

from dataclasses import replace

from subfleet.elastic.recording.expressions import list_names
from subfleet.elastic.recording.inserting import Changes, list_contents, rewrite_call
from subfleet.elastic.recording.record import NetworkRecord, RecordedPlan


def sort_record(record: NetworkRecord) -> NetworkRecord:
    """The same network: tensors in the order of their use, axes in that of tensors, results in that of calls."""
    calls = (*record.training.calls, *record.evaluation.calls)
    used = list(dict.fromkeys(name for call in calls for name in list_contents(call[1:3], "state")))
    tensors = sorted(record.tensors, key=lambda tensor: used.index(tensor.name))
    axes = list(dict.fromkeys(name for tensor in tensors for name in list_names(tensor.shape, record.sums)))
    layers = list(dict.fromkeys(call[4] for call in calls))
    return replace(
        record,
        axes=tuple(sorted(record.axes, key=lambda axis: axes.index(axis.name))),
        sums=dict(sorted(record.sums.items())),
        tensors=tuple(tensors),
        fixed=tuple(sorted(record.fixed, key=lambda item: str(item[0]))),
        training=_number_results(record.training),
        evaluation=_number_results(record.evaluation),
        products=tuple(sorted(record.products, key=lambda product: layers.index(product.layer))),
    )


def _number_results(plan: RecordedPlan) -> RecordedPlan:
    numbers: dict[int | None, int | None] = {None: None, 0: 0}
    for call in plan.calls:
        for number in call[3] if isinstance(call[3], list) else [call[3]]:
            numbers.setdefault(number, len(numbers) - 1)
    changes: Changes = {"value": numbers.__getitem__}
    return RecordedPlan(
        calls=[rewrite_call(call, changes) for call in plan.calls],
        out=changes["value"](plan.out),
        blocks={
            name: (start, stop, changes["value"](source), changes["value"](out))
            for name, (start, stop, source, out) in plan.blocks.items()
        },
        constants=plan.constants,
    )
