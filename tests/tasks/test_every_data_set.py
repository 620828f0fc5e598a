"""Our data sets by the contract that data sets of other packages are tried by, on small files in their true formats."""

from pathlib import Path

import pytest
from tasks.data_files import MADE, folders, placed

from subfleet.tasks.named_dataset import NamedDataset, TrainTest
from subfleet.testing import DatasetContract


class TestDigits(DatasetContract):
    """The one that comes with the package."""

    dataset = "digits"


class TestEveryDataSet(DatasetContract):
    """Those with files."""

    folder: Path

    @pytest.fixture(params=sorted(MADE), autouse=True)
    def _one(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.dataset = placed(request.param, tmp_path)

    def load(self, task: NamedDataset) -> TrainTest:
        return task.load(folders(self.folder))
