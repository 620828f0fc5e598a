"""A download is either complete and correct or discarded; it happens only if no folder has the file."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from subfleet.protocol.errors import ConfigError, DataError, FileError, SubfleetError, TransportError
from subfleet.tasks import download as download_module
from subfleet.tasks.download import download
from subfleet.tasks.named_dataset import DATASETS
from subfleet.tasks.source_files import DataFolders, SourceFile, find_availability, find_data_folders, locate

CONTENT = bytes(range(256)) * 40
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of the server: `announced_length` is its Content-Length, None for none."""

    body: bytes = CONTENT
    announced_length: int | None = len(CONTENT)
    status: int = 200
    silent: bool = False


@contextmanager
def serve(answer: Answer) -> Iterator[str]:
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if answer.silent:
                done.wait(10)
                return
            self.send_response(answer.status)
            if answer.announced_length is not None:
                self.send_header("Content-Length", str(answer.announced_length))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/file.gz"
        finally:
            done.set()
            server.shutdown()
            thread.join()


def is_empty(folder: Path) -> bool:
    return not folder.exists() or list(folder.iterdir()) == []


@pytest.mark.parametrize("checksum", [SHA256, f"md5:{hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()}"])
@pytest.mark.parametrize("announced_length", [len(CONTENT), None])
def test_a_correct_download_is_kept(checksum: str, announced_length: int | None, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "set" / "file.gz"
    with serve(Answer(announced_length=announced_length)) as url:
        download(url, target, limit_bytes=len(CONTENT), checksum=checksum)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["file.gz"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (Answer(body=CONTENT[:-1] + b"x"), DataError, "must have sha256:.*discarded"),
        (Answer(body=CONTENT[:-9], announced_length=None), DataError, "has the checksum"),
        (Answer(body=CONTENT[:-9]), TransportError, "broke off"),
        (Answer(announced_length=len(CONTENT) + 1), DataError, "offers 10241 bytes, but its file has at most 10240"),
        (Answer(body=CONTENT + b"x", announced_length=None), DataError, "sent more than the 10240 bytes"),
        (Answer(status=404), TransportError, "Not Found.*SUBFLEET_DATA"),
    ],
)
def test_a_wrong_download_is_discarded_with_one_sentence(
    answer: Answer, kind: type[SubfleetError], words: str, tmp_path: Path
) -> None:
    target = tmp_path / "cache" / "file.gz"
    with serve(answer) as url, pytest.raises(kind, match=words):
        download(url, target, limit_bytes=len(CONTENT), checksum=SHA256)
    assert is_empty(target.parent)


@pytest.mark.slow
def test_an_address_that_stays_silent_is_a_transport_error(tmp_path: Path) -> None:
    with serve(Answer(silent=True)) as url, pytest.raises(TransportError, match="timed out"):
        download(url, tmp_path / "file.gz", limit_bytes=len(CONTENT), checksum=SHA256, timeout_s=0.3)
    assert is_empty(tmp_path)


def test_an_answer_that_announces_too_great_a_length_is_not_read(tmp_path: Path) -> None:
    with serve(Answer(body=b"", announced_length=10**12)) as url, pytest.raises(DataError, match="was not read"):
        download(url, tmp_path / "file.gz", limit_bytes=len(CONTENT), checksum=SHA256)


def test_a_broken_download_keeps_the_earlier_file(tmp_path: Path) -> None:
    target = tmp_path / "file.gz"
    target.write_bytes(CONTENT)
    with serve(Answer(body=CONTENT[:-9])) as url, pytest.raises(TransportError):
        download(url, target, limit_bytes=len(CONTENT), checksum=SHA256)
    assert target.read_bytes() == CONTENT


def test_an_address_where_nobody_answers_is_a_transport_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot be reached"):
        download("http://127.0.0.1:9/file.gz", tmp_path / "file.gz", limit_bytes=1, checksum=SHA256)
    assert is_empty(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the folder's place")
    with pytest.raises(FileError, match="cannot be written"):
        download("http://127.0.0.1:9/file.gz", tmp_path / "cache" / "file.gz", limit_bytes=1, checksum=SHA256)


def test_the_given_folder_comes_first_then_the_cache_then_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = DataFolders(given=tmp_path / "given", cache=tmp_path / "cache")
    messages: list[str] = []
    with serve(Answer()) as url:
        file = SourceFile(paths=("set/file.gz",), url=url, limit_bytes=len(CONTENT), checksum=SHA256)
        assert find_availability(file, folders) == "download"
        assert locate(file, folders, messages.append) == tmp_path / "cache/set/file.gz"
    assert messages == [f"Downloading {url} (0.0 MB)"]
    monkeypatch.setattr(download_module, "download", None)
    assert find_availability(file, folders) == "cached"
    assert locate(file, folders, messages.append) == tmp_path / "cache/set/file.gz"
    (tmp_path / "given/set").mkdir(parents=True)
    (tmp_path / "given/set/file.gz").write_bytes(CONTENT)
    assert find_availability(file, folders) == "given"
    assert locate(file, folders, messages.append) == tmp_path / "given/set/file.gz"
    assert len(messages) == 1


def test_the_environment_names_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBFLEET_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert find_data_folders() == DataFolders(given=tmp_path, cache=tmp_path / "x/subfleet/data")
    monkeypatch.delenv("SUBFLEET_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_data_folders() == DataFolders(given=None, cache=tmp_path / ".cache/subfleet/data")
    monkeypatch.setenv("SUBFLEET_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="must name a folder"):
        find_data_folders()


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "https://example.org/a"},
        {"url": "https://example.org/a", "checksum": SHA256},
        {"url": "https://example.org/a", "limit_bytes": 3},
        {"url": "http://example.org/a", "checksum": SHA256, "limit_bytes": 3},
        {"url": "http://127.0.0.1.example.org/a", "checksum": SHA256, "limit_bytes": 3},
    ],
)
def test_nothing_is_downloaded_unchecked_or_over_an_open_link(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must begin with https|needs both"):
        SourceFile(paths=("a",), **fields)  # type: ignore[arg-type]


def test_every_task_is_registered_under_its_name_with_well_formed_files() -> None:
    for name, task in DATASETS.items():
        assert task.name == name
        assert task.stand_in_for == "" or task.stand_in_for in DATASETS
        for file in task.files:
            kind, _, digits = file.checksum.partition(":")
            assert not file.checksum or (kind, len(digits)) in {("sha256", 64), ("md5", 32)}
            assert file.url or not file.limit_bytes


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no data set 'mnits'; choose one of \['cifar10', .*did you mean 'mnist'"):
        DATASETS.load("mnits")
