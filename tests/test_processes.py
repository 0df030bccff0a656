"""A forked child predicts, whatever the parent's threads were doing."""

import os
import threading
import time
import traceback

import pytest
import torch
from torch import Tensor, nn

import mcbn

STARTED, GO_ON = threading.Event(), threading.Event()


class Slow(nn.Module):
    """Waits in the thread that prepares it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread().name == "preparing":
            STARTED.set()
            GO_ON.wait(30)
        return self.b(torch.relu(self.bn(self.a(x))))


def exit_code(child: int, seconds: float) -> int | None:
    """Wait for a child process; None, and it is ended, if that takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["sample", "linear"])
def test_a_child_forked_while_a_thread_finds_a_plan_predicts(method: str) -> None:
    STARTED.clear()
    GO_ON.clear()
    net, x = Slow(), torch.randn(64, 5)
    net(x)
    bayes = mcbn.MCBN(net.eval(), "regression").fit(x, n_samples=20, batch_size=16)
    expected = bayes.with_posterior(bayes.posterior).predict(x, method=method).mean
    prepare = bayes.explain if method == "sample" else lambda x: bayes.predict(x, method="linear")
    thread = threading.Thread(target=prepare, args=(x,), name="preparing")
    thread.start()
    assert STARTED.wait(30)
    child = os.fork()
    if child == 0:
        try:
            found = [bayes.predict(x, method=method).mean for _ in range(20)][-1]
            os._exit(0 if torch.allclose(found, expected, rtol=1e-4, atol=1e-5) else 2)
        except (
            mcbn.MCBNError
        ) as error:  # builds with CUDA refuse autograd in a child if the parent has used it, GPU or not
            os._exit(0 if torch.version.cuda and "fork" in str(error) else 3)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)
    code = exit_code(child, 20)
    GO_ON.set()
    thread.join()
    assert code == 0
