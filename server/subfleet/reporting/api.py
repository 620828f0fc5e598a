"""The read-only HTTP API of runs, rounds, clients and blobs. It reads the journal, and does not affect the run."""

import contextlib
import datetime
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import sqlalchemy as sql
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.middleware.trustedhost import TrustedHostMiddleware

from subfleet.journal import database
from subfleet.journal.database import connect, read_rows
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.journal import AbsenceRecord, Journal
from subfleet.journal.places import Places
from subfleet.journal.records import RoundRecord
from subfleet.protocol.errors import PortError, SubfleetError
from subfleet.protocol.input_statistics import InputStatistics
from subfleet.protocol.messages import Profile
from subfleet.reporting.report import render_status

_LOG = logging.getLogger(__name__)

START_S = 10.0
SHOWN_ROUNDS = 20  # on the page, which reloads itself every few seconds; the API returns all rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """The address on which the HTTP API listens; port 0 selects a free port."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        host = self.host.partition("%")[0]
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host == "localhost"
        mapped = getattr(
            address, "ipv4_mapped", None
        )  # ::ffff:127.0.0.1, which is_loopback recognises since Python 3.13
        return address.is_loopback if mapped is None else mapped.is_loopback

    @property
    def warning(self) -> str:
        """A sentence on who can read the API; empty if only this machine can."""
        if self.loopback:
            return ""
        try:
            everywhere = ipaddress.ip_address(self.host.partition("%")[0]).is_unspecified
        except ValueError:
            everywhere = not self.host
        who = "every machine that can reach this one" if everywhere else f"every machine that can reach {self.host}"
        return (
            f"the HTTP API asks for no password: {who} can read this run's rounds, clients and models; keep "
            "--http-host 127.0.0.1 unless it is behind a firewall or a proxy with a login"
        )


class Health(BaseModel):
    """The state of the API: it answers."""

    status: Literal["ok"] = "ok"


class Run(BaseModel):
    """Where a run stands.

    `waits_for` says who did not take part in the last attempt of the round and why, where that left nothing to
    aggregate, and `attempt` counts the earlier attempts of the round; `lost` counts those of the whole run.
    """

    run_id: str
    name: str
    phase: str
    round: int
    aggregated_round: int
    round_count: int
    attempt: int
    lost: int
    waits_for: str
    failure: str
    started_at: str


class Client(BaseModel):
    """A client of a run.

    `away` is the reason why it is absent or refused its task in the open round, and empty if it is present. For an
    absent client, `last_seen_at` is the time of its last message, or None if there was none since the server started.
    """

    client_id: str
    device: str
    runtimes: tuple[str, ...]
    sample_count: int
    class_counts: tuple[int, ...]
    class_names: tuple[str, ...]
    memory_total_bytes: int
    memory_fraction: float
    software: dict[str, str]
    inputs: InputStatistics | None
    away: str = ""
    last_seen_at: str | None = None


Digest = Annotated[str, PathParameter(pattern="^[0-9a-f]{64}$", description="SHA-256 of the blob")]


class _Reader:
    """The queries of the API to the journal."""

    def __init__(self, state_folder: Path) -> None:
        self._engine = database.open_database(state_folder, warns=False)  # the server has warned already

    def runs(self, run_id: str | None = None) -> list[Run]:
        table = database.runs
        query = sql.select(*(table.c[name] for name in Run.model_fields)).order_by(table.c.started_at.desc())
        if run_id is not None:
            query = query.where(table.c.run_id == run_id)
        with connect(self._engine) as connection:
            return [Run.model_validate(row._asdict()) for row in read_rows(connection, query)]

    def run(self, run_id: str) -> Run:
        matches = self.runs(run_id)
        if not matches:
            raise HTTPException(404, f"there is no run {run_id!r:.80}; /api/runs lists the known runs")
        return matches[0]

    def rounds(self, run_id: str, *, newest: int | None = None) -> tuple[RoundRecord, ...]:
        return Journal(self._engine, self.run(run_id).run_id).records(newest=newest)

    def evaluations(self, run_id: str) -> tuple[EvaluationRecord, ...]:
        return Journal(self._engine, self.run(run_id).run_id).evaluations()

    def clients(self, run_id: str) -> list[Client]:
        profiles = Journal(self._engine, self.run(run_id).run_id).profiles()
        away, now = self.absences(run_id), time.time()
        return [_build_client(profile, away.get(profile.client_id), now) for profile in profiles]

    def absences(self, run_id: str) -> Mapping[str, AbsenceRecord]:
        return Journal(self._engine, run_id).absences()

    def status_page(self) -> str:
        newest = next(iter(self.runs()), None)
        if newest is None:
            return render_status("none yet", "There is no run yet.", ())
        waits = f" After {newest.attempt} attempts, it waits for {newest.waits_for}." if newest.waits_for else ""
        state = f"{newest.phase}, round {newest.round} of {newest.round_count}.{waits} {newest.failure}"
        now = time.time()
        absences = self.absences(newest.run_id).items()
        away = [(name, absence.describe(now), _format_time(absence) or "-") for name, absence in absences]
        return render_status(newest.name, state, self.rounds(newest.run_id, newest=SHOWN_ROUNDS), away)

    def close(self) -> None:
        self._engine.dispose()


def create_app(state_folder: Path, *, hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")) -> FastAPI:
    """Create the application for the state folder of a server.

    Args:
        state_folder: of the server, which need not be running.
        hosts: host names that are accepted, so that web pages from elsewhere cannot read the API through a browser;
            "*" accepts every name.
    """
    reader = _Reader(state_folder)
    blobs = Places(state_folder).blobs

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI):  # type: ignore[no-untyped-def]
        yield
        reader.close()

    app = FastAPI(title="Subfleet", version="1", lifespan=lifespan)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))

    app.add_exception_handler(SubfleetError, _answer_error)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> str:
        return reader.status_page()

    @app.get("/api/health")
    def health() -> Health:
        return Health()

    @app.get("/api/runs")
    def runs() -> list[Run]:
        return reader.runs()

    @app.get("/api/runs/{run_id}")
    def run(run_id: str) -> Run:
        return reader.run(run_id)

    @app.get("/api/runs/{run_id}/rounds")
    def rounds(run_id: str) -> list[RoundRecord]:
        return list(reader.rounds(run_id))

    app.add_api_route("/api/runs/{run_id}/evaluations", reader.evaluations)

    @app.get("/api/runs/{run_id}/clients")
    def clients(run_id: str) -> list[Client]:
        return reader.clients(run_id)

    @app.get("/api/blobs/{sha256}", response_class=FileResponse)
    def blob(sha256: Digest) -> FileResponse:
        path = blobs / sha256
        if not path.is_file():
            raise HTTPException(404, f"there is no blob {sha256}")
        # The blob of a digest never changes. Ranges are served, so transfers can be resumed.
        headers = {"Cache-Control": "public, max-age=31536000, immutable"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    return app


@contextlib.contextmanager
def serve_http(state_folder: Path, address: HttpAddress) -> Iterator[str]:
    """A context that serves the API in a thread, and yields its URL.

    It logs a warning if other machines can reach the address.

    Raises:
        PortError: the address is in use, or does not belong to this machine.
    """
    listener = _listen(address)
    if address.warning:
        _LOG.warning("%s", address.warning)
    port = listener.getsockname()[1]
    app = create_app(state_folder, hosts=_list_hosts(address))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="subfleet-http", daemon=True)
    thread.start()
    try:
        until_s = time.monotonic() + START_S
        while not server.started and thread.is_alive() and time.monotonic() < until_s:
            time.sleep(0.01)
        if not server.started:
            raise PortError(f"the HTTP API did not start at {address.host}:{port}; see the log for the reason")
        host = f"[{address.host}]" if ":" in address.host else address.host
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(START_S)
        listener.close()


def _answer_error(_: Request, error: Exception) -> JSONResponse:
    """The answer if the journal cannot be read."""
    return JSONResponse({"detail": str(error)}, 500)


def _build_client(profile: Profile, away: AbsenceRecord | None, now: float) -> Client:
    names = Client.model_fields.keys() - {"away", "last_seen_at"}
    absence = {} if away is None else {"away": away.describe(now), "last_seen_at": _format_time(away)}
    return Client.model_validate({name: getattr(profile, name) for name in names} | absence)


def _format_time(away: AbsenceRecord) -> str | None:
    if away.seen_at is None:
        return None
    return datetime.datetime.fromtimestamp(away.seen_at, datetime.timezone.utc).isoformat(timespec="seconds")


def _listen(address: HttpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise PortError(
            f"the HTTP API cannot listen at {address.host}:{address.port}: {error.strerror}; choose another port"
        ) from error
    return listener


def _list_hosts(address: HttpAddress) -> tuple[str, ...]:
    """Accepted host names: beyond loopback all, because only the network knows the names of the machine."""
    return ("127.0.0.1", "localhost", "[::1]", "::1") if address.loopback else ("*",)
