"""The server's held-out samples, and the class names that a run takes from them."""

from dataclasses import replace

import numpy as np

from subfleet.protocol.errors import DataError
from subfleet.settings.run import Run
from subfleet.tasks import DataForm, Dataset, read_dataset
from subfleet.tasks.data_form import fit_to_form


def read_evaluation_data(config: Run, samples: Dataset | None = None) -> tuple[Run, Dataset, Dataset | None]:
    """Read the evaluation data of a run in the shape of its model.

    Args:
        config: of the run.
        samples: the data, if they are read already; None reads what the run names.

    Returns:
        The run, with the class names of the data if it has none itself; they are part of its fingerprint, so that it
        continues only with the same ones. The data; and the part of them that is set apart for validation, or None.

    Raises:
        DataError: the data cannot be used, do not fit the model, have other classes than the run, or are not more than
            those set apart.
        FileError: they cannot be read.
        TransportError: they cannot be downloaded.
        MissingExtraError: a required package is not installed.
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
            f"{dataset.labels.max():g}, but objective {config.training.objective.name!r} takes targets from 0 to 1"
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
