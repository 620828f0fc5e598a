"""The data of a job, as its program takes them."""

import numpy as np

from subfleet.protocol.errors import DataError, FileError
from subfleet.protocol.jobs import AnyJob
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.trainers.program_layout import AnyLayout
from subfleet.trainers.step_layout import StepLayout

__all__ = ["read_data"]


def read_data(job: AnyJob, layout: AnyLayout) -> Dataset:
    """Read the data set of a job in the form that its program takes, with the run's classes.

    Args:
        job: what to train, to score or to evaluate.
        layout: of its program.

    Raises:
        DataError: the data cannot be read or used, or do not fit the program or the run's classes.
    """
    form = DataForm(
        input_shape=layout.input.shape[1:],
        class_count=_class_count(layout) if layout.label.dtype == "I64" else 0,
        classes=job.classes,
        label_shape=layout.label.shape[1:],
        targets=layout.label.dtype == "F32",
        transform=job.transform,
    )
    try:
        dataset = read_dataset(job.data, form)
    except FileError as error:  # which says of the program, that can be had anew, where it is one of it
        raise DataError(str(error)) from error
    _check(dataset, layout, job.data)
    return dataset


def _check(dataset: Dataset, layout: AnyLayout, source: str) -> None:
    for kind, array, value in (("samples", dataset.inputs, layout.input), ("labels", dataset.labels, layout.label)):
        dtype = "F32" if array.dtype == np.float32 else "I64"
        if array.shape[1:] != value.shape[1:] or dtype != value.dtype:
            raise DataError(
                f"{kind} of {source!r} are {dtype} of shape {array.shape[1:]}, but the program takes {value.dtype} of "
                f"shape {value.shape[1:]}; use data of that kind"
            )
    if layout.input.limit and int(dataset.inputs.max()) >= layout.input.limit:
        raise DataError(
            f"samples of {source!r} go up to {int(dataset.inputs.max())}, but the program takes indices below "
            f"{layout.input.limit}; use data of the model's vocabulary"
        )


def _class_count(layout: AnyLayout) -> int:
    named = layout.class_mask if isinstance(layout, StepLayout) else None
    return layout.label.limit if named is None else named.shape[0]
