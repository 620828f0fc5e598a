"""The server's held-out samples, and the names of classes that a run has from them."""

from dataclasses import replace

import numpy as np

from subfleet.protocol.errors import DataError
from subfleet.settings.run import Run
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.tasks.data_form import fit_to_form

__all__ = ["with_evaluation"]


def with_evaluation(config: Run, samples: Dataset | None = None) -> tuple[Run, Dataset, Dataset | None]:
    """The evaluation data of a run as its model takes them.

    Args:
        config: of the run.
        samples: the data, where somebody has read them; None reads what the run names.

    Returns:
        The run, whose `data.classes` are from now on those of the data where it named none and they do: they are part
        of its fingerprint, so that it is only taken up with the same. The data; and those of them that are kept apart
        for validation, or None.

    Raises:
        DataError: the data cannot be used, do not fit the model, name other classes than the run, or are no more than
            those that are kept apart.
        FileError: they cannot be read.
        TransportError: they have to be downloaded, and their address cannot be reached.
        MissingExtraError: a package that they need is not installed.
    """
    kind, model = config.training.objective.kind, config.model
    form = DataForm(
        input_shape=model.input_shape,
        class_count=model.class_count if kind.over_classes else 0,
        classes=config.data.classes or None,
        label_shape=config.label_shape,
        targets=not kind.over_classes,
        transform=config.data.transform,
    )
    try:
        source = config.data.evaluated_on
        dataset = read_dataset(source, form) if samples is None else fit_to_form(samples, form, source)
    except DataError as error:
        raise DataError(f"data.test: {error}") from error
    if kind.labels == "probabilities" and not ((dataset.labels >= 0) & (dataset.labels <= 1)).all():
        raise DataError(
            f"data.test: labels of {config.data.evaluated_on!r} are {dataset.labels.min():g} to "
            f"{dataset.labels.max():g}, "
            f"but objective {config.training.objective.name!r} takes targets from 0 to 1"
        )
    if config.data.test_samples:
        dataset = dataset.take(np.arange(min(config.data.test_samples, len(dataset))))
    count, validation = config.data.validation_samples, None
    if count >= len(dataset):
        raise DataError(
            f"data.validation_samples is {count}, but must be below the {len(dataset)} samples of the evaluation data"
        )
    if count:
        dataset, validation = dataset.split_off(count)
    if not kind.over_classes:
        return config, dataset, validation
    return replace(config, data=replace(config.data, classes=dataset.class_names)), dataset, validation
