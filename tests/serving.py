"""A web server on this machine that can send rests of files, cut connections and refuse."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Served(ThreadingHTTPServer):
    """Serves `files`, path -> bytes; `asked` remembers (path, Range header) of every request.

    `ranges`: whether a rest can be asked for; `cuts`: bytes to send before hanging up, in turn.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges, self.cuts = True, list[int]()
        self.asked: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Served

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        if self.path not in self.server.files:
            self.send_error(404)
            return
        body, start = self.server.files[self.path], 0
        if wanted and self.server.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start and start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("Connection", "close")
        self.end_headers()
        end = start + self.server.cuts.pop(0) if self.server.cuts else len(body)
        self.wfile.write(body[start:end])
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Served]:
    """Serve until the block ends."""
    with Served() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
