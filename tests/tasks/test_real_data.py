"""The real data sets, if SUBFLEET_DATA names their folder."""

import os
from pathlib import Path

import numpy as np
import pytest

from subfleet.tasks import read_dataset
from subfleet.tasks.named_dataset import DATASETS
from subfleet.tasks.source_files import find_availability, find_data_folders

DATA = os.environ.get("SUBFLEET_DATA", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA, reason="SUBFLEET_DATA names no folder of real data")]


def require_data(name: str) -> None:
    if any(find_availability(file, find_data_folders()) != "given" for file in DATASETS[name].files):
        pytest.skip(f"SUBFLEET_DATA has no {name}")


def test_fashion_mnist_has_its_published_counts() -> None:
    require_data("fashion_mnist")
    parts = DATASETS["fashion_mnist"].load()
    assert parts.train.class_counts().tolist() == [6000] * 10
    assert parts.test.class_counts().tolist() == [1000] * 10
    assert parts.train.labels[:4].tolist() == [9, 0, 0, 3]
    mean = float(parts.train.inputs.mean(dtype=np.float64))
    assert mean == pytest.approx(0.2860, abs=1e-4), "the mean that users of the data set cite"
    assert parts.train.inputs[::60].std(dtype=np.float64) == pytest.approx(0.353, abs=0.005)


def test_cifar10s_subset_has_its_counts_and_channels() -> None:
    require_data("cifar10_subset")
    parts = DATASETS["cifar10_subset"].load()
    assert parts.train.class_counts().tolist() == [1000] * 10
    assert parts.test.class_counts().tolist() == [200] * 10
    means = parts.train.inputs.mean((0, 2, 3), dtype=np.float64)
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=0.01)


def test_shakespeares_roles_speak_english() -> None:
    require_data("shakespeare")
    parts = DATASETS["shakespeare"].load()
    assert parts.train.owners is not None
    assert parts.test.owners is not None
    owners = set(parts.train.owners.tolist())
    assert owners == set(parts.test.owners.tolist()) == set(range(len(owners)))
    assert len(owners) > 600
    counts = parts.train.class_counts()
    usual = [chr(token - 2 + 32) for token in np.argsort(-counts)[:4]]
    assert usual[:2] == [" ", "e"]
    assert counts[0] == 0


def test_tiny_shakespeare_knows_65_symbols() -> None:
    require_data("tinyshakespeare")
    parts = DATASETS["tinyshakespeare"].load()
    assert np.count_nonzero(parts.train.class_counts()) == 65
    assert len(parts.train) + len(parts.test) == pytest.approx(1_115_394 / 80, abs=2)


def test_the_clips_of_speech_commands_can_be_told_apart() -> None:
    require_data("speech_commands_subset")
    parts = DATASETS["speech_commands_subset"].load()
    assert (parts.train.class_counts() + parts.test.class_counts()).tolist() == [130] * 12
    assert parts.train.owners is not None
    assert parts.test.owners is not None
    speakers = set(parts.train.owners.tolist()) | set(parts.test.owners.tolist())
    assert len(speakers - {-1}) == 223
    # A nearest-mean classifier is right more than twice as often as chance on speakers that it never heard.
    flat = {name: part.inputs.reshape(len(part), -1) for name, part in (("train", parts.train), ("test", parts.test))}
    centres = np.stack([flat["train"][parts.train.labels == label].mean(0) for label in range(12)])
    nearest = ((flat["test"][:, None] - centres) ** 2).sum(2).argmin(1)
    assert np.mean(nearest == parts.test.labels) > 2 / 12


def test_a_part_is_named_as_data_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_data("cifar10_subset")
    monkeypatch.chdir(tmp_path)
    assert len(read_dataset("cifar10_subset:test")) == 2000
