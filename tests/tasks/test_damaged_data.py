"""A damaged file gives the right data or an error of one sentence."""

import gzip
import io
import re
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples
from tasks.data_files import CONTENTS, data_folders, make_tar_gz, make_zip, write_files

from subfleet.protocol.errors import DataError
from subfleet.tasks import archives
from subfleet.tasks.readers import images

MIB = 2**20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar10_subset", "femnist", "shakespeare", "wikitext2"])
@examples(10)
@given(data=st.data())
def test_damage_without_a_checksum_is_a_data_error_or_harmless(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp(name)
    named = write_files(name, folder, pinned=False)
    path = folder / "given" / data.draw(st.sampled_from(named.files)).paths[0]
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content) - 1)))])
    try:
        parts = named.load(data_folders(folder))
    except DataError:
        return
    assert parts.train.sample_shape == named.input_shape


def test_an_archive_whose_parts_lie_before_its_beginning_is_damaged(tmp_path: Path) -> None:
    """The end of a zip archive holds the offset of its directory, from which readers compute all other offsets."""
    named = write_files("wikitext2", tmp_path, pinned=False)
    path = tmp_path / "given" / named.files[0].paths[0]
    content = bytearray(path.read_bytes())
    content[-6:-2] = (int.from_bytes(content[-6:-2], "little") + 1000).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(DataError, match="it is damaged or another file"):
        named.load(data_folders(tmp_path))


@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_one_other_byte_is_caught_by_the_checksum(name: str, tmp_path: Path) -> None:
    named = write_files(name, tmp_path)
    path = tmp_path / "given" / named.files[-1].paths[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}.* sha256 checksum .*put the right file there"):
        named.load(data_folders(tmp_path))
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match="sha256 checksum"):
        named.load(data_folders(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gzip", "tar", "zip", "npz", "folder"])
def test_an_archive_that_unpacks_to_too_much_takes_no_memory(kind: str, tmp_path: Path) -> None:
    limit, zeros = MIB, bytes(64 * MIB)
    path = tmp_path / "file"
    if kind == "gzip":
        path.write_bytes(gzip.compress(zeros, 1))
    elif kind == "tar":
        path.write_bytes(make_tar_gz({"a": zeros}))
    elif kind == "folder":
        path.mkdir()
        (path / "a").write_bytes(zeros)
    else:
        path.write_bytes(make_zip({"a": zeros}))
    del zeros
    readers: dict[str, Callable[[], object]] = {
        "gzip": lambda: archives.read_gzip(path, limit_bytes=limit),
        "tar": lambda: list(archives.read_tar(path, lambda _: True, limit_bytes=limit)),
        "zip": lambda: list(archives.read_members(path, lambda _: True, limit_bytes=limit)),
        "folder": lambda: list(archives.read_members(path, lambda _: True, limit_bytes=limit)),
        "npz": lambda: archives.check_zip(path, limit_bytes=limit),
    }
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=str(limit)):
            readers[kind]()
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_a_header_that_announces_too_much_allocates_nothing(tmp_path: Path) -> None:
    named = write_files("mnist", tmp_path, pinned=False)
    header = bytes((0, 0, 8, 3)) + np.array([2**31, 28, 28], ">u4").tobytes()
    (tmp_path / "given" / named.files[0].paths[0]).write_bytes(gzip.compress(header))
    with pytest.raises(DataError, match="does not fit its shape"):
        named.load(data_folders(tmp_path))


def test_the_limits_hold_the_real_files() -> None:
    assert images.LIMIT_BYTES > 60_000 * 28 * 28 + 16
    assert images.LIMIT_BYTES > 50_000 * 3074


def test_links_in_archives_are_ignored(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        link = tarfile.TarInfo("a")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    path = tmp_path / "links.tar.gz"
    path.write_bytes(stream.getvalue())
    assert list(archives.read_tar(path, lambda _: True, limit_bytes=MIB)) == []
