import contextlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from matrices import examples

from subfleet.protocol.errors import DataError, FileError
from subfleet.protocol.messages import Profile, decode, encode
from subfleet.tasks import Dataset, load_digits, read_dataset, write_npz
from subfleet.tasks.dataset import MAX_CLASSES
from subfleet.tasks.named_dataset import DATASETS

INPUTS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=5, max_side=5),
    elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
)


def save(path: Path, arrays: Mapping[str, npt.ArrayLike]) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, np.asarray(array))
    return str(path)


@pytest.mark.slow
@examples(15)
@given(inputs=INPUTS)
def test_a_written_file_is_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, inputs: npt.NDArray[np.float32]
) -> None:
    path = tmp_path_factory.mktemp("npz") / "data.npz"
    dataset = Dataset(inputs=inputs, labels=np.arange(len(inputs), dtype=np.int64))
    write_npz(path, dataset)
    again = read_dataset(str(path))
    assert again.inputs.shape == inputs.shape
    assert again.inputs.tobytes() == inputs.tobytes()
    assert again.labels.tolist() == dataset.labels.tolist()
    assert [entry.name for entry in path.parent.iterdir()] == ["data.npz"]


@pytest.mark.parametrize(("x", "y"), [("x", "y"), ("inputs", "labels")])
def test_bytes_are_scaled_to_0_to_1(tmp_path: Path, x: str, y: str) -> None:
    source = save(tmp_path / "data.npz", {x: np.array([[0, 255], [51, 102]], np.uint8), y: np.array([1, 0], np.int32)})
    dataset = read_dataset(source)
    assert dataset.inputs.dtype == np.float32
    assert dataset.inputs.flatten().tolist() == pytest.approx([0, 1, 0.2, 0.4])
    assert dataset.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 5, 6), (2, 1, 5, 6)),
        ((2, 5, 6, 3), (2, 3, 5, 6)),
        ((2, 5, 6, 1), (2, 1, 5, 6)),
        ((2, 3, 5, 6), (2, 3, 5, 6)),
        ((2, 3, 5, 3), (2, 3, 5, 3)),
        ((2, 7), (2, 7)),
    ],
)
def test_images_become_channels_first(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).random(shape)
    dataset = read_dataset(save(tmp_path / "data.npz", {"x": x, "y": np.zeros((2, 1), np.uint8)}))
    assert dataset.inputs.shape == expected
    if len(shape) == 4 and expected != shape:
        assert dataset.inputs[1, 0, 4, 5] == np.float32(x[1, 4, 5, 0])


@pytest.mark.parametrize("name", ["written", "own"])
def test_tokens_and_targets_keep_their_shapes(tmp_path: Path, name: str) -> None:
    tokens, following = np.array([[4, 0, 2], [1, 3, 9]], np.int32), np.array([[0, 2, -1], [3, 9, -100]], np.int16)
    dataset = read_dataset(save(tmp_path / "own.npz", {"x": tokens, "y": following}))
    if name == "written":
        write_npz(tmp_path / "written.npz", dataset)
        dataset = read_dataset(str(tmp_path / "written.npz"))
    assert dataset.inputs.dtype == dataset.labels.dtype == np.int64
    assert (dataset.inputs.tolist(), dataset.labels.tolist()) == (tokens.tolist(), following.tolist())
    assert (dataset.sample_shape, dataset.label_shape) == ((3,), (3,))
    summary = dataset.summary()
    assert summary.class_counts == (1, 0, 1, 1, 0, 0, 0, 0, 0, 1)
    assert summary.data_bytes == 2 * 2 * 3 * 8


def test_owners_are_written_and_read_back(tmp_path: Path) -> None:
    owners = np.array([4, -1, 0], np.int64)
    dataset = Dataset(inputs=np.zeros((3, 2), np.float32), labels=np.arange(3), owners=owners)
    write_npz(tmp_path / "data.npz", dataset)
    again = read_dataset(str(tmp_path / "data.npz"))
    assert again.owners is not None
    assert again.owners.tolist() == owners.tolist()
    selected = again.take(np.array([2, 0]))
    assert selected.owners is not None
    assert (selected.labels.tolist(), selected.owners.tolist()) == ([2, 0], [0, 4])
    own = save(tmp_path / "own.npz", {"x": np.zeros((2, 3)), "y": [0, 1], "owners": np.array([3, 3], np.uint8)})
    assert read_dataset(own).owners is not None


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_numbers_as_labels_are_targets(tmp_path: Path, shape: tuple[int, ...]) -> None:
    targets = np.random.default_rng(0).random(shape)
    dataset = read_dataset(save(tmp_path / "data.npz", {"x": np.zeros((2, 3)), "y": targets}))
    assert dataset.labels.dtype == np.float32
    assert dataset.labels.tolist() == targets.astype(np.float32).tolist()
    assert dataset.summary().class_counts == ()


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": np.zeros((2, 3))}, "must contain x and y"),
        ({"x": np.zeros((2, 3)), "y": ["a", "b"]}, "must be integers"),
        ({"x": np.zeros((2, 3), bool), "y": [0, 1]}, "must be uint8"),
        ({"x": [[0, 3], [1, -1]], "y": [0, 1]}, "indices must be 0 or more"),
        ({"x": np.full((1, 2), 2**63, np.uint64), "y": [0]}, "not a valid index"),
        ({"x": np.zeros((2, 3)), "y": [0.0, np.nan]}, "not finite"),
        ({"x": np.zeros((2, 3)), "y": np.zeros((2, 0))}, "labels have the shape"),
        ({"x": np.zeros((2, 3)), "y": 0}, "one for each sample"),
        ({"x": np.zeros((2, 3)), "y": [0, 1, 2]}, "one for each sample"),
        ({"x": np.zeros((2, 3)), "y": [0, -1]}, "a label is -1, but must be a class index of 0 or more"),
        ({"x": np.zeros((2, 3)), "y": [[-1], [-100]], "layout": "exact"}, "no sample has a label"),
        ({"x": np.full((2, 3), np.nan), "y": [0, 1]}, "not finite"),
        ({"x": [[1.0, np.inf], [0.0, -np.inf]], "y": [0, 1]}, "not finite"),
        ({"x": [[1.0, 1e300]], "y": [0]}, "not finite"),
        ({"x": [[1.0]], "y": [2**15]}, "below 32768"),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0, int)}, "at least one value"),
        ({"x": np.zeros(2), "y": [0, 1]}, "sample shape"),
        ({"x": np.array([{}, {}]), "y": [0, 1]}, "not a readable"),
        ({"x": np.zeros((2, 3)), "y": [0, 1], "owners": [0, -2]}, "the smallest owner is -2"),
        ({"x": np.zeros((2, 3)), "y": [0, 1], "owners": [0]}, "one for each sample"),
        ({"x": np.zeros((2, 3)), "y": [0, 1], "owners": ["a", "b"]}, "owners are <U1"),
    ],
)
def test_arrays_that_cannot_be_used_say_why(tmp_path: Path, arrays: dict[str, npt.ArrayLike], text: str) -> None:
    with pytest.raises(DataError, match=text):
        read_dataset(save(tmp_path / "data.npz", arrays))


@pytest.mark.slow
@examples(60)
@given(data=st.data())
def test_a_damaged_file_is_a_data_error_or_still_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("npz") / "data.npz"
    write_npz(path, Dataset(inputs=np.ones((4, 3), np.float32), labels=np.arange(4)))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content[: data.draw(st.sampled_from([position, len(content)]))])
    with contextlib.suppress(DataError):
        assert len(read_dataset(str(path))) == 4


def test_a_name_that_the_system_refuses_is_a_file_error() -> None:
    with pytest.raises(FileError, match="check the path"):
        read_dataset("x" * 5000)


@pytest.mark.slow
def test_the_counts_of_all_classes_fit_into_one_control_message() -> None:
    labels = np.array([0, MAX_CLASSES - 1], np.int64)
    summary = Dataset(inputs=np.zeros((2, 1), np.float32), labels=labels).summary()
    profile = Profile(
        client_id="c",
        session_id="s",
        device="d",
        runtimes=("onnx",),
        sample_count=2,
        class_counts=tuple(999_999 for _ in summary.class_counts),
        input_shape=summary.input_shape,
        memory_total_bytes=1,
        memory_fraction=1.0,
    )
    assert decode(encode(profile)) == profile


def test_paths_that_name_nothing_are_file_errors(tmp_path: Path) -> None:
    for name in ("missing.npz", "missing"):
        with pytest.raises(FileError):
            read_dataset(str(tmp_path / name))
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(DataError, match="must be a folder"):
        read_dataset(str(tmp_path / "data.csv"))
    dataset = Dataset(inputs=np.ones((1, 1), np.float32), labels=np.zeros(1, np.int64))
    for path in (tmp_path / "data.csv", tmp_path / "nowhere" / "data.npz"):
        with pytest.raises(FileError):
            write_npz(path, dataset)


MODULE = """
import numpy as np
def pair():
    return np.array([[0, 255], [255, 0]], np.uint8), [1, 0]
def single():
    return np.zeros((2, 2))
def broken():
    raise RuntimeError("camera is off")
number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_data.py").write_text(MODULE)
    (tmp_path / "spoiled_data.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    return "own_data"


def test_an_entry_point_gives_the_pair(own_module: str) -> None:
    dataset = read_dataset(f"{own_module}:pair")
    assert dataset.inputs.tolist() == [[0, 1], [1, 0]]
    assert dataset.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("own_data:single", "must return"),
        ("own_data:broken", "camera is off"),
        ("own_data:number", "must name a function"),
        ("own_data:missing", "must name a function"),
        ("no_such_module_here:pair", "PYTHONPATH"),
        ("spoiled_data:pair", "ZeroDivisionError"),
    ],
)
def test_an_entry_point_that_cannot_be_used_says_why(own_module: str, source: str, text: str) -> None:
    assert own_module
    with pytest.raises(DataError, match=text):
        read_dataset(source)


@pytest.mark.slow
def test_digits_are_those_of_scikit_learn_scaled() -> None:
    dataset = load_digits()
    expected = pytest.importorskip("sklearn.datasets").load_digits()
    assert dataset.inputs.tobytes() == (expected.images / 16).astype(np.float32).tobytes()
    assert dataset.labels.tolist() == expected.target.tolist()
    assert dataset.inputs.shape == (1797, 1, 8, 8)
    assert (dataset.inputs.min(), dataset.inputs.max()) == (0, 1)
    assert sum(dataset.summary().class_counts) == 1797
    assert len(dataset.summary().class_counts) == 10


def test_the_parts_of_a_known_data_set_are_sources() -> None:
    train, test = read_dataset("digits:train"), read_dataset("digits:test")
    assert (len(train), len(test)) == (1438, 359)
    rows = np.concatenate([train.inputs, test.inputs]).reshape(-1, 64)
    assert sorted(map(bytes, rows)) == sorted(map(bytes, load_digits().inputs.reshape(-1, 64)))
    again = DATASETS.load("digits").load()
    assert again.test.inputs.tobytes() == test.inputs.tobytes()


def test_another_part_of_a_known_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="must name a part of digits: digits:train or digits:test"):
        read_dataset("digits:validation")


@pytest.mark.slow
def test_a_device_with_data_of_its_own_reads_no_registry(tmp_path: Path) -> None:
    write_npz(tmp_path / "own.npz", load_digits())
    program = (
        "import sys; from subfleet.tasks import read_dataset; print(len(read_dataset(sys.argv[1])))\n"
        "named = ('named_dataset', 'published', 'task', 'download')\n"
        "assert not {f'subfleet.tasks.{name}' for name in named} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, str(tmp_path / "own.npz")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (process.returncode, process.stdout) == (0, "1797\n"), process.stderr
