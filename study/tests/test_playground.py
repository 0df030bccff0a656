"""The playground without a browser: what the network learns, and what its server refuses."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from typer.testing import CliRunner

from mcbn import data, metrics
from mcbn.cli import app
from mcbn.errors import MCBNError
from mcbn_study.playground.server import UNITS, Learner, Playground, Settings, read_points
from untouched import generators


@pytest.fixture(scope="module")
def points() -> torch.Tensor:
    x, y = data.toy(30)
    return torch.stack([x[:, 0], y], 1).float()


def train(learner: Learner, points: torch.Tensor, steps: int = 400) -> Learner:
    """Train for so many steps, however slow the machine."""
    while learner.steps < steps:
        learner.train(points, 16, 0.1)
    return learner


def error(learner: Learner, points: torch.Tensor) -> float:
    with torch.no_grad():
        return metrics.rmse(UNITS * learner.network.eval()(points[:, :1] / UNITS), points[:, 1:]).item()


@pytest.fixture(scope="module")
def trained(points) -> Learner:
    return train(Learner(), points)


@pytest.fixture
def server():
    with Playground() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def bands(server, **request) -> tuple[int, dict]:
    body = json.dumps({"page": "p", "points": [[0, 0], [1, 1], [2, 0]], **request}).encode()
    status, answer = ask(server, "POST", "/bands", body, **{"Content-Type": "application/json"})
    return status, json.loads(answer)


def test_training_lowers_the_error_and_leaves_global_generators_alone(points):
    state, learner = generators(), Learner()
    first = error(learner, points)
    train(learner, points).bands(points, Settings(n_samples=10))
    errors = [error(train(learner, points, steps), points) for steps in (400, 800, 1200)]
    assert min(errors) < 0.7 * first  # the least: running statistics lag behind and make single ones jump
    assert generators() == state


def test_bands_are_mcbn_and_its_constant_twin_in_units_of_the_points(trained, points):
    found = trained.bands(points, Settings(batch_size=8, n_samples=40, tau=4.0))
    assert [s**2 for s in found["std"]] == pytest.approx([e**2 + 0.25 for e in found["epistemic_std"]], rel=1e-2)
    import mcbn

    bayes = mcbn.MCBN(trained.network, "regression").fit(points[:, :1] / UNITS, n_samples=40, batch_size=8)
    pred = bayes.predict(torch.tensor(found["x"])[:, None] / UNITS)
    assert found["mean"] == pytest.approx((UNITS * pred.mean[:, 0]).tolist(), rel=1e-2, abs=1e-2)
    mean, y = UNITS * bayes.predict(points[:, :1] / UNITS).mean[:, 0], points[:, 1]
    stds = torch.linspace(0.5, 2, 301) * found["constant_std"]
    losses = torch.stack([metrics.crps_gaussian(mean, torch.full_like(mean, s**2), y).mean() for s in stds.tolist()])
    assert stds[int(losses.argmin())].item() == pytest.approx(found["constant_std"], rel=0.02)


def test_smaller_batches_give_wider_bands(trained, points):
    wide, narrow = (trained.bands(points, Settings(batch_size=M, n_samples=100)) for M in (4, 24))
    assert sum(wide["epistemic_std"]) > 1.3 * sum(narrow["epistemic_std"])


def test_server_answers_its_page(server):
    assert server.server_address[0] == "127.0.0.1"
    status, page = ask(server, "GET", "/")
    assert status == 200
    assert b"MCBN playground" in page
    status, found = bands(server)
    assert status == 200
    assert len(found["mean"]) == len(found["std"]) == len(found["x"])
    before = found["steps"]
    assert before > 0
    assert bands(server)[1]["steps"] > before
    bands(server, page="q")
    assert server.learners["q"].steps < server.learners["p"].steps
    learner = server.learners["p"]
    bands(server, restart=True)
    assert server.learners["p"] is not learner


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"points": [[0, 0]]}, "2 to 400 pairs"),
        ({"points": [[0, "a"], [1, 1]]}, "pairs of numbers"),
        ({"points": [[0, 99], [1, 1]]}, "from -7 to 7"),
        ({"points": [[0, float("nan")], [1, 1]]}, "from -7 to 7"),
        ({"points": [[0], [1]]}, "from -7 to 7"),
        ({"batch_size": 1}, "batch_size must be 2 to 400"),
        ({"batch_size": 2.5}, "batch_size must be 2 to 400"),
        ({"n_samples": 10**6}, "n_samples must be 2 to 300"),
        ({"tau": -1}, "tau must be a number"),
        ({"tau": "<b>"}, "tau must be a number"),
        ({"page": 3}, "a request is an object"),
    ],
)
def test_wrong_requests_are_answered_with_a_reason(server, request_, message):
    status, found = bands(server, **request_)
    assert status == 400
    assert message in found["error"]


def test_requests_from_elsewhere_are_refused(server):
    assert ask(server, "GET", "/", Host="evil.example")[0] == 403
    assert ask(server, "GET", "/etc/passwd")[0] == 404
    assert ask(server, "POST", "/bands", b"{}", **{"Content-Type": "text/plain"})[0] == 403
    assert ask(server, "POST", "/other", b"{}", **{"Content-Type": "application/json"})[0] == 404
    assert ask(server, "POST", "/bands", b"{", **{"Content-Type": "application/json"})[0] == 400
    assert ask(server, "POST", "/bands", b" " * 70_000, **{"Content-Type": "application/json"})[0] == 413


def test_a_port_in_use_is_refused(server):
    with pytest.raises(MCBNError, match="choose another port"):
        Playground(server.server_address[1])
    with pytest.raises(MCBNError, match="choose another port"):
        Playground(70_000)


def test_the_command_says_in_a_line_that_the_port_is_taken(server):
    told = CliRunner().invoke(app, ["playground", "--port", str(server.server_address[1])])
    assert told.exit_code == 2
    assert told.stderr.startswith("mcbn: cannot listen")


def test_points_keep_their_values():
    assert read_points([[0, 1], [2.5, -3]]).tolist() == [[0, 1], [2.5, -3]]


def test_main_opens_the_browser_and_ends_on_control_c(monkeypatch):
    opened = []

    def interrupt(self, poll_interval):
        raise KeyboardInterrupt

    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("mcbn_study.playground.server.Playground.serve_forever", interrupt)
    printed = CliRunner().invoke(app, ["playground"]).stdout
    assert printed.startswith(f"playground at {opened[0]}")
    assert printed.endswith("stopped\n")


@pytest.mark.slow
def test_control_c_stops_it_cleanly():
    command = [sys.executable, "-c", "from mcbn.cli import app; app()", "playground", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    asking: list[http.client.HTTPConnection] = []
    try:
        address = process.stdout.readline()
        assert address.startswith("playground at http://127.0.0.1:")
        host, port = address.split()[2].removeprefix("http://").strip("/").split(":")
        asking = [http.client.HTTPConnection(host, int(port), timeout=20) for _ in range(3)]
        for number, connection in enumerate(asking):  # one trains, the others wait, when it is stopped
            body = json.dumps({"page": str(number), "points": [[0, 0], [1, 1], [2, 0]]})
            connection.request("POST", "/bands", body, {"Content-Type": "application/json"})
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()  # closes its pipes too
        for connection in asking:
            connection.close()
    assert process.returncode == 0
    assert out.strip() == "stopped"
    assert errors == ""
