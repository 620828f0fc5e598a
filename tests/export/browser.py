"""Run ONNX programs in onnxruntime-web in a real browser: a page, its server, and headless Chromium."""

import base64
import functools
import json
import shutil
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WEB = Path(__file__).parent.parent / "web"
DIST = WEB / "node_modules" / "onnxruntime-web" / "dist"
PATIENCE_S = 120.0
_TYPES = {".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm"}
_DTYPES = {"float32": "F32", "int64": "I64"}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserJob:
    """A program and its inputs."""

    body: bytes
    inputs: Mapping[str, Array]


@dataclass(slots=True, kw_only=True)
class _Visit:
    """The jobs of a page and its answers so far."""

    jobs: Mapping[str, BrowserJob]
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


def browser() -> str:
    """The path of Chromium, or an empty string if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""


def missing() -> str:
    """Why browser tests cannot run on this machine, or an empty string if they can."""
    if not browser():
        return "there is no Chromium: apt-get install chromium"
    return "" if DIST.is_dir() else f"onnxruntime-web is not installed: npm ci --prefix {WEB.name}"


def run_in_browser(jobs: Mapping[str, BrowserJob], profile: Path) -> dict[str, dict[str, Any]]:
    """Run each program once in a page; return {"outputs": {name: numbers}} or {"error": text} for each job."""
    visit = _Visit(jobs=jobs)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, visit)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        address = f"http://127.0.0.1:{server.server_port}/page.html"
        with subprocess.Popen([*command, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            visit.done.wait(PATIENCE_S)
            process.terminate()
        server.shutdown()
    return visit.answers


class _Handler(BaseHTTPRequestHandler):
    """Serves the page, onnxruntime-web, the programs and their inputs, and receives the answers."""

    def __init__(self, visit: _Visit, *arguments: Any) -> None:
        self._visit = visit
        super().__init__(*arguments)

    def do_GET(self) -> None:
        kind, _, name = self.path.lstrip("/").partition("/")
        if kind == "names":
            self._send(json.dumps(list(self._visit.jobs)).encode(), "application/json")
        elif kind == "program":
            self._send(self._visit.jobs[name].body, "application/octet-stream")
        elif kind == "inputs":
            self._send(json.dumps(_plain(self._visit.jobs[name].inputs)).encode(), "application/json")
        else:
            self._send_file(DIST / name if kind == "dist" else WEB / kind)

    def do_POST(self) -> None:
        kind, _, name = self.path.lstrip("/").partition("/")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if kind == "result":
            self._visit.answers[name] = json.loads(body)
        else:
            self._visit.done.set()
        self._send(b"", "text/plain")

    def _send_file(self, path: Path) -> None:
        if path.is_file():
            self._send(path.read_bytes(), _TYPES.get(path.suffix, "application/octet-stream"))
        else:
            self.send_error(404)

    def _send(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _plain(inputs: Mapping[str, Array]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
        }
        for name, array in inputs.items()
    ]
