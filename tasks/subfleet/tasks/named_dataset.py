"""Named data sets: their description, their readers, and the registry of installed ones."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from subfleet.protocol.errors import DataError, FileError, SubfleetError
from subfleet.protocol.registry import Registry
from subfleet.protocol.task_kinds import TASK_KINDS, Objective, TaskKind
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.source_files import DataFolders, SourceFile, find_data_folders, locate

__all__ = ["DATASETS", "NamedDataset", "Reader", "TrainTest", "ignore_announcement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTest:
    """The training and test parts of a data set; owners have the same numbers in both."""

    train: Dataset
    test: Dataset


Reader = Callable[[Sequence[Path]], TrainTest]
"""Reads a data set's files, given in its order; `NamedDataset.load` turns its exceptions into a `DataError`."""


def ignore_announcement(text: str) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDataset:
    """A named data set.

    Attributes:
        name: name in commands and configurations.
        summary: one line on what is learned.
        files: files of the data set; empty if it comes with an installed package.
        read: reader of these files.
        input_shape: shape of one sample: (channels, height, width) for images and sound, with time as height and mel
            bands as width; (context,) of token indices for text.
        class_count: number of classes, of symbols in the vocabulary, or of labels or numbers for each sample.
        objective: training objective, which determines the kind of labels; see `subfleet.protocol.task_kinds`.
        owner: kind of the samples' owners, the natural partition; "" for none.
        class_names: class names in the order of their indices; empty for none.
        stand_in_for: the data set that this smaller one replaces; results must name it.
        licence: licence of the data.
        source: origin of the data, in one sentence.
    """

    name: str
    summary: str
    files: tuple[SourceFile, ...]
    read: Reader
    input_shape: tuple[int, ...]
    class_count: int
    objective: Objective
    licence: str
    source: str
    owner: str = ""
    stand_in_for: str = ""
    class_names: tuple[str, ...] = ()

    @property
    def kind(self) -> TaskKind:
        """Kind of the task."""
        return TASK_KINDS[self.objective]

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of one sample's label."""
        predicts = "sample" if self.kind.places == "any" else self.kind.places
        return self.kind.label_shape(self.input_shape, self.class_count, predicts)

    def load(
        self, folders: DataFolders | None = None, *, announce: Callable[[str], None] = ignore_announcement
    ) -> TrainTest:
        """Read the data set from SUBFLEET_DATA, the cache or its official address, in that order.

        Args:
            folders: folders to look in; by default those of the environment.
            announce: called with a message before each download.

        Raises:
            FileError: a file is missing and has no address, or cannot be read or written.
            DataError: a checksum is wrong, or a file is damaged or has unexpected content.
            TransportError: an address cannot be reached.
            MissingExtraError: the package with the data is not installed.
        """
        folders = folders or find_data_folders()
        paths = [locate(file, folders, announce) for file in self.files]
        sources = ", ".join(repr(str(path)) for path in paths)
        try:
            parts = self.read(paths)
            for part in (parts.train, parts.test):
                self._check(part)
            if self.class_names:
                parts = TrainTest(train=self._add_class_names(parts.train), test=self._add_class_names(parts.test))
        except DataError as error:
            raise DataError(f"data set {self.name!r} cannot be read from {sources}: {error}") from error
        except SubfleetError:
            raise
        # Damaged files make the parsers of archives, JSON, arrays and sound raise almost anything.
        except Exception as error:
            # The reader of a damaged archive may seek to before the start of the file.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise FileError(f"data set {self.name!r} cannot be read from {sources} ({error.strerror})") from error
            words = " ".join(str(error).split())
            raise DataError(
                f"data set {self.name!r} cannot be read from {sources}: it is damaged or another file "
                f"({type(error).__name__}: {words:.200}); put the right file there"
            ) from error
        return parts

    def _add_class_names(self, part: Dataset) -> Dataset:
        return replace(part, class_names=self.class_names)

    def _check(self, part: Dataset) -> None:
        if part.sample_shape != self.input_shape:
            raise DataError(f"its samples have the shape {part.sample_shape}, but must have {self.input_shape}")
        if part.label_shape != self.label_shape or (part.labels.dtype == np.int64) != self.kind.over_classes:
            raise DataError(
                f"its labels are {part.labels.dtype} of shape {part.label_shape}, but must be "
                f"{'classes' if self.kind.over_classes else 'numbers'} of shape {self.label_shape}"
            )
        if self.objective == "next_token" and int(np.max(part.inputs)) >= self.class_count:
            raise DataError(f"its tokens go up to {np.max(part.inputs)}, but must be below {self.class_count}")
        if len(part.class_counts()) > self.class_count:
            raise DataError(f"its classes go up to {np.max(part.labels)}, but must be below {self.class_count}")


def _create(registered: Any) -> Any:
    """The registered data set, or the result of a registered function."""
    return registered() if callable(registered) else registered


def _problem(registered: object, name: str) -> str:
    if not isinstance(registered, NamedDataset):
        kinds = "a NamedDataset of subfleet.tasks.named_dataset, or a function that returns one"
        return f"it is {type(registered).__name__}, but must be {kinds}"
    if registered.name != name:
        return f"its name is {registered.name!r:.80}, but must be {name!r:.80}"
    # NAME:train and NAME:test must look like module:function.
    return "" if name.isidentifier() else f"{name!r:.80} must be letters, digits and underscores"


DATASETS = Registry[NamedDataset]("subfleet.datasets", "data set", read=_create, check=_problem)
"""All installed data sets (entry points), by the name in `[data] name = "..."` and `NAME:train`.

Listing the names imports nothing; a data set is imported on first use.
"""
