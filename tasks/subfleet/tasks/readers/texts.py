"""Texts: one file, the roles of plays, and WikiText; samples are windows of tokens, labels the next tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError
from subfleet.tasks.archives import read_gzip, read_members
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.named_dataset import TrainTest
from subfleet.tasks.transforms.tokens import build_vocabulary, character_tokens, split_words, token_windows, word_tokens

CHARACTER_CONTEXT = 80
"""Characters of a sample, as in LEAF's Shakespeare."""
WORD_CONTEXT = 32
"""Words of a sample."""
VOCABULARY = 10_000
"""Size of the vocabulary; all other words are one symbol."""
MIN_ROLE_WINDOWS = 10
"""Least samples of a role (about 800 characters); shorter roles are skipped, so each client has samples of both
parts."""
_LIMIT_BYTES = 2**28
_TEST_FRACTION = 0.2
_TEXT_TEST_FRACTION = 0.1
_PARTS = {"wiki.train.tokens": "train", "wiki.test.tokens": "test"}


def read_characters(paths: Sequence[Path]) -> TrainTest:
    """Read one text file, or WikiText's parts, as characters; the last tenth of one file is the test part."""
    path = paths[0]
    if path.is_dir() or path.suffix == ".zip":
        texts = _read_wikitext(path)
        train, test = (character_tokens(texts[part]) for part in ("train", "test"))
    else:
        if path.stat().st_size > _LIMIT_BYTES:
            raise DataError(f"it has {path.stat().st_size} bytes, but may have at most {_LIMIT_BYTES}")
        tokens = character_tokens(path.read_text(encoding="utf-8"))
        edge = round(len(tokens) * (1 - _TEXT_TEST_FRACTION))
        train, test = tokens[:edge], tokens[edge:]
    return TrainTest(train=_make_windows(train, CHARACTER_CONTEXT), test=_make_windows(test, CHARACTER_CONTEXT))


def read_wikitext_words(paths: Sequence[Path]) -> TrainTest:
    """Read WikiText's parts as words; the vocabulary comes from the training part."""
    texts = _read_wikitext(paths[0])
    words = {part: split_words(text) for part, text in texts.items()}
    vocabulary = build_vocabulary(words["train"], limit=VOCABULARY)
    train, test = (word_tokens(words[part], vocabulary) for part in ("train", "test"))
    return TrainTest(train=_make_windows(train, WORD_CONTEXT), test=_make_windows(test, WORD_CONTEXT))


def read_roles(paths: Sequence[Path]) -> TrainTest:
    """Read roles of plays, one JSON object a line with `play`, `role` and `speeches`, gzipped.

    Each role is an owner. The last fifth of its text is for the test.
    """
    lines = read_gzip(paths[0], limit_bytes=_LIMIT_BYTES).decode("utf-8").splitlines()
    roles = {}
    for line in lines:
        role = json.loads(line)
        if not isinstance(role, dict) or not {"play", "role", "speeches"} <= set(role):
            raise DataError("one of its lines lacks play, role or speeches; put the right file there")
        roles[f"{role['play']}/{role['role']}"] = "\n".join(role["speeches"])
    parts: dict[str, list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]]] = {"train": [], "test": []}
    owner = 0
    for name in sorted(roles):
        inputs, labels = token_windows(character_tokens(roles[name]), CHARACTER_CONTEXT)
        if len(inputs) < MIN_ROLE_WINDOWS:
            continue
        edge = len(inputs) - round(len(inputs) * _TEST_FRACTION)
        parts["train"].append((inputs[:edge], labels[:edge], owner))
        parts["test"].append((inputs[edge:], labels[edge:], owner))
        owner += 1
    if not owner:
        raise DataError(f"none of its {len(roles)} roles has enough text for {MIN_ROLE_WINDOWS} samples")
    return TrainTest(train=_join_roles(parts["train"]), test=_join_roles(parts["test"]))


def _join_roles(roles: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]]) -> Dataset:
    return Dataset(
        inputs=np.concatenate([inputs for inputs, _, _ in roles]),
        labels=np.concatenate([labels for _, labels, _ in roles]),
        owners=np.concatenate([np.full(len(inputs), owner, np.int64) for inputs, _, owner in roles]),
    )


def _read_wikitext(path: Path) -> dict[str, str]:
    files = read_members(path, lambda name: name.rpartition("/")[2] in _PARTS, limit_bytes=_LIMIT_BYTES)
    texts = {_PARTS[name.rpartition("/")[2]]: content.decode("utf-8") for name, content in files}
    missing = [name for name, part in _PARTS.items() if part not in texts]
    if missing:
        raise DataError(f"it lacks {', '.join(missing)}; put WikiText's word-level files there")
    return texts


def _make_windows(tokens: npt.NDArray[np.int64], context: int) -> Dataset:
    inputs, labels = token_windows(tokens, context)
    return Dataset(inputs=inputs, labels=labels)
