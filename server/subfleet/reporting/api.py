"""The read-only HTTP API of runs, rounds, clients and blobs. It reads the journal, and does not affect the run."""

import contextlib
import datetime
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import sqlalchemy as sql
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.middleware.trustedhost import TrustedHostMiddleware

from subfleet.journal import database
from subfleet.journal.base import AbsenceRecord
from subfleet.journal.database import connect, read_rows
from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.journal import Journal
from subfleet.journal.places import Places
from subfleet.journal.records import RoundRecord
from subfleet.protocol.errors import PortError, SubfleetError
from subfleet.protocol.input_statistics import InputStatistics
from subfleet.protocol.messages import Profile
from subfleet.reporting.report import render_status

_LOG = logging.getLogger(__name__)

START_S = 10.0
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]", "::1")
SHOWN_ROUNDS = 20  # on the page, which reloads itself every few seconds; the API returns all rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """The address on which the HTTP API listens; port 0 selects a free port."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        address = self._parse()
        return self.host == "localhost" if address is None else address.is_loopback

    @property
    def warning(self) -> str:
        """A sentence on who can read the API; empty if only this machine can."""
        if self.loopback:
            return ""
        address = self._parse()
        everywhere = not self.host if address is None else address.is_unspecified
        who = "every machine that can reach this one" if everywhere else f"every machine that can reach {self.host}"
        return (
            f"the HTTP API does not require a password: {who} can read this run's rounds, clients and models; keep "
            "--http-host 127.0.0.1 unless it is behind a firewall or a proxy with a login"
        )

    def _parse(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The numeric address; None for a name."""
        try:
            address = ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return None
        # ::ffff:127.0.0.1, which is_loopback recognises since Python 3.13
        return getattr(address, "ipv4_mapped", None) or address


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


class _Endpoints:
    """The answers of the API, read from the journal and the blobs in a state folder."""

    def __init__(self, state_folder: Path) -> None:
        self._engine = database.open_database(state_folder, warns=False)  # the server has warned already
        self._blobs = Places(state_folder).blobs

    def health(self) -> Health:
        return Health()

    def runs(self) -> list[Run]:
        return self._list()

    def run(self, run_id: str) -> Run:
        for run in self._list(database.runs.c.run_id == run_id):
            return run
        raise HTTPException(404, f"there is no run {run_id!r:.80}; /api/runs lists the known runs")

    def rounds(self, run_id: str) -> tuple[RoundRecord, ...]:
        return self._open(run_id).records()

    def evaluations(self, run_id: str) -> tuple[EvaluationRecord, ...]:
        return self._open(run_id).evaluations()

    def clients(self, run_id: str) -> list[Client]:
        journal, now = self._open(run_id), time.time()
        profiles, away = journal.profiles(), journal.absences()
        return [_build_client(profile, away.get(profile.client_id), now) for profile in profiles]

    def page(self) -> str:
        newest = next(iter(self.runs()), None)
        if newest is None:
            return render_status("none yet", "There is no run yet.", ())
        waits = f" After {newest.attempt} attempts, it waits for {newest.waits_for}." if newest.waits_for else ""
        state = f"{newest.phase}, round {newest.round} of {newest.round_count}.{waits} {newest.failure}"
        journal, now = self._open(newest.run_id), time.time()
        absences = journal.absences().items()
        away = [(name, absence.describe(now), _format_time(absence) or "-") for name, absence in absences]
        return render_status(newest.name, state, journal.records(newest=SHOWN_ROUNDS), away)

    def blob(self, sha256: Digest) -> FileResponse:
        path = self._blobs / sha256
        if not path.is_file():
            raise HTTPException(404, f"there is no blob {sha256}")
        # The blob of a digest never changes. Ranges are served, so transfers can be resumed.
        headers = {"Cache-Control": "public, max-age=31536000, immutable"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    def _list(self, *conditions: sql.ColumnElement[bool]) -> list[Run]:
        columns = (database.runs.c[name] for name in Run.model_fields)
        query = sql.select(*columns).where(*conditions).order_by(database.runs.c.started_at.desc())
        with connect(self._engine) as connection:
            return [Run.model_validate(row._asdict()) for row in read_rows(connection, query)]

    def _open(self, run_id: str) -> Journal:
        return Journal(self._engine, self.run(run_id).run_id)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI):  # type: ignore[no-untyped-def]
        yield
        self._engine.dispose()


def create_app(state_folder: Path, *, hosts: tuple[str, ...] = _LOOPBACK_HOSTS) -> FastAPI:
    """Create the application for the state folder of a server.

    Args:
        state_folder: of the server, which need not be running.
        hosts: host names that are accepted, so that web pages from elsewhere cannot read the API through a browser;
            "*" accepts every name.
    """
    endpoints = _Endpoints(state_folder)
    app = FastAPI(title="Subfleet", version="1", lifespan=endpoints.lifespan)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    app.add_exception_handler(SubfleetError, lambda _, error: JSONResponse({"detail": str(error)}, 500))
    app.add_api_route("/", endpoints.page, response_class=HTMLResponse, include_in_schema=False)
    app.add_api_route("/api/health", endpoints.health)
    app.add_api_route("/api/runs", endpoints.runs)
    app.add_api_route("/api/runs/{run_id}", endpoints.run)
    for endpoint in (endpoints.rounds, endpoints.evaluations, endpoints.clients):
        app.add_api_route(f"/api/runs/{{run_id}}/{endpoint.__name__}", endpoint)
    app.add_api_route("/api/blobs/{sha256}", endpoints.blob, response_class=FileResponse)
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
    # Beyond loopback all names are accepted, because only the network knows the names of the machine.
    app = create_app(state_folder, hosts=_LOOPBACK_HOSTS if address.loopback else ("*",))
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


def _build_client(profile: Profile, away: AbsenceRecord | None, now: float) -> Client:
    client = Client.model_validate(profile, from_attributes=True)
    if away is None:
        return client
    return client.model_copy(update={"away": away.describe(now), "last_seen_at": _format_time(away)})


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
