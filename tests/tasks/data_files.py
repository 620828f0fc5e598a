"""Small files in the formats of the published data sets, generated from seeds."""

import gzip
import hashlib
import io
import json
import tarfile
import wave
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from subfleet.tasks.named_dataset import DATASETS, NamedDataset
from subfleet.tasks.readers.speech import KEYWORDS, WORDS
from subfleet.tasks.source_files import DataFolders

Bytes = npt.NDArray[np.uint8]
TRAIN, TEST = 7, 3
ROLE_CHARACTERS = 1990
WIKI_TRAIN = " = Title = \n the cat saw the <unk> \n" * 60
WIKI_TEST = " the dog saw the cat \n" * 40


def random_bytes(*shape: int, limit: int = 256, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, limit, shape, np.uint8)


def make_idx(array: Bytes) -> bytes:
    return gzip.compress(bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes())


def make_tar_gz(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def make_zip(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def make_npz(arrays: Mapping[str, npt.ArrayLike]) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **{name: np.asarray(array) for name, array in arrays.items()})  # type: ignore[arg-type]
    return stream.getvalue()


def make_wav(values: npt.NDArray[np.int16], *, rate_hz: int = 16_000, channels: int = 1) -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(values.astype("<i2").tobytes())
    return stream.getvalue()


def make_tone(hertz: float, *, samples: int = 16_000) -> npt.NDArray[np.int16]:
    return (8000 * np.sin(2 * np.pi * hertz * np.arange(samples) / 16_000)).astype(np.int16)


def mnist() -> tuple[bytes, ...]:
    return (
        make_idx(random_bytes(TRAIN, 28, 28)),
        make_idx(random_bytes(TRAIN, limit=10)),
        make_idx(random_bytes(TEST, 28, 28, seed=1)),
        make_idx(random_bytes(TEST, limit=10, seed=1)),
    )


def cifar10() -> tuple[bytes, ...]:
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    records = {name: random_bytes(2, 3073, seed=number) for number, name in enumerate(names)}
    for array in records.values():
        array[:, 0] %= 10
    folder = "cifar-10-batches-bin"
    return (make_tar_gz({f"{folder}/readme.html": b"x", **{f"{folder}/{n}": a.tobytes() for n, a in records.items()}}),)


def cifar100() -> tuple[bytes, ...]:
    train, test = random_bytes(TRAIN, 3074), random_bytes(TEST, 3074, seed=1)
    train[:, :2] %= 20
    test[:, :2] %= 20
    return (make_tar_gz({"cifar-100-binary/train.bin": train.tobytes(), "cifar-100-binary/test.bin": test.tobytes()}),)


def cifar10_subset() -> tuple[bytes, ...]:
    return (
        make_npz(
            {
                "x_train": random_bytes(TRAIN, 32, 32, 3),
                "y_train": random_bytes(TRAIN, limit=10),
                "x_test": random_bytes(TEST, 32, 32, 3, seed=1),
                "y_test": random_bytes(TEST, limit=10, seed=1),
            }
        ),
    )


def make_leaf_files(samples: Callable[[int, int], tuple[list[object], list[object]]]) -> dict[str, bytes]:
    """Two users in two training files; one of them is in the test file too."""
    files = {}
    for part, name, users in (("train", "0", ["b"]), ("train", "1", ["a"]), ("test", "0", ["b"])):
        data = {user: dict(zip("xy", samples(ord(user), 3), strict=True)) for user in users}
        content = {"users": users, "num_samples": [3] * len(users), "user_data": data}
        files[f"{part}/all_data_{name}_niid_0_keep_0_{part}_9.json"] = json.dumps(content).encode()
    return files


def femnist() -> tuple[bytes, ...]:
    return (
        make_zip(make_leaf_files(lambda user, n: (random_bytes(n, 784, limit=2, seed=user).tolist(), [user % 62] * n))),
    )


def shakespeare_leaf() -> tuple[bytes, ...]:
    return (make_zip(make_leaf_files(lambda user, n: ([chr(user) * 80] * n, ["."] * n))),)


def shakespeare() -> tuple[bytes, ...]:
    text = ("to be or not to be " * ROLE_CHARACTERS)[:ROLE_CHARACTERS]
    lines = [
        {"play": "p", "role": "LONG B", "speeches": [text[:1000], text[1000:]]},
        {"play": "p", "role": "SHORT", "speeches": ["Ay."]},
        {"play": "p", "role": "LONG A", "speeches": [text.upper()]},
    ]
    return (gzip.compress("\n".join(map(json.dumps, lines)).encode()),)


def tinyshakespeare() -> tuple[bytes, ...]:
    return (("First Citizen:\nSpeak.\n" * 200).encode(),)


def wikitext2() -> tuple[bytes, ...]:
    files = {"train": WIKI_TRAIN, "valid": "x\n", "test": WIKI_TEST}
    return (make_zip({f"wikitext-2/wiki.{part}.tokens": text.encode() for part, text in files.items()}),)


def speech_commands() -> tuple[bytes, ...]:
    clips = {
        f"./{word}/{speaker}_nohash_{take}.wav": make_wav(make_tone(300 + 100 * number))
        for number, word in enumerate((WORDS[0], WORDS[-1]))
        for speaker in ("0a", "0b", "0c")
        for take in range(2)
    }
    lists = {
        "./testing_list.txt": "".join(f"{word}/0a_nohash_{take}.wav\n" for word in WORDS for take in range(2)).encode(),
        "./validation_list.txt": f"{WORDS[0]}/0b_nohash_1.wav\n".encode(),
    }
    noise = {"./_background_noise_/pink.wav": make_wav(make_tone(50, samples=99)), "./LICENSE": b"CC BY"}
    return (make_tar_gz({**noise, **clips, **lists}),)


def speech_commands_subset() -> tuple[bytes, ...]:
    count = 4 * len(KEYWORDS)
    labels = [KEYWORDS[number % len(KEYWORDS)] for number in range(count)]
    return (
        make_npz(
            {
                "audio": np.concatenate([make_tone(200 + 10 * number, samples=8_000) for number in range(count)]),
                "offsets": np.arange(count + 1) * 8_000,
                "label": labels,
                "speaker": ["" if label == "_silence_" else f"s{n % 9}" for n, label in enumerate(labels)],
                "name": [f"clip {number}" for number in range(count)],
                "sample_rate": 16_000,
            }
        ),
    )


CONTENTS: Mapping[str, Callable[[], tuple[bytes, ...]]] = MappingProxyType(
    {
        "mnist": mnist,
        "fashion_mnist": mnist,
        "cifar10": cifar10,
        "cifar10_subset": cifar10_subset,
        "cifar100": cifar100,
        "femnist": femnist,
        "shakespeare": shakespeare,
        "shakespeare_leaf": shakespeare_leaf,
        "tinyshakespeare": tinyshakespeare,
        "wikitext2": wikitext2,
        "wikitext2_characters": wikitext2,
        "speech_commands": speech_commands,
        "speech_commands_subset": speech_commands_subset,
    }
)
"""The contents of the files of each data set, in the order of its `files`."""


def data_folders(folder: Path) -> DataFolders:
    """The folders that `write_files` fills, and an empty cache."""
    return DataFolders(given=folder / "given", cache=folder / "cache")


def write_files(name: str, folder: Path, *, pinned: bool = True) -> NamedDataset:
    """Write the small files of a data set into a folder; returns the data set with their checksums, or without any."""
    named = DATASETS[name]
    files = []
    for file, content in zip(named.files, CONTENTS[name](), strict=True):
        path = folder / "given" / file.paths[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        checksum = f"sha256:{hashlib.sha256(content).hexdigest()}" if pinned else ""
        files.append(replace(file, url="", checksum=checksum))
    return replace(named, files=tuple(files))
