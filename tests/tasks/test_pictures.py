"""Pictures of cameras, scanners and other programs: rotated, of unusual modes, damaged, or in other folders."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from subfleet.protocol.errors import DataError
from subfleet.tasks import DataForm, describe_source, read_dataset

GRADIENT = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
"""3 rows and 4 columns of different pixels, so that every rotation shows."""


def save_image(path: Path, image: Image.Image, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)  # type: ignore[arg-type]
    return path


def read_bytes(folder: Path, input_shape: tuple[int, ...] | None = None) -> npt.NDArray[np.uint8]:
    form = None if input_shape is None else DataForm(input_shape=input_shape, classes=None)
    return np.rint(read_dataset(str(folder), form).inputs * 255).astype(np.uint8)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_stands_upright_however_the_camera_was_held(tmp_path: Path, suffix: str, orientation: int) -> None:
    # A camera held this way writes the upright picture, rotated back.
    rotations = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    large = np.kron(GRADIENT, np.ones((8, 8), np.uint8))  # JPEG has blocks of 8 x 8
    image = Image.fromarray(large).convert("RGB")
    if orientation in rotations:
        image = image.transpose(rotations[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, object] = {"exif": exif.tobytes() if suffix == "webp" else exif}
    if suffix == "jpg":
        options["quality"] = 95
    elif suffix == "webp":
        options["lossless"] = True
    save_image(tmp_path / "a" / f"1.{suffix}", image, **options)
    assert describe_source(str(tmp_path)).input_shape == (3, 24, 32)
    gray = read_bytes(tmp_path, (1, 24, 32))[0, 0]
    assert np.abs(gray.astype(int) - large).max() <= 2


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_damaged_exif_tag_does_not_change_the_picture(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "1.jpg", Image.fromarray(GRADIENT), exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert read_bytes(tmp_path).shape == (1, 1, 3, 4)


RED, GRAY = (200, 40, 20), 86
"""A red and its luminance: 0.299 * 200 + 0.587 * 40 + 0.114 * 20."""


@pytest.mark.parametrize(
    ("mode", "suffix", "gray", "tolerance"),
    [
        ("1", "png", True, 0),
        ("L", "png", True, 0),
        ("LA", "png", True, 0),
        ("P", "png", False, 0),
        ("P", "gif", False, 0),
        ("RGB", "bmp", False, 0),
        ("RGBA", "png", False, 0),
        ("CMYK", "tiff", False, 1),
        ("CMYK", "jpg", False, 3),
        ("YCbCr", "tiff", False, 2),
        ("I;16", "png", True, 0),
        ("I;16", "tiff", True, 0),
    ],
)
def test_every_mode_is_read_in_gray_and_in_colour(
    tmp_path: Path, mode: str, suffix: str, gray: bool, tolerance: int
) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((3, 4), GRAY * 257, np.uint16))
    elif mode == "1":
        image = Image.new("1", (4, 3), 1)
    elif gray:
        image = Image.new("L", (4, 3), GRAY).convert(mode)
    elif mode == "P":
        image = Image.new("P", (4, 3), 1)
        image.putpalette([0, 0, 0, *RED])
    else:
        image = Image.new("RGB", (4, 3), RED).convert(mode)
    save_image(tmp_path / "a" / f"1.{suffix}", image)
    expected_gray = 255 if mode == "1" else GRAY
    expected_colour = (expected_gray,) * 3 if gray else RED
    assert describe_source(str(tmp_path)).input_shape == (1 if gray else 3, 3, 4)
    gray_values = read_bytes(tmp_path, (1, 3, 4)).astype(int)
    assert np.abs(gray_values - expected_gray).max() <= tolerance
    colour_values = read_bytes(tmp_path, (3, 3, 4)).astype(int)
    assert np.abs(np.moveaxis(colour_values, 1, -1) - expected_colour).max() <= tolerance


def test_transparency_is_dropped(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "1.png", Image.new("RGBA", (4, 3), (*RED, 0)))
    save_image(tmp_path / "a" / "2.png", Image.new("P", (4, 3), 0), transparency=0)
    assert read_bytes(tmp_path)[0, :, 0, 0].tolist() == list(RED)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pictures_of_unknown_number_formats_are_refused(tmp_path: Path, mode: str) -> None:
    save_image(tmp_path / "a" / "1.tiff", Image.new(mode, (4, 3), 7))
    with pytest.raises(DataError, match=rf"1\.tiff' has mode {mode}, but must have 8 or 16 bits per channel"):
        read_dataset(str(tmp_path))


def test_files_named_as_pictures_are_opened_only_as_pictures(tmp_path: Path) -> None:
    """Pillow passes PostScript to another program, whatever the name of the file is."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 3\n%%EndComments\n")
    with pytest.raises(DataError, match=r"1\.png' cannot be read \(it is not a picture of a known format\)"):
        read_dataset(str(tmp_path))


def test_a_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    with pytest.raises(DataError, match=r"1\.png' is too large to decode"):
        describe_source(str(tmp_path))


def test_folders_of_the_system_are_no_classes(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        save_image(tmp_path / name / "1.png", Image.fromarray(GRADIENT))
    system_folders = [
        "__MACOSX",
        "lost+found",
        "@eaDir",
        "#recycle",
        "$RECYCLE.BIN",
        "System Volume Information",
        ".Trash-0",
    ]
    for name in system_folders:
        save_image(tmp_path / name / "1.png", Image.fromarray(GRADIENT))
    save_image(tmp_path / "cat" / "._1.png", Image.fromarray(GRADIENT))
    save_image(tmp_path / "cat" / "@eaDir" / "1.png", Image.fromarray(GRADIENT))
    (tmp_path / "cat" / "folder.png").mkdir()
    for file in (".DS_Store", "Thumbs.db", "desktop.ini"):
        (tmp_path / file).write_bytes(b"\0")
        (tmp_path / "cat" / file).write_bytes(b"\0")
    dataset = read_dataset(str(tmp_path))
    assert (dataset.class_names, dataset.labels.tolist()) == (("cat", "dog"), [0, 1])
    summary = describe_source(str(tmp_path))
    assert (summary.class_names, summary.class_counts, summary.sample_count) == (("cat", "dog"), (1, 1), 2)


@pytest.mark.parametrize("read", [read_dataset, describe_source])
def test_all_pictures_that_cannot_be_used_are_named_at_once(tmp_path: Path, read: object) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 30), np.uint8))
    buffer = io.BytesIO()
    noise.save(buffer, "png")
    save_image(tmp_path / "a" / "good.png", noise)
    (tmp_path / "a" / "empty.png").write_bytes(b"")
    (tmp_path / "a" / "short.png").write_bytes(buffer.getvalue()[:-100])
    save_image(tmp_path / "b" / "deep.tiff", Image.new("F", (30, 30), 0.5))
    assert callable(read)
    with pytest.raises(DataError, match="3 images of") as caught:
        read(str(tmp_path))
    for name in ("'a/empty.png' cannot be read", "'a/short.png' cannot be decoded", "'b/deep.tiff' has mode F"):
        assert name in str(caught.value)
    assert "good" not in str(caught.value)


def test_the_list_of_damaged_pictures_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(300):
        (tmp_path / "a" / f"{number:03}{'x' * 200}.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"300 images of .*; and 290 more$") as caught:
        read_dataset(str(tmp_path))
    assert len(str(caught.value)) < 3000


def test_the_summary_describes_pictures_as_they_are_fed(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "1.png", Image.fromarray(GRADIENT))
    save_image(tmp_path / "b" / "2.jpg", Image.new("L", (9, 5), 255), quality=95)
    save_image(tmp_path / "b" / "3.png", Image.fromarray(GRADIENT.T.copy()))
    save_image(tmp_path / "b" / "4.png", Image.fromarray(GRADIENT))
    summary = describe_source(str(tmp_path))
    assert (summary.input_shape, summary.sizes_differ, summary.class_counts) == ((1, 3, 4), True, (1, 3))
    values = np.concatenate([GRADIENT.ravel() / 255] * 3 + [np.ones(45)])
    assert summary.inputs is not None
    assert (summary.inputs.kind, summary.inputs.minimum, summary.inputs.maximum) == ("numbers", 0.0, 1.0)
    assert summary.inputs.mean == pytest.approx(values.mean())
    assert summary.inputs.deviation == pytest.approx(values.std())
    assert summary.data_bytes == (3 * 12 + 45) * 3 * 4 + 4 * 8
    with pytest.raises(DataError, match=r"scale all images to one size, or set data\.transform in the run file"):
        read_dataset(str(tmp_path))
