"""Speech Commands (Warden 2018): spoken words of one second as images of time and pitch, by speaker."""

import hashlib
import io
import wave
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from subfleet.protocol.errors import DataError
from subfleet.tasks.archives import check_zip, read_tar
from subfleet.tasks.dataset import NO_OWNER, Dataset
from subfleet.tasks.named_dataset import TrainTest
from subfleet.tasks.transforms.mel import MelSettings, log_mel

CLIP_SAMPLES = 16_000
"""Samples of one second; shorter clips are padded with silence, longer ones are cut."""
MEL = MelSettings()
WORDS = (
    "backward",
    "bed",
    "bird",
    "cat",
    "dog",
    "down",
    "eight",
    "five",
    "follow",
    "forward",
    "four",
    "go",
    "happy",
    "house",
    "learn",
    "left",
    "marvin",
    "nine",
    "no",
    "off",
    "on",
    "one",
    "right",
    "seven",
    "sheila",
    "six",
    "stop",
    "three",
    "tree",
    "two",
    "up",
    "visual",
    "wow",
    "yes",
    "zero",
)
"""The 35 words of version 0.02."""
KEYWORDS = ("_silence_", "_unknown_", "down", "go", "left", "no", "off", "on", "right", "stop", "up", "yes")
"""The 12 classes of the data set's own test archive."""
_CLIP_LIMIT_BYTES = 2**20
_ARRAYS_LIMIT_BYTES = 2**28
_LISTS = ("testing_list.txt", "validation_list.txt")
_SPEAKER_END = "_nohash_"
_INT16_MAX = 2**15
_TEST_PART = 5


def read_speech_commands(paths: Sequence[Path]) -> TrainTest:
    """Read the archive of version 0.02; the testing list is the test part, the validation list is skipped."""
    features: list[npt.NDArray[np.float32]] = []
    names: list[str] = []
    listed: dict[str, frozenset[str]] = {}
    for name, content in read_tar(paths[0], _is_needed, limit_bytes=_CLIP_LIMIT_BYTES):
        if name in _LISTS:
            listed[name] = frozenset(content.decode("ascii").split())
            continue
        features.append(log_mel(_read_clip(name, content)[None], MEL))
        names.append(name)
    if not names or set(listed) != set(_LISTS):
        raise DataError(f"it has {len(names)} words and the lists {sorted(listed)}, but must have words and {_LISTS}")
    classes = {word: number for number, word in enumerate(WORDS)}
    speakers = [name.partition("/")[2].partition(_SPEAKER_END)[0] for name in names]
    test = np.array([name in listed[_LISTS[0]] for name in names])
    train = ~test & np.array([name not in listed[_LISTS[1]] for name in names])
    labels = np.array([classes[name.partition("/")[0]] for name in names], np.int64)
    return _split(np.concatenate(features), labels, _number_speakers(speakers), train, test)


def read_speech_subset(paths: Sequence[Path]) -> TrainTest:
    """Read an `.npz` file of clips: `audio` (int16, concatenated), `offsets`, `label`, `speaker` and `name`.

    About a fifth of the speakers, by the hash of their name, is the test part. Silence has no owner and is split by the
    hash of the clip's name.
    """
    check_zip(paths[0], limit_bytes=_ARRAYS_LIMIT_BYTES)
    with np.load(paths[0], allow_pickle=False) as archive:
        audio, offsets = archive["audio"], archive["offsets"].astype(np.int64)
        labels, speakers, names = (archive[name].tolist() for name in ("label", "speaker", "name"))
    count = len(labels)
    fits = len(offsets) == count + 1 and len(speakers) == len(names) == count and bool((np.diff(offsets) >= 0).all())
    if not fits or offsets[0] < 0 or offsets[-1] > len(audio) or audio.dtype != np.int16:
        raise DataError("its audio, offsets, label, speaker and name do not match; put the right file there")
    clips = np.stack([_fit_clip(audio[start:end]) for start, end in pairwise(offsets)])
    classes = {word: number for number, word in enumerate(KEYWORDS)}
    test = np.array([_is_in_test(speaker or name) for speaker, name in zip(speakers, names, strict=True)])
    numbers = np.array([classes[label] for label in labels], np.int64)
    return _split(log_mel(clips, MEL), numbers, _number_speakers(speakers), ~test, test)


def _is_needed(name: str) -> bool:
    folder, _, file = name.partition("/")
    return name in _LISTS or (folder in WORDS and file.endswith(".wav") and _SPEAKER_END in file)


def _read_clip(name: str, content: bytes) -> npt.NDArray[np.float32]:
    with wave.open(io.BytesIO(content)) as sound:
        kind = (sound.getnchannels(), sound.getsampwidth(), sound.getframerate())
        if kind != (1, 2, MEL.rate_hz):
            raise DataError(f"its {name!r} has (channels, bytes, Hz) {kind}, but must have {(1, 2, MEL.rate_hz)}")
        return _fit_clip(np.frombuffer(sound.readframes(CLIP_SAMPLES), "<i2"))


def _fit_clip(sound: npt.NDArray[np.int16]) -> npt.NDArray[np.float32]:
    clip = np.zeros(CLIP_SAMPLES, np.float32)
    part = sound[:CLIP_SAMPLES]
    clip[: len(part)] = part / np.float32(_INT16_MAX)
    return clip


def _is_in_test(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % _TEST_PART == 0


def _number_speakers(speakers: Sequence[str]) -> npt.NDArray[np.int64]:
    numbers = {name: number for number, name in enumerate(sorted(set(speakers) - {""}))}
    return np.array([numbers.get(name, NO_OWNER) for name in speakers], np.int64)


def _split(
    features: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    owners: npt.NDArray[np.int64],
    train: npt.NDArray[np.bool_],
    test: npt.NDArray[np.bool_],
) -> TrainTest:
    """Split the samples and normalise both parts by the training part's mean and deviation."""
    if not train.any() or not test.any():
        raise DataError(f"it has {train.sum()} samples for training and {test.sum()} for the test, but needs both")
    mean, deviation = features[train].mean(dtype=np.float64), features[train].std(dtype=np.float64)
    scaled = ((features - np.float32(mean)) / np.float32(max(deviation, 1e-6)))[:, None]
    return TrainTest(
        train=Dataset(inputs=scaled[train], labels=labels[train], owners=owners[train]),
        test=Dataset(inputs=scaled[test], labels=labels[test], owners=owners[test]),
    )
