"""A folder of images by class: a folder for each class, named after it.

Models map classes by these names. By default classes are numbered in natural order, "2" before "10".
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from subfleet.protocol.class_names import check_class_names, sort_naturally
from subfleet.protocol.errors import DataError, FileError
from subfleet.protocol.jobs import DataSummary
from subfleet.protocol.transform import DataTransform
from subfleet.tasks.data_form import shape_problem
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.measuring import InputMeter
from subfleet.tasks.pictures import MAX_BYTE, Picture, read_header, read_pixels
from subfleet.tasks.transforms.data_transform import normalise_in_place, prepare_picture

CHANNEL_COUNTS = (1, 3)
"""Every picture can be read in gray or in colour."""
_NO_CLASSES = frozenset(
    {"__macosx", "lost+found", "@eadir", "#recycle", "#snapshot", "$recycle.bin", "system volume information"}
)
"""Folders left by archives, file systems and network drives, in lower case. Hidden folders are skipped as well."""
_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_SHOWN = 10
"""Unusable pictures that an error message lists; all are looked for before it is raised."""
_NAME_CHARACTERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """All pictures of a folder, with their classes.

    Attributes:
        folder: path of the folder.
        names: class names in order.
        pictures: the pictures, at least one.
        labels: class index of each picture.
    """

    folder: Path
    names: tuple[str, ...]
    pictures: tuple[Picture, ...]
    labels: tuple[int, ...]

    @property
    def usual_channels(self) -> int:
        """The number of channels of most pictures; 1 in a tie."""
        return 1 if 2 * sum(picture.gray for picture in self.pictures) >= len(self.pictures) else 3


def read_image_folder(
    folder: Path, taken: tuple[int, ...] | None = None, transform: DataTransform | None = None
) -> Dataset:
    """Read all images in the class folders, upright, scaled to 0 to 1, channels first.

    Transparency is dropped. Files without an image's suffix are skipped. Class folders may be empty.

    Args:
        folder: folder with a folder for each class.
        taken: shape of one sample as a model takes it, which determines whether pictures become gray or coloured. By
            default they become what most of them are, and gray in a tie.
        transform: transform of each picture; without one all must have the same size.

    Raises:
        FileError: a folder cannot be read.
        DataError: there is no image; some are unreadable or too large, and the message lists them; sizes differ; or a
            folder's name is not a valid class name.
        MissingExtraError: Pillow is not installed.
    """
    listed = _list_pictures(folder)
    applied = transform or DataTransform()
    size = _find_common_size(listed, applied)
    channels = applied.channels or _choose_channels(listed, size, taken)
    if len(applied.mean) > 1 and len(applied.mean) != channels:
        raise DataError(f"data.transform has means for {len(applied.mean)} channels, but pictures have {channels}")
    try:
        inputs = np.empty((len(listed.pictures), channels, *size), np.float32)
    except MemoryError as error:
        raise DataError(f"data folder {str(folder)!r} is too large for memory; use fewer or smaller images") from error
    problems = _Problems(folder)
    for row, picture in enumerate(listed.pictures):
        with problems.collect(picture.path):
            inputs[row] = prepare_picture(read_pixels(picture, channels), applied)
    problems.raise_all()
    inputs /= np.float32(MAX_BYTE)
    normalise_in_place(inputs, applied)
    labels = np.array(listed.labels, np.int64)
    return Dataset(inputs=inputs, labels=labels, class_names=listed.names, transform=transform)


def describe_image_folder(folder: Path) -> DataSummary:
    """Describe an image folder as far as a device may report it, before a model is known; decodes pictures one by one.

    The reported shape is the most common one. The run's transform may resize the others.

    Raises:
        FileError: a folder cannot be read.
        DataError: as for `read_image_folder`, but sizes may differ.
        MissingExtraError: Pillow is not installed.
    """
    listed, meter, problems = _list_pictures(folder), InputMeter(), _Problems(folder)
    channels = listed.usual_channels
    for picture in listed.pictures:
        with problems.collect(picture.path):
            meter.add(read_pixels(picture, channels).astype(np.float32) / np.float32(MAX_BYTE))
    problems.raise_all()
    sizes = Counter((picture.height, picture.width) for picture in listed.pictures)
    size = _most_common(sizes)
    pixels = sum(math.prod(dimensions) * count for dimensions, count in sizes.items())
    counts = np.bincount(listed.labels, minlength=len(listed.names))
    return DataSummary(
        sample_count=len(listed.pictures),
        input_shape=(channels, *size),
        class_counts=tuple(int(count) for count in counts),
        data_bytes=4 * max(CHANNEL_COUNTS) * pixels + 8 * len(listed.labels),
        class_names=listed.names,
        other_input_shapes=tuple((other, *size) for other in CHANNEL_COUNTS if other != channels),
        inputs=meter.result(),
        sizes_differ=len(sizes) > 1,
        streams=True,
    )


class _Problems:
    """Collects the unusable pictures of a folder for one error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems = list[str]()

    @contextmanager
    def collect(self, path: Path) -> Iterator[None]:
        """Record a picture's error and continue."""
        try:
            yield
        except DataError as error:
            self._problems.append(f"{str(path.relative_to(self._folder))[-_NAME_CHARACTERS:]!r} {error}")

    @property
    def any(self) -> bool:
        """Whether there are unusable pictures."""
        return bool(self._problems)

    def raise_all(self) -> None:
        """Raise a `DataError` that lists the first problems and counts the others, if there are any."""
        count = len(self._problems)
        if not count:
            return
        counted = "1 image" if count == 1 else f"{count} images"
        more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
        listed = "; ".join(self._problems[:_SHOWN])
        raise DataError(f"{counted} of {str(self._folder)!r} cannot be used: {listed}{more}")


def _most_common(sizes: "Counter[tuple[int, int]]") -> tuple[int, int]:
    return max(sizes.items(), key=lambda item: (item[1], item[0]))[0]


def _find_common_size(listed: _Listing, transform: DataTransform) -> tuple[int, int]:
    """Height and width of all images after the transform."""
    examples, sizes = dict[tuple[int, int], Picture](), Counter[tuple[int, int]]()
    problems = _Problems(listed.folder)
    for picture in listed.pictures:
        with problems.collect(picture.path):
            size = _size_of(picture, transform)
            examples.setdefault(size, picture)
            sizes[size] += 1
    problems.raise_all()
    height, width = _most_common(sizes)
    odd = next((picture for size, picture in examples.items() if size != (height, width)), None)
    if odd is not None:
        raise DataError(
            f"image {str(odd.path)!r} is {odd.width} x {odd.height}, but must be {width} x {height} like "
            f"{sizes[height, width]} of {len(listed.pictures)} images; scale all images to one size, or set "
            "data.transform in the run file"
        )
    return height, width


def _size_of(picture: Picture, transform: DataTransform) -> tuple[int, int]:
    try:
        return transform.size_of(picture.height, picture.width)
    except ValueError as error:
        raise DataError(f"does not fit the run's data.transform: {error}") from error


def _choose_channels(listed: _Listing, size: tuple[int, int], taken: tuple[int, ...] | None) -> int:
    """The number of channels that the model takes, or that most pictures have."""
    if taken is None:
        return listed.usual_channels
    fitting = [channels for channels in CHANNEL_COUNTS if not shape_problem((channels, *size), taken)]
    if not fitting:
        raise DataError(
            f"images of {str(listed.folder)!r} {shape_problem((listed.usual_channels, *size), taken)}; scale them to "
            "the model's size, or set data.transform in the run file"
        )
    return fitting[0]


def _list_pictures(folder: Path) -> _Listing:
    names, files = _list_files(folder)
    pictures, problems = list[Picture](), _Problems(folder)
    for path, _ in files:
        with problems.collect(path):
            pictures.append(read_header(path))
    if problems.any:  # report pictures with damaged pixels in the same error
        for picture in pictures:
            with problems.collect(picture.path):
                read_pixels(picture, 1)
    problems.raise_all()
    return _Listing(folder=folder, names=names, pictures=tuple(pictures), labels=tuple(label for _, label in files))


def _list_files(folder: Path) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """List the class names in order, and each image file with its class index."""
    try:
        # Some file systems store an accent as a separate character.
        normal = {entry: unicodedata.normalize("NFC", entry.name) for entry in _iterate_class_folders(folder)}
        names = sort_naturally(normal.values())
        check_class_names(names)
        folders = {name: entry for entry, name in normal.items()}
        images = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted(folders[name].iterdir())
            if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".") and path.is_file()
        ]
    except OSError as error:
        raise FileError(f"data folder {str(folder)!r} cannot be read ({error}); check its permissions") from error
    except ValueError as error:
        raise DataError(f"the class folders of {str(folder)!r} have unsuitable names: {error}") from error
    if not images:
        raise DataError(
            f"data folder {str(folder)!r} has {len(names)} class folders and no image; "
            "put the images of each class into a folder named after the class"
        )
    return names, images


def _iterate_class_folders(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith(".") and entry.name.lower() not in _NO_CLASSES:
            yield entry
