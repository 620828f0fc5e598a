import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from subfleet.protocol.errors import DataError, MissingExtraError
from subfleet.tasks import image_folder, read_dataset


def write_image(
    path: Path, *, size: tuple[int, int] = (4, 3), mode: str = "L", colour: int | tuple[int, ...] = 255
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def test_classes_are_numbered_by_name_and_gray_stays_gray(tmp_path: Path) -> None:
    write_image(tmp_path / "b" / "2.png", colour=51)
    write_image(tmp_path / "b" / "1.PNG", colour=102)
    write_image(tmp_path / "a" / "9.bmp", colour=255)
    (tmp_path / "b" / "notes.txt").write_text("no image")
    (tmp_path / "c").mkdir()
    (tmp_path / ".hidden").mkdir()
    dataset = read_dataset(str(tmp_path))
    assert dataset.inputs.shape == (3, 1, 3, 4)
    assert dataset.labels.tolist() == [0, 1, 1]
    np.testing.assert_allclose(dataset.inputs[:, 0, 0, 0], [1.0, 0.4, 0.2], rtol=1e-6)


def test_an_empty_class_folder_keeps_its_number(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_image(tmp_path / "b" / "1.png")
    assert read_dataset(str(tmp_path)).labels.tolist() == [1]


def test_one_colour_image_makes_all_of_them_rgb(tmp_path: Path) -> None:
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


def test_two_sizes_are_refused_with_both_names(tmp_path: Path) -> None:
    write_image(tmp_path / "a" / "1.png")
    write_image(tmp_path / "a" / "2.png", size=(5, 3))
    with pytest.raises(DataError, match=r"2\.png' is 5 x 3, but must be 4 x 3 like .*1\.png"):
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


def test_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.zeros((3, 4), np.uint16)).save(tmp_path / "a" / "1.png")
    with pytest.raises(DataError, match="8 bits"):
        read_dataset(str(tmp_path))


def test_a_huge_image_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "a" / "1.png", size=(40, 40))
    monkeypatch.setattr(image_folder, "MAX_IMAGE_PIXELS", 1599)
    monkeypatch.setattr(image_folder, "_read_pixels", None)
    with pytest.raises(DataError, match="1600 pixels, but may have 1599"):
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
