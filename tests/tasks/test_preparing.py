"""The transform of a run: the effect of each key, which is the same for image files and arrays."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from subfleet.protocol.errors import DataError, ProtocolError
from subfleet.protocol.transform import DataTransform, format_transform, parse_transform
from subfleet.tasks import DataForm, Dataset, read_dataset, write_npz
from subfleet.tasks.arrays_file import make_dataset
from subfleet.tasks.measuring import measure_inputs

WHOLE = DataTransform(channels=3, resize=(12,), crop=(8, 10), mean=(0.5, 0.4, 0.3), deviation=(0.25, 0.5, 0.125))


def pixels(height: int, width: int, channels: int = 3) -> npt.NDArray[np.uint8]:
    """The pixels of one picture, channels last."""
    picture = np.random.default_rng(height * width).integers(0, 256, (height, width, channels), np.uint8)
    return picture if channels > 1 else picture[..., 0]


def write_images(folder: Path, *pictures: npt.NDArray[np.uint8], suffix: str = "png") -> str:
    (folder / "a").mkdir(parents=True)
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / "a" / f"{number}.{suffix}")
    return str(folder)


def make_form(transform: DataTransform, shape: tuple[int, ...]) -> DataForm:
    return DataForm(input_shape=shape, classes=None, transform=transform)


def test_pictures_of_any_size_and_mode_become_one_shape(tmp_path: Path) -> None:
    source = write_images(tmp_path / "d", pixels(40, 30), pixels(13, 90, 1), pixels(12, 12), pixels(8, 14))
    dataset = read_dataset(source, make_form(WHOLE, (3, 8, 10)))
    assert dataset.inputs.shape == (4, 3, 8, 10)
    assert dataset.transform == WHOLE
    # Scaled by Pillow, cut out and normalised by NumPy.
    scaled = np.asarray(Image.fromarray(pixels(40, 30)).resize((12, 16), Image.Resampling.BILINEAR), np.float32)
    cut = scaled[4:12, 1:11] / np.float32(255)
    expected = (cut - np.array([0.5, 0.4, 0.3], np.float32)) / np.array([0.25, 0.5, 0.125], np.float32)
    np.testing.assert_array_equal(dataset.inputs[0], np.moveaxis(expected, 2, 0))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("target", [0, 1, 3])
def test_a_picture_becomes_the_same_in_a_file_and_in_an_array(tmp_path: Path, channels: int, target: int) -> None:
    picture, expected_channels = pixels(20, 17, channels), target or channels
    transform = DataTransform(channels=target, resize=(9, 8), mean=(0.5,), deviation=(0.25,))
    form = make_form(transform, (expected_channels, 9, 8))
    from_file = read_dataset(write_images(tmp_path / "d", picture), form)
    np.savez(tmp_path / "bytes.npz", x=picture[np.newaxis], y=np.zeros(1, np.int64))
    np.savez(tmp_path / "shares.npz", x=picture[np.newaxis].astype(np.float32) / 255, y=np.zeros(1, np.int64))
    for name in ("bytes.npz", "shares.npz"):
        from_array = read_dataset(str(tmp_path / name), form)
        np.testing.assert_array_equal(from_array.inputs, from_file.inputs)


def test_other_numbers_are_scaled_as_they_are() -> None:
    corners = np.array([[-8.0, 0.5], [4.0, 1000.0]], np.float32)
    rows = corners.repeat(2, 0).repeat(2, 1)
    dataset = make_dataset(rows[np.newaxis], np.zeros(1, np.int64), "test")
    scaled = apply_transform(dataset, DataTransform(resize=(2, 2)))
    share = np.array([[6, 1], [1, 6]]) / 7  # the weights of a triangle over 4 of the old pixels, inside the picture
    np.testing.assert_allclose(scaled[0, 0], share @ corners @ share.T, rtol=1e-5)
    np.testing.assert_array_equal(
        apply_transform(dataset, DataTransform(mean=(1.0,), deviation=(2.0,)))[0, 0], (rows - 1) / 2
    )


def apply_transform(dataset: Dataset, transform: DataTransform) -> npt.NDArray[np.generic]:
    from subfleet.tasks.transforms.data_transform import transform_dataset

    return transform_dataset(dataset, transform, "test").inputs


@given(
    arrays.arrays(np.uint8, arrays.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=20)),
    st.lists(st.integers(1, 24), min_size=1, max_size=2).map(tuple),
)
def test_the_resulting_size_is_the_predicted_one(picture: npt.NDArray[np.uint8], resize: tuple[int, ...]) -> None:
    transform = DataTransform(resize=resize)
    dataset = make_dataset(picture[np.newaxis], np.zeros(1, np.int64), "test")
    result = apply_transform(dataset, transform)
    assert result.shape[1:] == transform.shape_of((1, *picture.shape))
    assert picture.min() / 255 - 1e-6 <= result.min() <= result.max() <= picture.max() / 255 + 1e-6
    if len(resize) == 1:
        assert min(result.shape[2:]) == resize[0]


def test_transformed_data_are_marked_and_not_transformed_again(tmp_path: Path) -> None:
    form = make_form(WHOLE, (3, 8, 10))
    once = read_dataset(write_images(tmp_path / "d", pixels(40, 30), pixels(20, 20)), form)
    write_npz(tmp_path / "once.npz", once)
    again = read_dataset(str(tmp_path / "once.npz"), form)
    np.testing.assert_array_equal(again.inputs, once.inputs)
    assert again.transform == WHOLE
    for other in (None, DataTransform(resize=(8, 10))):
        with pytest.raises(DataError, match=r"once\.npz' were already transformed, and differently"):
            read_dataset(str(tmp_path / "once.npz"), DataForm(input_shape=(3, 8, 10), classes=None, transform=other))


def test_a_data_file_with_an_unknown_transform_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 4)), y=np.zeros(2, np.int64), data_transform=np.array('{"spin": 3}'))
    with pytest.raises(DataError, match=r"a\.npz' was transformed in an unknown way"):
        read_dataset(str(tmp_path / "a.npz"))


def test_statistics_are_those_before_normalisation(tmp_path: Path) -> None:
    source = write_images(tmp_path / "d", pixels(8, 8), pixels(8, 8))
    plain, normalised = DataTransform(), DataTransform(mean=(0.5, 0.4, 0.3), deviation=(0.25, 0.5, 0.125))
    statistics = [
        measure_inputs(read_dataset(source, make_form(transform, (3, 8, 8)))) for transform in (plain, normalised)
    ]
    for name in ("minimum", "maximum", "mean", "deviation"):
        assert getattr(statistics[0], name) == pytest.approx(getattr(statistics[1], name), abs=1e-6)


@pytest.mark.parametrize(
    ("transform", "array", "words"),
    [
        (DataTransform(crop=(9,)), np.zeros((2, 1, 8, 8)), "9 x 9 cannot be cut out of 8 x 8; resize it first"),
        (DataTransform(resize=(8, 8)), np.zeros((2, 64)), r"shape \(64,\) are not pictures"),
        (DataTransform(mean=(0.5,) * 3, deviation=(1.0,) * 3), np.zeros((2, 1, 8, 8)), "mean has 3 numbers, but .* 1"),
        (DataTransform(channels=1), np.zeros((2, 5, 8, 8)), "5 channels cannot be converted to 1"),
        (DataTransform(resize=(8, 8)), np.zeros((2, 8), np.int64), "are indices, but .* is for pictures"),
        (DataTransform(resize=(4096,)), np.zeros((1, 1, 1, 8)), "8 x 1 would be scaled to 32768 x 4096"),
    ],
)
def test_samples_that_cannot_be_transformed_are_named(
    tmp_path: Path, transform: DataTransform, array: npt.NDArray[np.generic], words: str
) -> None:
    np.savez(tmp_path / "mine.npz", x=array, y=np.zeros(len(array), np.int64))
    with pytest.raises(DataError, match=rf"mine\.npz' .*{words}"):
        read_dataset(str(tmp_path / "mine.npz"), make_form(transform, (1, 8, 8)))


def test_pictures_that_are_too_small_are_listed(tmp_path: Path) -> None:
    source = write_images(tmp_path / "d", pixels(8, 8), pixels(4, 8), pixels(8, 3))
    with pytest.raises(DataError, match=r"2 images .*a/1\.png' does not fit .* out of 8 x 4.*a/2\.png'"):
        read_dataset(source, make_form(DataTransform(crop=(6,)), (3, 6, 6)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"channels": 2}, "channels is 2, but must be 1 for gray, 3 for colour"),
        ({"resize": (0, 4)}, r"resize\[0\] is 0, but must be from 1 to 4096"),
        ({"resize": (4, 4, 4)}, "resize has 3 items, but must have at most 2"),
        ({"crop": (5000,)}, r"crop\[0\] is 5000, but must be from 1 to 4096"),
        ({"resize": (8,), "crop": (9, 8)}, "choose a crop within that size"),
        ({"mean": (0.5,)}, "mean has 1 numbers and deviation 0"),
        ({"channels": 1, "mean": (0.5,) * 3, "deviation": (1.0,) * 3}, "mean has 3 numbers, but there are 1 channels"),
        ({"mean": (0.5,), "deviation": (0.0,)}, r"deviation\[0\] is 0.0, but must be from 1e-06"),
        ({"mean": (float("nan"),), "deviation": (1.0,)}, r"mean\[0\] is nan, but must be a finite number"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataTransform(**fields)  # type: ignore[arg-type]


def test_a_transform_round_trips_as_text() -> None:
    assert parse_transform(format_transform(WHOLE)) == WHOLE
    for text in ("", "[]", '{"channels": 2}', '{"resize": [1, 2, 3]}', '{"more": 1}'):
        with pytest.raises(ProtocolError):
            parse_transform(text)
