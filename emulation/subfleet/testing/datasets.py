"""The contract of data sets."""

import numpy as np

from subfleet.protocol.registry import Registry
from subfleet.tasks import Dataset, read_dataset
from subfleet.tasks.named_dataset import DATASETS, NamedDataset, TrainTest


class DatasetContract:
    """Tests that every data set passes; pytest runs those of a subclass.

    Attributes:
        dataset: the name of a registered data set, or the data set itself.
    """

    dataset: str | NamedDataset

    def load(self, task: NamedDataset) -> TrainTest:
        """Read the data set; a subclass may read it from another folder."""
        return task.load()

    def test_it_says_what_it_is(self) -> None:
        """Its name is valid in a source of data, and its descriptions are one line each."""
        task = self._task()
        assert task.name.isidentifier(), f"{task.name!r} must be letters, digits and underscores"
        for name in ("summary", "licence", "source"):
            text = getattr(task, name)
            assert text, f"{name} is empty, but must be one line"
            assert text.isprintable(), f"{name} is {text!r}, but must be one line"
        assert task.class_count >= (2 if task.kind.over_classes else 1), "there must be 2 classes, or 1 output, or more"
        assert len(task.class_names) in (0, task.class_count), "class_names must be empty, or name every class"
        for file in task.files:
            assert file.checksum or not file.url, f"{file.paths} is downloaded, but has no checksum"

    def test_both_parts_are_what_it_says(self) -> None:
        """Shapes, labels and types of inputs agree with its description."""
        task = self._task()
        parts = self.load(task)
        for part in (parts.train, parts.test):
            assert part.sample_shape == task.input_shape, (
                f"samples have shape {part.sample_shape}, but input_shape is {task.input_shape}"
            )
            dtype = np.int64 if task.kind.over_classes else np.float32
            assert part.labels.dtype == dtype, f"labels are {part.labels.dtype}, but must be {dtype.__name__}"
            assert len(part.class_counts()) <= task.class_count, "there are more classes than class_count"
            assert part.inputs.dtype == parts.train.inputs.dtype, "inputs of the two parts have different types"
            assert (part.owners is not None) == bool(task.owner), "samples must have owners exactly if `owner` is set"
            assert part.label_shape == task.label_shape, (
                f"labels have shape {part.label_shape}, but label_shape is {task.label_shape}"
            )
            if task.class_names:
                assert part.class_names == task.class_names, "the samples have other class names"

    def test_it_is_the_same_every_time(self) -> None:
        """A repeated run has the same samples in the same order."""
        task = self._task()
        first, second = self.load(task), self.load(task)
        assert _as_bytes(first.train) == _as_bytes(second.train), "the training part differs the second time"
        assert _as_bytes(first.test) == _as_bytes(second.test), "the test part differs the second time"

    def test_its_parts_are_sources(self) -> None:
        """A registered data set can be read as `NAME:train` and `NAME:test`."""
        if isinstance(self.dataset, NamedDataset):
            return
        parts = self.load(self._task())
        for name, part in (("train", parts.train), ("test", parts.test)):
            assert _as_bytes(read_dataset(f"{self.dataset}:{name}")) == _as_bytes(part), (
                f"{self.dataset}:{name} differs from the part that `load` returns"
            )

    def _task(self) -> NamedDataset:
        registry: Registry[NamedDataset] = DATASETS
        return self.dataset if isinstance(self.dataset, NamedDataset) else registry.load(self.dataset)


def _as_bytes(part: Dataset) -> tuple[bytes, bytes, tuple[int, ...]]:
    return part.inputs.tobytes(), part.labels.tobytes(), part.inputs.shape
