"""Each reader gives exactly the contents of files in its format."""

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tasks.data_files import (
    CONTENTS,
    ROLE_CHARACTERS,
    TEST,
    TRAIN,
    data_folders,
    make_tar_gz,
    make_tone,
    make_wav,
    make_zip,
    random_bytes,
    write_files,
)

from subfleet.protocol.errors import DataError, FileError
from subfleet.tasks.named_dataset import DATASETS
from subfleet.tasks.readers.speech import KEYWORDS, WORDS
from subfleet.tasks.transforms.tokens import character_tokens


def test_every_data_set_with_files_is_made_here() -> None:
    assert set(CONTENTS) == {name for name, task in DATASETS.items() if task.files}


@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_a_data_set_is_what_its_task_says(name: str, tmp_path: Path) -> None:
    named = write_files(name, tmp_path)
    parts = named.load(data_folders(tmp_path))
    for part in (parts.train, parts.test):
        assert part.sample_shape == named.input_shape
        assert part.inputs.dtype == (np.int64 if named.objective == "next_token" else np.float32)
        assert part.label_shape == (named.input_shape if named.objective == "next_token" else ())
        assert len(part.class_counts()) <= named.class_count
        assert (part.owners is not None) == bool(named.owner)


def test_idx_files_become_images_of_0_to_1(tmp_path: Path) -> None:
    parts = write_files("mnist", tmp_path).load(data_folders(tmp_path))
    for part, count, seed in ((parts.train, TRAIN, 0), (parts.test, TEST, 1)):
        pixels = random_bytes(count, 28, 28, seed=seed)
        assert (part.inputs * 255).round().astype(int).tolist() == pixels[:, None].tolist()
        assert part.labels.tolist() == random_bytes(count, limit=10, seed=seed).tolist()


def test_cifars_records_are_label_then_red_green_and_blue(tmp_path: Path) -> None:
    parts = write_files("cifar10", tmp_path).load(data_folders(tmp_path))
    assert (len(parts.train), len(parts.test)) == (10, 2)
    third = random_bytes(2, 3073, seed=1)[0]
    assert parts.train.labels[2] == third[0] % 10
    assert (parts.train.inputs[2, 1, 0, :3] * 255).round().tolist() == third[1 + 1024 : 1 + 1027].tolist()


def test_cifar_100_takes_the_fine_label(tmp_path: Path) -> None:
    parts = write_files("cifar100", tmp_path).load(data_folders(tmp_path))
    records = random_bytes(TRAIN, 3074)
    assert parts.train.labels.tolist() == (records[:, 1] % 20).tolist()
    assert (parts.train.inputs[1, 0, 0, 0] * 255).round() == records[1, 2]


def test_arrays_with_channels_last_become_channels_first(tmp_path: Path) -> None:
    parts = write_files("cifar10_subset", tmp_path).load(data_folders(tmp_path))
    assert (parts.train.inputs[3, 2, 5, 6] * 255).round() == random_bytes(TRAIN, 32, 32, 3)[3, 5, 6, 2]


@pytest.mark.parametrize("unpacked", [False, True])
def test_leafs_users_keep_their_number_in_both_parts(unpacked: bool, tmp_path: Path) -> None:
    named = write_files("femnist", tmp_path, pinned=False)
    if unpacked:
        archive = tmp_path / "given" / "femnist" / "leaf.zip"
        zipfile.ZipFile(archive).extractall(archive.with_suffix(""))
        archive.unlink()
    parts = named.load(data_folders(tmp_path))
    assert parts.train.owners is not None
    assert parts.test.owners is not None
    assert parts.train.owners.tolist() == [1, 1, 1, 0, 0, 0]
    assert parts.test.owners.tolist() == [1, 1, 1]
    assert parts.train.labels.tolist() == [ord("b") % 62] * 3 + [ord("a") % 62] * 3
    assert parts.test.inputs.reshape(3, 784).tolist() == random_bytes(3, 784, limit=2, seed=ord("b")).tolist()


def test_leafs_texts_are_labelled_at_their_last_place_only(tmp_path: Path) -> None:
    parts = write_files("shakespeare_leaf", tmp_path).load(data_folders(tmp_path))
    assert parts.train.inputs[0].tolist() == character_tokens("b" * 80).tolist()
    assert parts.train.labels[0].tolist() == [-1] * 79 + character_tokens(".").tolist()


def test_the_last_fifth_of_each_role_is_the_test_and_short_roles_are_left_out(tmp_path: Path) -> None:
    parts = write_files("shakespeare", tmp_path).load(data_folders(tmp_path))
    windows = (ROLE_CHARACTERS - 1) // 80
    train_windows = windows - round(windows / 5)
    assert parts.train.owners is not None
    assert parts.test.owners is not None
    assert parts.train.owners.tolist() == [0] * train_windows + [1] * train_windows
    assert parts.test.owners.tolist() == [0] * (windows - train_windows) + [1] * (windows - train_windows)
    text = ("to be or not to be " * 200).upper()
    assert parts.train.inputs[0].tolist() == character_tokens(text[:80]).tolist()
    assert parts.train.labels[0].tolist() == character_tokens(text[1:81]).tolist()
    assert (
        parts.test.inputs[0].tolist() == character_tokens(text[80 * train_windows : 80 * train_windows + 80]).tolist()
    )


def test_words_are_numbered_by_their_frequency_in_the_training_part(tmp_path: Path) -> None:
    parts = write_files("wikitext2", tmp_path).load(data_folders(tmp_path))
    # 0 <unk>, 1 <eos>, then "=" and "the" (twice in each line), then by name: "Title", "cat", "saw"
    line = [2, 4, 2, 1, 3, 5, 6, 3, 0, 1]
    assert parts.train.inputs.reshape(-1)[:20].tolist() == line * 2
    assert parts.train.labels.reshape(-1)[:19].tolist() == (line * 2)[1:]
    assert parts.test.inputs[0, :6].tolist() == [3, 0, 6, 3, 5, 1], "a dog was never seen in training"


def test_speech_is_split_by_its_own_lists_and_owned_by_speakers(tmp_path: Path) -> None:
    parts = write_files("speech_commands", tmp_path).load(data_folders(tmp_path))
    last = len(WORDS) - 1
    assert parts.test.labels.tolist() == [0, 0, last, last]
    assert parts.test.owners is not None
    assert parts.train.owners is not None
    assert parts.test.owners.tolist() == [0, 0, 0, 0]
    assert parts.train.owners.tolist() == [1, 2, 2, 1, 1, 2, 2], "without the clip of the validation list"
    assert parts.train.inputs.mean(dtype=np.float64) == pytest.approx(0, abs=1e-4)
    assert parts.train.inputs.std(dtype=np.float64) == pytest.approx(1, abs=1e-4)


def test_no_speaker_of_the_subset_is_in_both_parts_and_silence_is_nobodys(tmp_path: Path) -> None:
    parts = write_files("speech_commands_subset", tmp_path).load(data_folders(tmp_path))
    assert parts.train.owners is not None
    assert parts.test.owners is not None
    assert set(parts.train.owners.tolist()) & set(parts.test.owners.tolist()) <= {-1}
    for part in (parts.train, parts.test):
        silent = part.labels == KEYWORDS.index("_silence_")
        assert ((part.owners == -1) == silent).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("mnist", gzip.compress(bytes((0, 0, 8, 1, 0, 0, 0, 9)), mtime=0), "does not fit its shape"),
        ("mnist", gzip.compress(bytes((0, 0, 8, 3, 0, 0, 0, 9)), mtime=0), "does not fit its shape"),
        ("mnist", gzip.compress(bytes((0, 0, 13, 1, 0, 0, 0, 0)), mtime=0), "not an IDX file of bytes"),
        (
            "mnist",
            gzip.compress(bytes((0, 0, 8, 3)) + np.array([7, 28, 27], ">u4").tobytes() + bytes(5292), mtime=0),
            "shape",
        ),
        ("mnist", b"<html>404</html>", "Not a gzipped file"),
        ("cifar10", make_tar_gz({"cifar-10-batches-bin/data_batch_1.bin": bytes(3073)}), "it lacks data_batch_2.bin"),
        ("cifar10", make_tar_gz({"cifar-10-batches-bin/data_batch_1.bin": bytes(3072)}), "records of 3073 bytes"),
        ("cifar100", b"", "damaged or another file"),
        ("femnist", make_zip({"train/a.json": b"[]"}), "no user_data"),
        ("femnist", make_zip({"train/a.json": b"["}), "JSONDecodeError"),
        ("femnist", make_zip({"train/a.json": b"[" * 100_000}), "damaged or another file"),
        ("femnist", make_zip({"readme.txt": b""}), "no sample in train"),
        (
            "femnist",
            make_zip({"train/a.json": json.dumps({"user_data": {"u": {"x": [[1]], "y": [1]}}}).encode()}),
            "resh",
        ),
        ("shakespeare", gzip.compress(b'{"play": "p"}', mtime=0), "lacks play, role or speeches"),
        ("shakespeare", gzip.compress(b"", mtime=0), "none of its 0 roles"),
        ("tinyshakespeare", b"\xff\xfe\xff", "UnicodeDecodeError"),
        ("wikitext2", make_zip({"wikitext-2/wiki.train.tokens": b"a"}), r"lacks wiki\.test\.tokens"),
        ("speech_commands", make_tar_gz({"./zero/0a_nohash_0.wav": make_wav(make_tone(5))}), "must have words and"),
        ("speech_commands", make_tar_gz({"./zero/0a_nohash_0.wav": make_wav(make_tone(5), rate_hz=8_000)}), "8000"),
        (
            "speech_commands",
            make_tar_gz({"./zero/0a_nohash_0.wav": make_wav(make_tone(5), channels=2)}),
            r"\(2, 2, 16000\)",
        ),
        ("speech_commands", make_tar_gz({"./zero/0a_nohash_0.wav": b"RIFF"}), "damaged or another file"),
    ],
)
def test_another_file_in_its_place_is_refused_in_one_sentence(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    named = write_files(name, tmp_path, pinned=False)
    (tmp_path / "given" / named.files[0].paths[0]).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        named.load(data_folders(tmp_path))
    assert str(caught.value).startswith(f"data set '{name}' cannot be read from ")
    assert "\n" not in str(caught.value)


def test_a_class_beyond_the_tasks_own_is_refused(tmp_path: Path) -> None:
    named = write_files("femnist", tmp_path, pinned=False)
    user = {"user_data": {"u": {"x": [[0.0] * 784], "y": [62]}}}
    files = {f"{part}/a.json": json.dumps(user).encode() for part in ("train", "test")}
    (tmp_path / "given" / named.files[0].paths[0]).write_bytes(make_zip(files))
    with pytest.raises(DataError, match="classes go up to 62, but must be below 62"):
        named.load(data_folders(tmp_path))


def test_a_missing_file_without_an_address_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"femnist/leaf\.zip.*docs/reference/tasks\.md"):
        DATASETS["femnist"].load(data_folders(tmp_path))
