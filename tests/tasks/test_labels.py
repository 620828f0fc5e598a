"""Labels of all sources are checked against the classes of a model and mapped by name."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.protocol.errors import DataError
from subfleet.tasks import DataForm, Dataset, read_dataset, write_npz
from subfleet.tasks.data_form import fit_to_form
from subfleet.tasks.named_dataset import DATASETS

FORM = DataForm(input_shape=(2,), class_count=3)
WRONG = [
    ([0, 3], "a label of .* is 3, but must be below 3, the number of the model's classes"),
    ([0, -1], "a label is -1, but must be a class index of 0 or more"),
    ([0, -100], "a label is -100, but must be a class index of 0 or more"),
    ([0.0, 1.0], "are floating point numbers, but the model takes classes; write them as integers from 0 to 2"),
]


@pytest.mark.parametrize(("labels", "words"), WRONG)
def test_labels_of_a_file_outside_the_classes_of_the_model_are_refused(
    tmp_path: Path, labels: list[float], words: str
) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 2)), y=np.array(labels))
    with pytest.raises(DataError, match=words):
        read_dataset(str(tmp_path / "data.npz"), FORM)


@pytest.mark.parametrize(("labels", "words"), WRONG)
def test_labels_of_an_entry_point_outside_the_classes_of_the_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: list[float], words: str
) -> None:
    (tmp_path / "odd_labels.py").write_text(f"import numpy\ndef pair(): return numpy.zeros((2, 2)), {labels}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_labels", raising=False)
    with pytest.raises(DataError, match=words):
        read_dataset("odd_labels:pair", FORM)


def test_a_known_data_set_is_checked_and_mapped_by_its_names() -> None:
    digits = read_dataset("digits:test")
    assert digits.class_names == tuple("0123456789")
    form = DataForm(input_shape=(64,), class_count=10, classes=tuple("9876543210"))
    assert read_dataset("digits:test", form).labels.tolist() == (9 - digits.labels).tolist()
    with pytest.raises(DataError, match="the run has no class '7', '8', '9': its classes are the numbers 0 to 6"):
        read_dataset("digits:test", replace(form, class_count=7, classes=()))


def test_every_known_data_set_names_each_of_its_classes_or_none() -> None:
    named = {name for name, task in DATASETS.items() if task.class_names}
    kinds = ("classification", "segmentation")
    assert named == {name for name, task in DATASETS.items() if task.kind.name in kinds}
    for name in named:
        assert len(DATASETS[name].class_names) == DATASETS[name].class_count
        labels = np.arange(DATASETS[name].class_count)
        inputs = np.zeros((len(labels), 1), np.float32)
        assert Dataset(inputs=inputs, labels=labels, class_names=DATASETS[name].class_names).class_counts().all()


@pytest.mark.slow
@given(data=st.data())
def test_a_sample_keeps_the_name_of_its_class_in_every_order_of_a_runs_classes(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True))
    labels = data.draw(st.lists(st.integers(0, len(names) - 1), min_size=1, max_size=9))
    run = data.draw(st.permutations([*names, "x", "y"]))
    dataset = Dataset(inputs=np.zeros((len(labels), 2), np.float32), labels=np.array(labels), class_names=tuple(names))
    mapped = fit_to_form(dataset, DataForm(input_shape=(2,), class_count=len(run), classes=tuple(run)), "data")
    assert [run[label] for label in mapped.labels] == [names[label] for label in labels]
    counted = dict(zip(run, mapped.class_counts().tolist(), strict=True))
    assert counted == {name: sum(names[label] == name for label in labels) for name in run}


def test_positions_without_a_label_stay_without() -> None:
    labels = np.array([[0, 1, -1], [1, -100, 0]])
    texts = Dataset(inputs=np.zeros((2, 3), np.int64), labels=labels, class_names=("a", "b"))
    mapped = fit_to_form(texts, DataForm(input_shape=(3,), class_count=2, classes=("b", "a")), "data")
    assert mapped.labels.tolist() == [[1, 0, -1], [0, -100, 1]]


def test_names_are_written_and_read_back(tmp_path: Path) -> None:
    dataset = Dataset(inputs=np.zeros((2, 2), np.float32), labels=np.array([1, 0]), class_names=("caf\u00e9", "10"))
    write_npz(tmp_path / "data.npz", dataset)
    again = read_dataset(str(tmp_path / "data.npz"))
    assert again.class_names == dataset.class_names
    assert again.take(np.array([1])).class_names == dataset.class_names


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (np.array([1, 2]), "class_names are int64 of shape"),
        (np.array([["a", "b"]]), "must be one string for each class"),
        (np.array(["a"]), "must be indices of the 1 classes named"),
        (np.array(["a", "a"]), "has 'a' twice"),
    ],
)
def test_names_that_cannot_be_those_of_the_labels_are_refused(
    tmp_path: Path, names: npt.NDArray[np.generic], words: str
) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 2)), y=np.array([0, 1]), class_names=names)
    with pytest.raises(DataError, match=words):
        read_dataset(str(tmp_path / "data.npz"))


NUMBERS = DataForm(input_shape=(2,), targets=True, label_shape=(1,))


@pytest.mark.parametrize("labels", [[3, 5], [3.0, 5.0], [[3.0], [5.0]], [[3], [5]]])
def test_numbers_are_taken_in_each_form_that_files_have(tmp_path: Path, labels: list[float]) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 2)), y=np.array(labels))
    targets = read_dataset(str(tmp_path / "data.npz"), NUMBERS).labels
    assert targets.dtype == np.float32
    assert targets.tolist() == [[3.0], [5.0]]


@pytest.mark.parametrize(
    ("form", "labels", "words"),
    [
        (
            replace(NUMBERS, label_shape=(3,)),
            [3.0, 5.0],
            r"have the shape \(\) for each sample, but the model takes \(3,\)",
        ),
        (NUMBERS, [[1.0, 2.0]] * 2, r"have the shape \(2,\) for each sample, but the model takes \(1,\)"),
        (
            replace(FORM, label_shape=(4, 4)),
            [0, 1],
            r"have the shape \(\) for each sample, but the model takes \(4, 4\)",
        ),
        (
            replace(FORM, label_shape=()),
            [[0, 1]] * 2,
            r"have the shape \(2,\) for each sample, but the model takes \(\)",
        ),
    ],
)
def test_labels_of_another_shape_than_the_predictions_are_refused(
    tmp_path: Path, form: DataForm, labels: list[float], words: str
) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 2)), y=np.array(labels))
    with pytest.raises(DataError, match=words):
        read_dataset(str(tmp_path / "data.npz"), form)


def test_classes_with_names_are_no_numbers() -> None:
    with pytest.raises(DataError, match="has named classes, but the model takes numbers as labels"):
        read_dataset("digits:test", DataForm(input_shape=(64,), targets=True))
