"""The playground's server: standard library, loopback only, a page and one call."""

import json
import threading
import time
from collections import OrderedDict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from mcbn import data
from mcbn.errors import MCBNError
from mcbn.page.templates import render
from mcbn_study.playground.learner import MOST_POINTS, RANGE, Learner, Settings, read_points

HOST = "127.0.0.1"
MOST_BYTES = 64 * 1024
MOST_PAGES = 8  # browser tabs with a network of their own; the one longest unused is dropped
TRAIN_SECONDS = 0.25  # a call: several bands a second, so that one sees it learn


class Playground(ThreadingHTTPServer):
    """Serves the page on 127.0.0.1, port 0: any; one network for each open page, one call trains at a time."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.learners: OrderedDict[str, Learner] = OrderedDict()
        self.lock = threading.Lock()
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            hint = "choose another port, or 0 for a free one"
            raise MCBNError(f"cannot listen on {HOST}:{port} ({error}); {hint}") from error
        x, y = data.toy(40)
        points = [[round(a, 3), round(b, 3)] for a, b in zip(x[:, 0].tolist(), y.tolist(), strict=True)]
        first = {"points": points, "range": RANGE, "most": MOST_POINTS}
        first |= {"batch_size": Settings.batch_size, "n_samples": Settings.n_samples}
        shown: dict[str, Any] = {"scripts": ["playground.js"], "title": "MCBN playground", "first": first}
        self.page = render("playground.html.j2", package=__package__, **shown).encode()

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def server_close(self) -> None:
        """Close, wait for the call that trains, and let no other begin.

        The lock is kept for good: a thread that is inside torch when the process ends would abort it.
        """
        super().server_close()
        self.lock.acquire()

    def answer(self, request: Any) -> dict[str, Any]:
        """Train the page's network a little on its points and return its bands."""
        if not isinstance(request, dict) or not isinstance(request.get("page"), str) or len(request["page"]) > 64:
            raise MCBNError('a request is an object with "page", "points" and settings')
        settings = Settings(**{name: request[name] for name in ("batch_size", "n_samples", "tau") if name in request})
        with self.lock:
            return self._run(request, settings)  # no tensor outlives the lock: see server_close

    def _run(self, request: dict[str, Any], settings: Settings) -> dict[str, Any]:
        torch.set_num_threads(1)  # counts for this thread: the network is small, a second one only waits
        points, page = read_points(request.get("points")), request["page"]
        if request.get("restart") or page not in self.learners:
            self.learners[page] = Learner()
        self.learners.move_to_end(page)
        while len(self.learners) > MOST_PAGES:
            self.learners.popitem(last=False)
        learner, started = self.learners[page], time.perf_counter()
        loss = learner.train(points, settings.batch_size, TRAIN_SECONDS if request.get("train", True) else 0.0)
        bands = learner.bands(points, settings)
        return {**bands, "loss": loss, "steps": learner.steps, "seconds": round(time.perf_counter() - started, 3)}


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, POST /bands the call; anything that does not come from this page is refused."""

    server: Playground
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Send the page."""
        if not self._from_here():
            self._send(HTTPStatus.FORBIDDEN, b"unknown host", "text/plain")
        elif self.path == "/":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"not found", "text/plain")

    def do_POST(self) -> None:
        """Train and predict."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True
            return self._fail(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MOST_BYTES} bytes")
        text = self.rfile.read(int(length))
        if not self._from_here() or self.headers.get_content_type() != "application/json":
            return self._fail(HTTPStatus.FORBIDDEN, "only the playground's own page may ask")
        if self.path != "/bands":
            return self._fail(HTTPStatus.NOT_FOUND, "not found")
        try:
            bands = self.server.answer(json.loads(text))
        except (MCBNError, ValueError) as error:
            return self._fail(HTTPStatus.BAD_REQUEST, str(error))
        return self._send(HTTPStatus.OK, json.dumps(bands).encode(), "application/json")

    def _from_here(self) -> bool:
        """Refuse other names for this address: a page elsewhere could point its name at it."""
        port = self.server.server_address[1]
        return self.headers.get("Host") in (f"{HOST}:{port}", f"localhost:{port}")

    def _fail(self, status: HTTPStatus, text: str) -> None:
        self._send(status, json.dumps({"error": text}).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:  # the page was closed meanwhile
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Stay silent: the terminal is for the address."""
