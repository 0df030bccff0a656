"""The playground: a small batch-normalised network that goes on learning while points come and go, and its MCBN bands.

Network of Teye et al. 2018, Figure 1: one input, three hidden layers of 30 units. Differs: tau of MCBN and of its
constant twin are tuned on the points themselves, as there are no others. The server is of the standard library, on
loopback only, with a page and one call.
"""

import json
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from mcbn import data
from mcbn.errors import MCBNError
from mcbn.model import MCBN
from mcbn.networks import RegressionMLP, adam
from mcbn.noise import constant_tau, tau_by_crps
from mcbn.page.templates import render, rounded

HIDDEN = (30, 30, 30)
RANGE = 7.0  # points and grid lie in -RANGE..RANGE, both ways
GRID = 141
LEARNING_RATE = 3e-3  # ours: the toy must move while one watches
WEIGHT_DECAY = 1e-5
MOST_POINTS = 400
MOST_DRAWS = 300
UNITS = 4.0  # the network sees x and y over this
HOST = "127.0.0.1"
MOST_BYTES = 64 * 1024
TRAIN_SECONDS = 0.25  # a call: several bands a second, so that one sees it learn


@dataclass(frozen=True)
class Settings:
    """What the sliders set; tau None is tuned on the points."""

    batch_size: int = 16
    n_samples: int = 100
    tau: float | None = None

    def __post_init__(self) -> None:
        for name, most in (("batch_size", MOST_POINTS), ("n_samples", MOST_DRAWS)):
            if type(value := getattr(self, name)) is not int or not 2 <= value <= most:
                raise MCBNError(f"{name} must be 2 to {most}; got {value!r}")
        if self.tau is not None and (type(self.tau) not in (int, float) or not 1e-6 < self.tau < 1e6):
            raise MCBNError(f"tau must be a number from 1e-6 to 1e6, or null to tune it; got {self.tau!r}")


class Learner:
    """One network and its optimiser; the points are given anew with every call."""

    def __init__(self, seed: int = 0) -> None:
        self.network = RegressionMLP(1, HIDDEN, seed=seed)
        self.optimizer = adam(self.network, WEIGHT_DECAY, LEARNING_RATE)
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = 0

    def train(self, points: Tensor, batch_size: int, seconds: float) -> None:
        """Take steps on batches of M of the points (N, 2) for so long."""
        x, y = (points / UNITS).chunk(2, 1)  # (N, 1) each
        end = time.perf_counter() + seconds
        self.network.train()
        while time.perf_counter() < end:
            rows = torch.randperm(len(points), generator=self.generator)[:batch_size]
            self.optimizer.zero_grad()
            torch.autograd.backward((self.network(x[rows]) - y[rows]).square().mean() / 2)
            self.optimizer.step()
            self.steps += 1
        self.network.eval()

    def bands(self, points: Tensor, settings: Settings) -> dict[str, Any]:
        """Predict on the grid: mean and std of MCBN, and of the twin with the same mean and one std."""
        x, y = (points / UNITS).chunk(2, 1)  # (N, 1) each
        M = min(settings.batch_size, len(points))
        with warnings.catch_warnings(action="ignore"):  # running statistics lag behind while it learns
            bayes = MCBN(self.network, "regression").fit(x, n_samples=settings.n_samples, batch_size=M)
        at_points = bayes.predict(x)
        tuned, constant = tau_by_crps(at_points.mean, at_points.epistemic, y), constant_tau(at_points.mean, y)
        tau = float(tuned) / UNITS**2 if settings.tau is None else settings.tau
        grid = torch.linspace(-RANGE, RANGE, GRID)  # (G,)
        pred = bayes.predict(grid[:, None] / UNITS)
        epistemic = pred.epistemic[:, 0] * UNITS**2  # (G,)
        rows = {"mean": pred.mean[:, 0] * UNITS, "epistemic_std": epistemic.sqrt(), "std": (epistemic + 1 / tau).sqrt()}
        bands = {name: rounded(values.tolist()) for name, values in rows.items()}
        at = [round(value, 3) for value in grid.tolist()]
        return {"x": at, **bands, "constant_std": UNITS * float(constant) ** -0.5, "tau": tau}


def read_points(value: object) -> Tensor:
    """Check points sent by a page: 2 to 400 pairs of numbers within the range, (N, 2)."""
    if not isinstance(value, list) or not 2 <= len(value) <= MOST_POINTS:
        raise MCBNError(f"points must be a list of 2 to {MOST_POINTS} pairs [x, y]")
    try:
        points = torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise MCBNError(f"points must be pairs of numbers: {error}") from error
    if points.ndim != 2 or points.shape[1] != 2 or not bool((points.abs() <= RANGE).all()):
        raise MCBNError(f"points must be pairs of numbers from {-RANGE:g} to {RANGE:g}")
    return points


class Playground(ThreadingHTTPServer):
    """Serves the page on 127.0.0.1, port 0: any; one network for each open page, one call trains at a time."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.learners: dict[str, Learner] = {}
        self.lock, self.trained = threading.Lock(), list[threading.Thread]()  # the last one that ran torch
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise MCBNError(f"cannot listen on {HOST}:{port} ({error}); choose another port, or 0 for any") from error
        self.address = f"http://{HOST}:{self.server_address[1]}/"  # of the page
        x, y = data.toy(40)
        points = [[round(value, 3) for value in pair] for pair in torch.stack([x[:, 0], y], 1).tolist()]
        first = {"points": points, "range": RANGE, "most": MOST_POINTS, **asdict(Settings())}
        shown: dict[str, Any] = {"scripts": ["playground.js"], "title": "MCBN playground", "first": first}
        self.page = render("playground.html.j2", package=__package__, **shown).encode()

    def server_close(self) -> None:
        """Close, wait for the call that trains, and let no other begin: inside torch, it would abort the process."""
        super().server_close()
        self.lock.acquire()  # for good
        for thread in self.trained:
            thread.join(5)  # while it sends its answer

    def answer(self, request: Any) -> dict[str, Any]:
        """Train the page's network a little on its points and return its bands."""
        with self.lock:
            self.trained = [threading.current_thread()]
            return self._run(request)  # no tensor outlives the lock: see server_close

    def _run(self, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict) or not isinstance(page := request.get("page"), str):
            raise MCBNError('a request is an object with "page", "points" and settings')
        settings = Settings(**{name: request[name] for name in ("batch_size", "n_samples", "tau") if name in request})
        torch.set_num_threads(1)  # counts for this thread: the network is small, a second one only waits
        points = read_points(request.get("points"))
        if request.get("restart") or page not in self.learners:
            self.learners[page] = Learner()
        learner, started = self.learners[page], time.perf_counter()
        learner.train(points, settings.batch_size, TRAIN_SECONDS)
        bands = learner.bands(points, settings)
        return {**bands, "steps": learner.steps, "seconds": round(time.perf_counter() - started, 3)}


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, POST /bands the call; anything that does not come from this page is refused."""

    server: Playground
    timeout = 30

    def do_GET(self) -> None:
        """Send the page."""
        if self._is_for("/"):
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        """Train and predict."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        text = self.rfile.read(int(length))
        if self.headers.get_content_type() != "application/json":  # a form of another page
            return self.send_error(HTTPStatus.FORBIDDEN)
        if self._is_for("/bands"):
            try:
                status, answer = HTTPStatus.OK, self.server.answer(json.loads(text))
            except (MCBNError, ValueError) as error:
                status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
            self._send(status, json.dumps(answer).encode(), "application/json")

    def _is_for(self, path: str) -> bool:
        """Refuse other paths, and other names for this address: a page elsewhere could point its name at it."""
        port = self.server.server_address[1]
        named = self.headers.get("Host") in (f"{HOST}:{port}", f"localhost:{port}")
        if not named or self.path != path:
            self.send_error(HTTPStatus.NOT_FOUND if named else HTTPStatus.FORBIDDEN)
        return named and self.path == path

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        with suppress(ConnectionError):  # the page was closed meanwhile
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Stay silent: the terminal is for the address."""
