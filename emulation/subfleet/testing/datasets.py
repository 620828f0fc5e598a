"""What every data set keeps, as tests to be subclassed."""

import numpy as np

from subfleet.protocol.registry import Registry
from subfleet.tasks import Dataset, read_dataset
from subfleet.tasks.named_dataset import DATASETS, NamedDataset, TrainTest


class DatasetContract:
    """What every data set must keep; subclass it, and pytest runs it.

    Attributes:
        dataset: its name, where it is registered, or the data set itself.
    """

    dataset: str | NamedDataset

    def load(self, task: NamedDataset) -> TrainTest:
        """Read it; a subclass may read it from a folder of its own."""
        return task.load()

    def test_it_says_what_it_is(self) -> None:
        """Its name can stand in a source, and what people read is a line each."""
        task = self._task()
        assert task.name.isidentifier(), f"{task.name!r} must be letters, digits and underscores"
        for name in ("summary", "licence", "source"):
            text = getattr(task, name)
            assert text, f"{name} is empty, but must be a line"
            assert text.isprintable(), f"{name} is {text!r}, but must be a line"
        assert task.class_count >= (2 if task.kind.over_classes else 1), "there must be 2 classes, or 1 output, or more"
        assert len(task.class_names) in (0, task.class_count), "some classes have names and others have none"
        for file in task.files:
            assert file.checksum or not file.url, f"{file.paths} is downloaded and has no checksum"

    def test_both_parts_are_what_it_says(self) -> None:
        """Shapes, labels and kinds of inputs."""
        task = self._task()
        parts = self.load(task)
        for part in (parts.train, parts.test):
            assert part.sample_shape == task.input_shape, f"samples are of shape {part.sample_shape}"
            dtype = np.int64 if task.kind.over_classes else np.float32
            assert part.labels.dtype == dtype, f"labels are {part.labels.dtype}, but must be {dtype.__name__}"
            assert len(part.class_counts()) <= task.class_count, "there are more classes than it says"
            assert part.inputs.dtype == parts.train.inputs.dtype, "the parts have inputs of two kinds"
            assert (part.owners is not None) == bool(task.owner), "owners are named, or they are nobody's"
            assert part.label_shape == task.label_shape, f"labels are of shape {part.label_shape}"
            if task.class_names:
                assert part.class_names == task.class_names, "classes have other names in its samples"

    def test_it_is_the_same_every_time(self) -> None:
        """A run that is repeated has the same samples in the same order."""
        task = self._task()
        one, other = self.load(task), self.load(task)
        assert _as_bytes(one.train) == _as_bytes(other.train), "the training part is another one the second time"
        assert _as_bytes(one.test) == _as_bytes(other.test), "the test part is another one the second time"

    def test_its_parts_are_sources(self) -> None:
        """`NAME:train` and `NAME:test`, where it is registered."""
        if isinstance(self.dataset, NamedDataset):
            return
        parts = self.load(self._task())
        for name, part in (("train", parts.train), ("test", parts.test)):
            assert _as_bytes(read_dataset(f"{self.dataset}:{name}")) == _as_bytes(part), (
                f"{name} is read otherwise by name"
            )

    def _task(self) -> NamedDataset:
        registry: Registry[NamedDataset] = DATASETS
        return self.dataset if isinstance(self.dataset, NamedDataset) else registry.named(self.dataset)


def _as_bytes(part: Dataset) -> tuple[bytes, bytes, tuple[int, ...]]:
    return part.inputs.tobytes(), part.labels.tobytes(), part.inputs.shape
