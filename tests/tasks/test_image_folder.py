import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from subfleet.protocol.errors import DataError, MissingExtraError
from subfleet.tasks import DataForm, describe_source, image_folder, pictures, read_dataset


def write_image(
    path: Path, *, size: tuple[int, int] = (4, 3), mode: str = "L", colour: int | tuple[int, ...] = 255
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def test_classes_are_known_by_name_and_gray_stays_gray(tmp_path: Path) -> None:
    write_image(tmp_path / "b" / "2.png", colour=51)
    write_image(tmp_path / "b" / "1.PNG", colour=102)
    write_image(tmp_path / "a" / "9.bmp", colour=255)
    (tmp_path / "b" / "notes.txt").write_text("no image")
    (tmp_path / "c").mkdir()
    (tmp_path / ".hidden").mkdir()
    dataset = read_dataset(str(tmp_path))
    assert dataset.inputs.shape == (3, 1, 3, 4)
    assert dataset.labels.tolist() == [0, 1, 1]
    assert dataset.class_names == ("a", "b", "c")
    assert dataset.summary().class_counts == (1, 2, 0)
    np.testing.assert_allclose(dataset.inputs[:, 0, 0, 0], [1.0, 0.4, 0.2], rtol=1e-6)


def test_an_empty_class_folder_keeps_its_number(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_image(tmp_path / "b" / "1.png")
    assert read_dataset(str(tmp_path)).labels.tolist() == [1]


def test_the_folder_2_comes_before_the_folder_10(tmp_path: Path) -> None:
    for name in ("10", "2", "1"):
        write_image(tmp_path / name / "1.png")
    dataset = read_dataset(str(tmp_path))
    assert (dataset.class_names, dataset.labels.tolist()) == (("1", "2", "10"), [0, 1, 2])
    write_image(tmp_path / "02" / "1.png")
    with pytest.raises(DataError, match="the classes '02' and '2' are the same number"):
        read_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("classes", "class_count", "expected"),
    [((), 10, [7, 8]), (("x", "8", "7"), 3, [2, 1]), (None, 2, [0, 1])],
)
def test_folders_are_mapped_to_a_models_classes_by_their_names(
    tmp_path: Path, classes: tuple[str, ...] | None, class_count: int, expected: list[int]
) -> None:
    for name in ("7", "8"):
        write_image(tmp_path / name / "1.png")
    form = DataForm(input_shape=(1, 3, 4), class_count=class_count, classes=classes)
    dataset = read_dataset(str(tmp_path), form)
    assert dataset.labels.tolist() == expected
    assert dataset.class_names == (("7", "8") if classes is None else classes)


@pytest.mark.parametrize(
    ("classes", "class_count", "words"),
    [
        ((), 8, "the run has no class '8': its classes are the numbers 0 to 7; rename or remove"),
        (("seven", "8"), 2, "the run has no class '7': its classes are 'seven', '8'; rename or remove"),
        (None, 3, "names 2 classes, but the model has 3; name all of them in `classes` of the run file"),
    ],
)
def test_folders_of_no_class_of_the_model_are_refused(
    tmp_path: Path, classes: tuple[str, ...] | None, class_count: int, words: str
) -> None:
    for name in ("7", "8"):
        write_image(tmp_path / name / "1.png")
    with pytest.raises(DataError, match=words):
        read_dataset(str(tmp_path), DataForm(input_shape=(1, 3, 4), class_count=class_count, classes=classes))


def test_an_accent_is_one_name_however_a_file_system_writes_it(tmp_path: Path) -> None:
    write_image(tmp_path / unicodedata.normalize("NFD", "caf\u00e9") / "1.png")
    assert read_dataset(str(tmp_path)).class_names == ("caf\u00e9",)
    write_image(tmp_path / "caf\u00e9" / "1.png")
    with pytest.raises(DataError, match="twice"):
        read_dataset(str(tmp_path))


def test_one_colour_image_changes_nothing_for_the_others(tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        write_image(tmp_path / "a" / f"{name}.png", colour=51)
    write_image(tmp_path / "b" / "1.png", mode="RGB", colour=(51, 51, 51))
    dataset = read_dataset(str(tmp_path))
    assert dataset.inputs.shape == (4, 1, 3, 4)
    np.testing.assert_allclose(dataset.inputs, 0.2, rtol=1e-6)
    summary = describe_source(str(tmp_path))
    assert (summary.input_shape, summary.other_input_shapes) == ((1, 3, 4), ((3, 3, 4),))
    assert summary.data_bytes == 4 * 3 * 3 * 4 * 4 + 4 * 8  # of the largest form that a model may take


@pytest.mark.parametrize("input_shape", [(1, 3, 4), (3, 3, 4), (3, 4), (36,)])
def test_the_model_decides_between_gray_and_colour(tmp_path: Path, input_shape: tuple[int, ...]) -> None:
    write_image(tmp_path / "a" / "1.png", colour=51)
    write_image(tmp_path / "b" / "1.png", mode="RGB", colour=(51, 51, 51))
    dataset = read_dataset(str(tmp_path), DataForm(input_shape=input_shape, classes=None))
    assert dataset.sample_shape == input_shape
    np.testing.assert_allclose(dataset.inputs, 0.2, rtol=1e-6)


def test_images_of_another_size_than_the_models_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image(tmp_path / "a" / "1.png")
    monkeypatch.setattr(image_folder, "read_pixels", None)
    with pytest.raises(DataError, match=r"have shape \(1, 3, 4\), but the model takes \(1, 8, 8\).*; scale them"):
        read_dataset(str(tmp_path), DataForm(input_shape=(1, 8, 8)))


def test_colours_stay_where_most_images_have_some(tmp_path: Path) -> None:
    write_image(tmp_path / "a" / "1.png", colour=51)
    write_image(tmp_path / "b" / "1.png", mode="RGB", colour=(255, 0, 102))
    write_image(tmp_path / "b" / "2.png", mode="RGBA", colour=(255, 0, 102, 7))
    dataset = read_dataset(str(tmp_path))
    assert dataset.inputs.shape == (3, 3, 3, 4)
    expected = np.array([[0.2] * 3, [1, 0, 0.4], [1, 0, 0.4]], np.float32)
    np.testing.assert_allclose(dataset.inputs[:, :, 2, 3], expected, rtol=1e-6)


def test_rows_are_height_and_columns_are_width(tmp_path: Path) -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    dataset = read_dataset(str(tmp_path))
    assert (dataset.inputs[0, 0] * 255).round().astype(int).tolist() == pixels.tolist()


def test_the_image_of_another_size_is_named_and_not_the_others(tmp_path: Path) -> None:
    write_image(tmp_path / "a" / "1.png", size=(5, 3))
    write_image(tmp_path / "a" / "2.png")
    write_image(tmp_path / "a" / "3.png")
    with pytest.raises(DataError, match=r"1\.png' is 5 x 3, but must be 4 x 3 like 2 of 3 images; scale"):
        read_dataset(str(tmp_path))


@pytest.mark.parametrize("keep", [0, 10, 40, -100])
def test_a_damaged_image_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a" / "1.png"
    path.parent.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (30, 30), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"1\.png"):
        read_dataset(str(tmp_path))


def test_a_huge_image_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "a" / "1.png", size=(40, 40))
    monkeypatch.setattr(pictures, "MAX_IMAGE_PIXELS", 1599)
    monkeypatch.setattr(image_folder, "read_pixels", None)
    with pytest.raises(DataError, match="1600 pixels, but may have at most 1599"):
        read_dataset(str(tmp_path))


@pytest.mark.parametrize("pillow_limit", [700, 1599])
def test_pillows_own_guard_is_a_data_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pillow_limit: int
) -> None:
    write_image(tmp_path / "a" / "1.png", size=(40, 40))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow_limit)
    with pytest.raises(DataError, match="too large"):
        read_dataset(str(tmp_path))


@pytest.mark.parametrize("folders", [[], ["a", "b"]])
def test_a_folder_without_images_says_how_many_classes_it_has(tmp_path: Path, folders: list[str]) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=f"has {len(folders)} class folders and no image"):
        read_dataset(str(tmp_path))


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "a" / "1.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"subfleet\[edge\]"):
        read_dataset(str(tmp_path))
