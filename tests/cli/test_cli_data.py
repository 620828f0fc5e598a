"""`subfleet data` lists the data sets and describes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tasks.data_files import femnist
from typer.testing import CliRunner

from subfleet.cli.data import data
from subfleet.protocol.exit_codes import ExitCode
from subfleet.tasks.named_dataset import DATASETS


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a small FEMNIST, and nothing in the cache."""
    folder = tmp_path / "given"
    (folder / "femnist").mkdir(parents=True)
    (folder / "femnist/leaf.zip").write_bytes(femnist()[0])
    monkeypatch.setenv("SUBFLEET_DATA", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def read_json(*arguments: str) -> Mapping[str, Any]:
    result = CliRunner().invoke(data, arguments)
    assert result.exit_code == 0, result.output
    output: dict[str, Any] = json.loads(result.stdout)
    return output


def test_the_list_names_every_data_set_and_where_its_files_are(data_folder: Path) -> None:
    assert data_folder.is_dir()
    listed = read_json("list", "--json")
    assert set(listed) == set(DATASETS)
    assert [listed[name]["files"] for name in ("digits", "femnist", "mnist", "shakespeare")] == [
        "installed",
        "given",
        "download",
        "missing",
    ]
    assert listed["cifar10_subset"]["stand_in_for"] == "cifar10"
    result = CliRunner().invoke(data, ["list"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in DATASETS), "names are not cut on a narrow screen"


def test_a_set_with_one_file_of_four_is_still_to_be_downloaded(data_folder: Path) -> None:
    (data_folder / "mnist").mkdir()
    (data_folder / "mnist/t10k-labels-idx1-ubyte.gz").write_bytes(b"x")
    assert read_json("list", "--json")["mnist"]["files"] == "download"


@pytest.mark.slow
def test_show_counts_samples_classes_owners_and_clients(data_folder: Path) -> None:
    assert data_folder.is_dir()
    description = read_json("show", "femnist", "--json", "--partition", "natural", "--clients", "2")
    assert (description["input_shape"], description["classes"], description["owner"]) == ([1, 28, 28], 62, "writer")
    assert description["class_names"][9:12] == ["9", "A", "B"]
    assert (description["train"]["samples"], description["train"]["owners"]) == (6, 2)
    assert (description["test"]["samples"], description["test"]["owners"]) == (3, 1)
    clients = description["partition"]["clients"]
    assert [client["samples"] for client in clients] == [3, 3]
    counts = np.zeros(62, int)
    for client in clients:
        counts[: len(client["class_counts"])] += client["class_counts"]
    assert counts[: len(description["train"]["class_counts"])].tolist() == description["train"]["class_counts"]


@pytest.mark.slow
def test_show_prints_the_same_for_people(data_folder: Path) -> None:
    assert data_folder.is_dir()
    result = CliRunner().invoke(data, ["show", "femnist", "--partition", "iid", "--clients", "3"])
    assert result.exit_code == 0, result.output
    for words in (
        "train: 6 samples of 2 writers",
        "sample: 1 x 28 x 28, 62 classes",
        "class names: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, A, B,",
        "iid over 3 clients",
        "licence: ",
    ):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [(b"PK", ExitCode.DATA, "damaged or another file"), (None, ExitCode.FILE, "put it there")],
)
def test_damaged_and_missing_files_are_one_sentence(
    data_folder: Path, content: bytes | None, code: ExitCode, words: str
) -> None:
    archive = data_folder / "femnist/leaf.zip"
    archive.unlink() if content is None else archive.write_bytes(content)
    result = CliRunner().invoke(data, ["show", "femnist"])
    assert result.exit_code == code
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (
            ("--partition", "random"),
            ExitCode.CONFIG,
            "one of ['iid', 'dirichlet', 'pathological', 'shard', 'natural']",
        ),
        (("--partition", "dirichlet", "--alpha", "0"), ExitCode.CONFIG, "alpha is 0.0"),
        (("--partition", "natural", "--clients", "3"), ExitCode.CONFIG, "2 owners cannot be split over 3 clients"),
        (("--clients", "0"), ExitCode.USAGE, "--clients"),
    ],
)
def test_a_wrong_partition_is_one_sentence(
    data_folder: Path, options: tuple[str, ...], code: ExitCode, words: str
) -> None:
    assert data_folder.is_dir()
    result = CliRunner().invoke(data, ["show", "femnist", *options])
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.output
