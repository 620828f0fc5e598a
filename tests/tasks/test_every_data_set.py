"""Our data sets fulfil the contract for data sets, on small files in their formats."""

from pathlib import Path

import numpy as np
import pytest
from tasks.data_files import CONTENTS, data_folders, write_files

from subfleet.protocol.task_kinds import TASK_KINDS
from subfleet.tasks.named_dataset import DATASETS, NamedDataset, TrainTest
from subfleet.tasks.readers.included import PIXEL_CLASSES
from subfleet.testing import DatasetContract

INSTALLED = ("diabetes", "digits", "digits_attributes", "digits_moments", "digits_pixels", "digits_tokens")


class TestInstalled(DatasetContract):
    """Data sets that are part of this package or of scikit-learn."""

    @pytest.fixture(params=INSTALLED, autouse=True)
    def _choose_dataset(self, request: pytest.FixtureRequest) -> None:
        self.dataset = request.param


def test_there_is_a_data_set_without_a_download_for_every_kind_of_task() -> None:
    assert {DATASETS.load(name).objective for name in INSTALLED} == set(TASK_KINDS)


def test_holes_are_not_connected_to_the_outside() -> None:
    pixels, images = (DATASETS.load(name).load().train for name in ("digits_pixels", "digits"))
    has_hole = (pixels.labels == PIXEL_CLASSES.index("hole")).any((1, 2))
    assert np.mean(has_hole[images.labels == 0]) > 0.8
    assert np.mean(has_hole[images.labels == 1]) < 0.1
    assert ((pixels.labels == PIXEL_CLASSES.index("stroke")) == (images.inputs[:, 0] >= np.float32(0.3))).all()


def test_attributes_and_moments_are_those_of_the_digits() -> None:
    images = DATASETS.load("digits").load().train
    attributes, moments = (DATASETS.load(name).load().train for name in ("digits_attributes", "digits_moments"))
    assert attributes.labels[images.labels == 9].tolist() == [[0.0, 0.0, 1.0, 1.0]] * int((images.labels == 9).sum())
    assert attributes.labels[images.labels == 2][0].tolist() == [1.0, 1.0, 0.0, 0.0]
    ink = images.inputs[0, 0].astype(np.float64)
    assert moments.labels[0, 0] == pytest.approx((ink.sum(1) @ (np.arange(8) - 3.5)) / ink.sum())


def test_labels_of_texts_are_their_inputs_shifted_by_one() -> None:
    texts = DATASETS.load("digits_tokens").load().test
    assert (texts.inputs[:, 1:] == texts.labels[:, :-1]).all()


class TestEveryDataSet(DatasetContract):
    """Data sets with files."""

    folder: Path

    @pytest.fixture(params=sorted(CONTENTS), autouse=True)
    def _choose_dataset(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.dataset = write_files(request.param, tmp_path)

    def load(self, task: NamedDataset) -> TrainTest:
        return task.load(data_folders(self.folder))
