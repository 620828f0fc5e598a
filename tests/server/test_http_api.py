import datetime
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.server_rig import World, config, fleet

from subfleet.journal.base import AbsenceRecord
from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.protocol.errors import PortError
from subfleet.rounds.state import RunState

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("run"), config(deploy_targets=()), fleet())
    world.run()
    return world


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[httpx.Client]:
    from subfleet.reporting.api import HttpAddress, serve_http

    with serve_http(world.folder / "state", HttpAddress(port=0)) as url, httpx.Client(base_url=url) as client:
        yield client


def test_runs_rounds_and_clients_are_those_of_the_run(world: World, client: httpx.Client) -> None:
    run_id = world.server.context.run_id
    assert client.get("/api/health").json() == {"status": "ok"}
    assert [run["run_id"] for run in client.get("/api/runs").json()] == [run_id]
    assert client.get(f"/api/runs/{run_id}").json()["phase"] == "finished"
    rounds = client.get(f"/api/runs/{run_id}/rounds").json()
    assert [record["round"] for record in rounds] == [1, 2]
    assert [row["status"] for row in rounds[0]["clients"]] == ["aggregated"] * 3
    clients = client.get(f"/api/runs/{run_id}/clients").json()
    assert {row["client_id"]: row["sample_count"] for row in clients} == {"ada": 7, "bob": 20, "cyd": 33}


def test_absent_clients_are_shown_with_reason_and_time(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from subfleet.reporting.api import HttpAddress, serve_http

    engine, run_id = open_database(tmp_path), "test-1"
    start = datetime.datetime(2024, 5, 1, 12, 0, 0, tzinfo=datetime.timezone.utc).timestamp()
    monkeypatch.setattr("time.time", lambda: start + 41)
    run_id = begin_run(engine, name="test", settings="{}", round_count=2)
    state = world.server.state
    journal = Journal(engine, run_id)
    journal.save(RunState(), RunState(profiles=state.profiles))
    away = [
        AbsenceRecord(client_id="ada", kind="goodbye", reason="it said goodbye (it was stopped)", seen_at=start),
        AbsenceRecord(client_id="bob", kind="silent", reason="no heartbeat for 30 s", seen_at=start),
    ]
    journal.save_absences(away)
    with serve_http(tmp_path, HttpAddress(port=0)) as url, httpx.Client(base_url=url) as client:
        rows = {row["client_id"]: row for row in client.get(f"/api/runs/{run_id}/clients").json()}
        page = client.get("/").text
    when = "2024-05-01T12:00:00+00:00"
    assert {name: (row["away"], row["last_seen_at"]) for name, row in rows.items()} == {
        "ada": ("it said goodbye (it was stopped)", when),
        "bob": ("no heartbeat for 41 s", when),
        "cyd": ("", None),
    }
    assert f"<td>bob</td><td>no heartbeat for 41 s</td><td>{when}</td>" in page
    assert f"<td>ada</td><td>it said goodbye (it was stopped)</td><td>{when}</td>" in page
    engine.dispose()


def test_an_unknown_run_is_a_404_with_a_sentence(client: httpx.Client) -> None:
    answer = client.get("/api/runs/nope")
    assert answer.status_code == 404
    assert "there is no run" in answer.json()["detail"]


def test_a_blob_comes_whole_or_by_range(world: World, client: httpx.Client) -> None:
    path = max((world.folder / "state" / "blobs").glob("[0-9a-f]" * 64), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    assert client.get(f"/api/blobs/{path.name}").content == content
    part = client.get(f"/api/blobs/{path.name}", headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, content[10:20])


@pytest.mark.parametrize("name", ["0" * 64, "0" * 63, "..%2f..%2fsubfleet.sqlite", "partial"])
def test_nothing_but_blobs_can_be_read(client: httpx.Client, name: str) -> None:
    assert client.get(f"/api/blobs/{name}").status_code in (404, 422)


def test_a_foreign_host_name_is_refused(client: httpx.Client) -> None:
    assert client.get("/api/health", headers={"Host": "evil.example"}).status_code == 400


def test_the_description_is_typed(client: httpx.Client) -> None:
    schema = client.get("/openapi.json").json()
    assert {"Run", "Client", "RoundRecord", "ClientRow"} <= set(schema["components"]["schemas"])


def test_the_page_shows_the_rounds(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "Round 1: accuracy" in page.text
    assert "<script" not in page.text


def test_a_port_in_use_is_one_error_and_is_freed_at_the_end(world: World) -> None:
    from subfleet.reporting.api import HttpAddress, serve_http

    with serve_http(world.folder / "state", HttpAddress(port=0)) as url:
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(PortError, match="choose another port"):
            serve_http(world.folder, HttpAddress(port=port)).__enter__()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=2)
