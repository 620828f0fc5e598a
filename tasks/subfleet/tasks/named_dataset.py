"""Data sets by name: what their samples are, how they are read, and the registry of those that are installed."""

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
    """The two parts of a data set; where samples have owners, an owner has the same number in both."""

    train: Dataset
    test: Dataset


Reader = Callable[[Sequence[Path]], TrainTest]
"""Reads a data set's files, given in its order; what it stumbles over becomes a `DataError` in `NamedDataset.load`."""


def ignore_announcement(text: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDataset:
    """A data set by name.

    Attributes:
        name: in commands and configurations.
        summary: one line on what is learned.
        files: of the data set; none where it comes with an installed package.
        read: the reader of these files.
        input_shape: of one sample: images and sound are (channels, height, width), where sound has time as height and
            mel bands as width; text is (context,) of token numbers.
        class_count: classes, or symbols of the vocabulary; or labels or numbers that each sample has.
        objective: of its training, which says what labels are; see `subfleet.protocol.task_kinds`.
        owner: whose the samples are: the natural partition; "" where they are nobody's.
        class_names: of the classes, in the order of their numbers; empty where they have none.
        stand_in_for: the data set that this smaller one stands in for; results must name it.
        licence: of the data.
        source: where they are from, in one sentence.
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
        """Of the task."""
        return TASK_KINDS[self.objective]

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Of one sample's label."""
        predicts = "sample" if self.kind.places == "any" else self.kind.places
        return self.kind.label_shape(self.input_shape, self.class_count, predicts)

    def load(
        self, folders: DataFolders | None = None, *, announce: Callable[[str], None] = ignore_announcement
    ) -> TrainTest:
        """Read the data set, from SUBFLEET_DATA, the cache or its official address, in that order.

        Args:
            folders: to look in; those of the environment by default.
            announce: told of each download before it starts.

        Raises:
            FileError: a file is missing and no address offers it, or it cannot be read or written.
            DataError: a checksum is wrong, or a file is damaged or not what it should be.
            TransportError: an address cannot be reached.
            MissingExtraError: the package that brings the data is not installed.
        """
        folders = folders or find_data_folders()
        paths = [locate(file, folders, announce) for file in self.files]
        places = ", ".join(repr(str(path)) for path in paths)
        try:
            parts = self.read(paths)
            for part in (parts.train, parts.test):
                self._check(part)
            if self.class_names:
                parts = TrainTest(train=self._add_class_names(parts.train), test=self._add_class_names(parts.test))
        except DataError as error:
            raise DataError(f"data set {self.name!r} cannot be read from {places}: {error}") from error
        except SubfleetError:
            raise
        # Damage may trip any part of the parsers of archives, JSON, arrays and sound, and they raise nearly anything.
        except Exception as error:
            # A damaged archive has its reader seek before the file's beginning.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise FileError(f"data set {self.name!r} cannot be read from {places} ({error.strerror})") from error
            words = " ".join(str(error).split())
            raise DataError(
                f"data set {self.name!r} cannot be read from {places}: it is damaged or something else "
                f"({type(error).__name__}: {words:.200}); put the right file there"
            ) from error
        return parts

    def _add_class_names(self, part: Dataset) -> Dataset:
        return replace(part, class_names=self.class_names)

    def _check(self, part: Dataset) -> None:
        if part.sample_shape != self.input_shape:
            raise DataError(f"its samples are of shape {part.sample_shape}, but must be of shape {self.input_shape}")
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
    """The registered data set, or the one that a registered function returns."""
    return registered() if callable(registered) else registered


def _problem(registered: object, name: str) -> str:
    if not isinstance(registered, NamedDataset):
        kinds = "a NamedDataset of subfleet.tasks.named_dataset, or a function that returns one"
        return f"it is {type(registered).__name__}, but must be {kinds}"
    if registered.name != name:
        return f"its name is {registered.name!r:.80}, but must be {name!r:.80}"
    # NAME:train and NAME:test must not look like anything but module:function.
    return "" if name.isidentifier() else f"{name!r:.80} must be letters, digits and underscores"


DATASETS = Registry[NamedDataset]("subfleet.datasets", "data set", read=_create, check=_problem)
"""All installed data sets (entry points), by the name in `[data] name = "..."` and `NAME:train`.

Reading the names imports none of them; each is imported when it is used.
"""
