"""LEAF's JSON files (Caldas et al. 2018): `train/*.json` and `test/*.json` in a folder or a zip archive, by user."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError
from subfleet.tasks.archives import read_members
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.named_dataset import TrainTest
from subfleet.tasks.transforms.tokens import character_tokens

_LIMIT_BYTES = 2**30
_NO_LABEL = -1
_Arrays = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]


def read_femnist(paths: Sequence[Path]) -> TrainTest:
    """Read FEMNIST: each user is a writer, x are 784 gray values from 0 to 1, y is one of 62 classes."""
    return _read_by_user(paths[0], _convert_images)


def read_leaf_text(paths: Sequence[Path]) -> TrainTest:
    """Read LEAF's Shakespeare: each user is a role, x are texts of 80 characters, y is the next character.

    Like LEAF, only that character counts, so earlier positions have no label.
    """
    return _read_by_user(paths[0], _convert_texts)


def _convert_images(x: Any, y: Any) -> _Arrays:
    images = np.asarray(x, np.float32)
    return images.reshape(len(images), 1, 28, 28), np.asarray(y, np.int64)


def _convert_texts(x: Any, y: Any) -> _Arrays:
    inputs = np.stack([character_tokens(str(text)) for text in x])
    labels = np.full(inputs.shape, _NO_LABEL, np.int64)
    labels[:, -1] = [character_tokens(str(text))[0] for text in y]
    return inputs, labels


def _read_by_user(path: Path, convert: Any) -> TrainTest:
    parts = {part: list(_iterate_users(path, part, convert)) for part in ("train", "test")}
    names = sorted({name for users in parts.values() for name, _, _ in users})
    numbers = {name: number for number, name in enumerate(names)}
    return TrainTest(train=_join(parts["train"], numbers, "train"), test=_join(parts["test"], numbers, "test"))


def _iterate_users(
    path: Path, part: str, convert: Any
) -> Iterator[tuple[str, npt.NDArray[Any], npt.NDArray[np.int64]]]:
    folder = f"/{part}/"
    files = read_members(path, lambda name: name.endswith(".json") and folder in f"/{name}", limit_bytes=_LIMIT_BYTES)
    for name, content in files:
        data = json.loads(content)
        if not isinstance(data, dict) or not isinstance(data.get("user_data"), dict):
            raise DataError(f"its {name!r} has no user_data; put LEAF's JSON files there")
        for user, samples in data["user_data"].items():
            if samples["y"]:
                inputs, labels = convert(samples["x"], samples["y"])
                yield user, inputs, labels


def _join(
    users: Sequence[tuple[str, npt.NDArray[Any], npt.NDArray[np.int64]]], numbers: dict[str, int], part: str
) -> Dataset:
    if not users:
        raise DataError(f"it has no sample in {part}/*.json; put LEAF's JSON files there")
    return Dataset(
        inputs=np.concatenate([inputs for _, inputs, _ in users]),
        labels=np.concatenate([labels for _, _, labels in users]),
        owners=np.concatenate([np.full(len(labels), numbers[name], np.int64) for name, _, labels in users]),
    )
