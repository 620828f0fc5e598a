"""Images: IDX files of the MNIST family, the binary version of CIFAR, and arrays in `.npz` files."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError
from subfleet.tasks.archives import check_zip, read_gzip, read_tar
from subfleet.tasks.arrays_file import make_dataset
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.named_dataset import TrainTest

LIMIT_BYTES = 2**28
"""The most bytes that one file may take unpacked."""
_IDX_BYTES = 8
"""IDX's type number of unsigned bytes."""
_CIFAR_PIXELS = 3 * 32 * 32


def read_mnist(paths: Sequence[Path]) -> TrainTest:
    """Read four gzipped IDX files: train images, train labels, test images and test labels."""
    images, labels, test_images, test_labels = (_read_idx(path) for path in paths)
    return TrainTest(
        train=make_dataset(images, labels, str(paths[0])), test=make_dataset(test_images, test_labels, str(paths[2]))
    )


def read_cifar10(paths: Sequence[Path]) -> TrainTest:
    """Read the archive of CIFAR-10's binary version: a record is a label and 3 x 32 x 32 bytes."""
    return _read_cifar(paths[0], train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)), label_bytes=1)


def read_cifar100(paths: Sequence[Path]) -> TrainTest:
    """Read the archive of CIFAR-100's binary version: a record is a coarse label, a fine one, and 3 x 32 x 32 bytes."""
    return _read_cifar(paths[0], train=("train.bin",), label_bytes=2)


def read_image_arrays(paths: Sequence[Path]) -> TrainTest:
    """Read an `.npz` file with uint8 arrays `x_train`, `y_train`, `x_test` and `y_test`, channels last."""
    check_zip(paths[0], limit_bytes=LIMIT_BYTES)
    with np.load(paths[0], allow_pickle=False) as archive:
        return TrainTest(
            train=make_dataset(archive["x_train"], archive["y_train"], str(paths[0])),
            test=make_dataset(archive["x_test"], archive["y_test"], str(paths[0])),
        )


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    content = read_gzip(path, limit_bytes=LIMIT_BYTES)
    if len(content) < 4 or content[:3] != bytes((0, 0, _IDX_BYTES)):
        raise DataError(f"{path.name!r} is not an IDX file of bytes; put the right file there")
    header_bytes = 4 + 4 * content[3]
    # Big-endian sizes, one for each dimension.
    shape = tuple(int(size) for size in np.frombuffer(content[4:header_bytes], ">u4"))
    if len(shape) != content[3] or len(content) != header_bytes + math.prod(shape):
        raise DataError(f"{path.name!r} has {len(content)} bytes, which does not fit its shape {shape}; replace it")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def _read_cifar(path: Path, *, train: tuple[str, ...], label_bytes: int) -> TrainTest:
    test = "test_batch.bin" if label_bytes == 1 else "test.bin"
    parts = (*train, test)
    files = read_tar(path, lambda name: name.rpartition("/")[2] in parts, limit_bytes=LIMIT_BYTES)
    records = {name.rpartition("/")[2]: _split_records(name, content, label_bytes) for name, content in files}
    missing = [name for name in parts if name not in records]
    if missing:
        raise DataError(f"it lacks {', '.join(missing)}; put the archive of the binary version there")
    return TrainTest(
        train=_make_dataset(np.concatenate([records[name] for name in train]), label_bytes, path),
        test=_make_dataset(records[test], label_bytes, path),
    )


def _split_records(name: str, content: bytes, label_bytes: int) -> npt.NDArray[np.uint8]:
    length = label_bytes + _CIFAR_PIXELS
    if len(content) % length:
        raise DataError(f"its {name!r} has {len(content)} bytes, but must be records of {length} bytes; replace it")
    return np.frombuffer(content, np.uint8).reshape(-1, length)


def _make_dataset(records: npt.NDArray[np.uint8], label_bytes: int, path: Path) -> Dataset:
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    return make_dataset(images, records[:, label_bytes - 1], str(path))
