import errno
import itertools
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples

from subfleet.protocol.blobs import CHUNK_BYTES, LEAST_CHUNK_BYTES, BlobRef, ByteRange
from subfleet.protocol.errors import FileError, NoRoomError, TooLargeError
from subfleet.transport.blob_store import BlobStore


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_what_is_added_can_be_read(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "new" / "folder")
    ref = store.add(b"content")
    assert ref == store.add(memoryview(b"content")) == BlobRef.of(b"content")
    assert store.has(ref)
    assert store.path(ref).read_bytes() == b"content"
    assert store.read_range(ref, ByteRange(offset=3, length=4)) == b"tent"
    assert _files(tmp_path) == {ref.sha256}


def test_a_file_is_copied(tmp_path: Path) -> None:
    source, store = tmp_path / "source", BlobStore(tmp_path / "store")
    source.write_bytes(b"abc" * 700_000)
    ref = store.add_file(source)
    source.write_bytes(b"changed")
    assert BlobRef.of(store.path(ref).read_bytes()) == ref
    assert _files(tmp_path / "store") == {ref.sha256}


def test_a_file_is_moved(tmp_path: Path) -> None:
    source, store = tmp_path / "source", BlobStore(tmp_path / "store")
    for _ in range(2):  # the second time, the store has it already
        source.write_bytes(b"abc" * 700_000)
        ref = store.take_file(source)
        assert ref == BlobRef.of(b"abc" * 700_000) == BlobRef.of(store.path(ref).read_bytes())
        assert _files(tmp_path / "store") == {ref.sha256}
        source.unlink(missing_ok=True)


def test_a_file_of_another_file_system_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, store = tmp_path / "source", BlobStore(tmp_path / "store")
    source.write_bytes(b"content")
    replace = Path.replace

    def refuse(path: Path, target: Path) -> Path:
        if path == source:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)
    ref = store.take_file(source)
    assert store.path(ref).read_bytes() == b"content"
    assert _files(tmp_path / "store") == {ref.sha256}


@pytest.mark.parametrize(("name", "words"), [("absent", "cannot be read"), ("empty", "is empty")])
def test_a_file_that_cannot_be_a_blob_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").touch()
    store = BlobStore(tmp_path / "store")
    for write in (store.add_file, store.take_file):
        with pytest.raises(FileError, match=words):
            write(tmp_path / name)


def test_an_absent_blob_is_reported_as_absent(tmp_path: Path) -> None:
    store, ref = BlobStore(tmp_path), BlobRef.of(b"absent")
    assert not store.has(ref)
    with pytest.raises(FileError, match="fetch it first"):
        store.path(ref)
    store.add(b"absent")
    assert not store.has(BlobRef(sha256=ref.sha256, size_bytes=ref.size_bytes + 1))
    with pytest.raises(FileError, match="ask for less"):
        store.read_range(ref, ByteRange(offset=0, length=7))


def test_a_blob_above_the_limit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store, large = BlobStore(tmp_path / "store", max_blob_bytes=4), tmp_path / "large"
    large.write_bytes(b"12345")
    for write in (
        lambda: store.add(b"12345"),
        lambda: store.add_file(large),
        lambda: store.partial(BlobRef.of(b"12345")),
    ):
        with pytest.raises(TooLargeError, match="5 bytes; the limit is 4"):
            write()
    assert _files(tmp_path / "store") == set()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="choose another"):
        BlobStore(tmp_path / "file" / "folder")


@examples(15)
@given(size_bytes=st.integers(1, 5 * CHUNK_BYTES), data=st.data())
def test_chunks_in_any_order_and_over_any_number_of_crashes_make_the_blob(
    tmp_path_factory: pytest.TempPathFactory, size_bytes: int, data: st.DataObject
) -> None:
    folder, content = tmp_path_factory.mktemp("store"), os.urandom(size_bytes)
    ref = BlobRef.of(content)
    chunk_bytes = CHUNK_BYTES >> data.draw(st.sampled_from([0, 1, 4]))
    order = data.draw(st.permutations(range(0, size_bytes, chunk_bytes)))
    partial = BlobStore(folder).partial(ref)
    received = set[int]()
    for offset in order:
        if data.draw(st.booleans()):
            partial = BlobStore(folder).partial(ref)
        assert partial.received_offsets == received
        chunk = content[offset : offset + chunk_bytes]
        partial.write(offset, chunk)
        received.update(range(offset, offset + len(chunk), LEAST_CHUNK_BYTES))
    assert partial.commit()
    assert BlobStore(folder).path(ref).read_bytes() == content
    assert _files(folder) == {ref.sha256}


def test_a_wrong_digest_discards_everything(tmp_path: Path) -> None:
    store, ref = BlobStore(tmp_path), BlobRef.of(b"right")
    partial = store.partial(ref)
    partial.write(0, b"wrong")
    assert not partial.commit()
    assert partial.received_offsets == frozenset()
    assert not store.has(ref)
    partial.write(0, b"right")
    assert partial.commit()
    assert store.has(ref)


def test_a_blob_with_a_hole_is_not_committed(tmp_path: Path) -> None:
    content = os.urandom(2 * CHUNK_BYTES)
    partial = BlobStore(tmp_path).partial(BlobRef.of(content))
    partial.write(CHUNK_BYTES, content[CHUNK_BYTES:])
    assert not partial.commit()


@pytest.mark.parametrize("content", [b"", b"short", bytes(CHUNK_BYTES + 1), bytes(CHUNK_BYTES + 9)])
def test_a_partial_file_of_another_length_is_discarded(tmp_path: Path, content: bytes) -> None:
    store, ref = BlobStore(tmp_path), BlobRef(sha256="0" * 64, size_bytes=CHUNK_BYTES + 1)
    (tmp_path / "partial" / f"{ref.sha256}.part").write_bytes(content)
    assert store.partial(ref).received_offsets == frozenset()


@pytest.mark.parametrize(("offset", "length"), [(-CHUNK_BYTES, CHUNK_BYTES), (1, 1), (0, 1), (CHUNK_BYTES, 2)])
def test_what_is_no_chunk_of_the_blob_is_not_written(tmp_path: Path, offset: int, length: int) -> None:
    partial = BlobStore(tmp_path).partial(BlobRef(sha256="0" * 64, size_bytes=CHUNK_BYTES + 1))
    with pytest.raises(ValueError, match="does not belong to blob"):
        partial.write(offset, bytes(length))


def test_prune_keeps_the_named_blobs(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    keep, drop, half = store.add(b"keep"), store.add(b"drop"), BlobRef.of(b"half")
    store.partial(half)
    store.prune({keep.sha256})
    assert store.has(keep)
    assert not store.has(drop)
    assert _files(tmp_path) == {keep.sha256}


def test_the_least_recently_used_blobs_go_first(tmp_path: Path) -> None:
    ticks = itertools.count(1)
    store = BlobStore(tmp_path, limit_bytes=lambda: 10, clock_ns=lambda: next(ticks))
    first, second = store.add(b"1111"), store.add(b"2222")
    store.path(first)
    third = store.add(b"3333")
    assert [store.has(ref) for ref in (first, second, third)] == [True, False, True]
    with pytest.raises(NoRoomError, match=r"20 bytes cannot be written .* may hold 10 bytes, and 0 of them are in use"):
        store.add(b"4" * 20)
    assert [store.has(ref) for ref in (first, third)] == [True, True], "a blob that cannot be stored removes no other"
    fetched = BlobRef.of(b"5555")
    partial = store.partial(fetched)
    assert [store.has(ref) for ref in (first, third)] == [False, True]
    partial.write(0, b"5555")
    assert partial.commit()
    assert store.has(fetched)


def test_pinned_blobs_stay_and_what_does_not_fit_beside_them_is_refused(tmp_path: Path) -> None:
    ticks = itertools.count(1)
    store = BlobStore(tmp_path, limit_bytes=lambda: 10, clock_ns=lambda: next(ticks))
    first, second = store.add(b"1111"), store.add(b"2222")
    store.pin({first.sha256})
    assert store.room_bytes == 6
    third = store.add(b"333333")
    assert [store.has(ref) for ref in (first, second, third)] == [True, False, True]
    source = tmp_path / "source"
    source.write_bytes(b"4" * 7)
    for write in (
        lambda: store.add_file(source),
        lambda: store.take_file(source),
        lambda: store.partial(BlobRef.of(b"5" * 7)),
    ):
        with pytest.raises(NoRoomError, match="and 4 of them are in use"):
            write()
    store.pin(set())
    store.add_file(source)
    assert not store.has(first)


Step = tuple[str, int, int]


class _LimitedStore:
    """A store with a limit, and the references of its user."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.store = BlobStore(folder, limit_bytes=lambda: limit_bytes)
        self.folder = folder
        self.pinned: dict[str, BlobRef] = {}
        self.known: dict[int, BlobRef] = {}

    def apply(self, kind: str, name: int, size_bytes: int) -> None:
        content = bytes([name]) * size_bytes
        ref = BlobRef.of(content)
        if kind == "add":
            self.store.add(content)
        elif kind == "file":
            (self.folder.parent / "source").write_bytes(content)
            self.store.add_file(self.folder.parent / "source")
        elif kind == "begin":
            self.store.partial(ref)
        elif kind == "fetch":
            partial = self.store.partial(ref)
            partial.write(0, content)
            assert partial.commit()
        elif kind == "use" and name in self.known and self.store.has(self.known[name]):
            self.store.path(self.known[name])
        elif kind == "pin":
            held = [ref for ref in self.known.values() if self.store.has(ref)]
            self.pinned = {ref.sha256: ref for ref in held[-2:]}
            self.store.pin(self.pinned.keys())
        if kind in ("add", "file", "fetch"):
            self.known[name] = ref


@pytest.mark.slow
@examples(25)
@given(
    limit_bytes=st.integers(0, 100),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "file", "begin", "fetch", "use", "pin", "again"]),
            st.integers(0, 9),
            st.integers(1, 60),
        ),
        max_size=25,
    ),
)
def test_whatever_is_stored_the_limit_holds_and_nothing_pinned_goes(
    tmp_path_factory: pytest.TempPathFactory, limit_bytes: int, steps: list[Step]
) -> None:
    folder = tmp_path_factory.mktemp("limited") / "store"
    limited = _LimitedStore(folder, limit_bytes)
    for kind, name, size_bytes in steps:
        before = _files(folder)
        if kind == "again":
            limited.store = BlobStore(folder, limit_bytes=lambda: limit_bytes)
            limited.store.pin(limited.pinned.keys())
        try:
            limited.apply(kind, name, size_bytes)
        except NoRoomError:
            assert _files(folder) == before, "a refused blob changes nothing"
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= limit_bytes
        assert all(limited.store.has(ref) for ref in limited.pinned.values())


def test_left_over_temporary_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "abc.tmp").write_bytes(b"of a process that died")
    BlobStore(tmp_path)
    assert _files(tmp_path) == set()


def test_blobs_are_not_readable_by_others(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    mode = store.path(store.add(b"private")).stat().st_mode
    assert stat.S_IMODE(mode) & 0o077 == 0
