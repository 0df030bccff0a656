"""What to do with an uncertain input: leave it to a human (`reject`), or have it labelled (`bald`, `batch_bald`).

Symbols: T draws, N inputs, K classes; `samples` are raw outputs (T, N, K), as `MCBN.sample` gives them.
"""

import math
import warnings
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Binomial

from mcbn.batches import require_int
from mcbn.conformal import outward
from mcbn.errors import MCBNError, require_number
from mcbn.metrics import TensorLike
from mcbn.outputs import OutputReading, as_logits, recognise, require_outputs
from mcbn.prediction import entropy, mutual_information

N_THRESHOLDS = 20  # shares of held-out examples to keep that are tried: 5 %, 10 %, ... all
MOST_VALUES = 2**24  # joint probabilities held at once


class Decision(NamedTuple):
    """Keep what is less uncertain than the threshold; how many of the held-out examples that were, how many wrong."""

    threshold: float
    kept: int
    errors: int


def threshold(uncertainty: TensorLike, wrong: TensorLike, *, risk: float, delta: float = 0.1) -> Decision:
    """Choose the largest threshold whose kept inputs are wrong with probability `risk` at most.

    P(P(wrong | uncertainty < threshold) <= risk) >= 1 - delta, over n held-out examples drawn as new inputs are. Of 20
    thresholds, at ranks of the held-out uncertainties, those pass whose Clopper-Pearson bound of the error rate at
    confidence 1 - delta / 20 is at most `risk`, P(Binomial(kept, risk) <= errors) <= delta / 20: Bonferroni's
    correction, so that all hold at once (learn then test, Angelopoulos et al. 2021, arXiv 2110.01052). Given a
    threshold that is one of the uncertainties, those below it are independent: the binomial is exact. uncertainty and
    wrong are (n,), of held-out examples, risk and delta between 0 and 1.

    >>> threshold(torch.arange(1000.0), torch.arange(1000) >= 900, risk=0.05)
    Decision(threshold=900.0, kept=900, errors=0)
    """
    uncertainty, wrong = torch.as_tensor(uncertainty).double(), torch.as_tensor(wrong).bool()
    if uncertainty.ndim != 1 or uncertainty.shape != wrong.shape or len(wrong) == 0 or bool(uncertainty.isnan().any()):
        shapes = f"{tuple(uncertainty.shape)} and {tuple(wrong.shape)}"
        raise MCBNError(f"uncertainty and wrong must be (n,), one an example, without NaN; got {shapes}")
    risk, delta = require_number("risk", risk), require_number("delta", delta)
    n, (ordered, order) = len(wrong), uncertainty.sort()
    places = [math.ceil(n * number / N_THRESHOLDS) for number in range(1, N_THRESHOLDS + 1)]
    edges = torch.cat([ordered, ordered.new_tensor([math.inf])])[places]  # (20,)
    kept = torch.searchsorted(ordered, edges)  # strictly below each
    errors = torch.cat([wrong.new_zeros(1), wrong[order]]).cumsum(0)[kept]
    passing = (kept > 0) & (binomial_cdf(errors, kept, risk) <= delta / N_THRESHOLDS)
    if not bool(passing.any()):
        return Decision(-math.inf, 0, 0)
    last = int(passing.nonzero().max())
    return Decision(float(edges[last]), int(kept[last]), int(errors[last]))


def binomial_cdf(most: Tensor, n: Tensor, p: float) -> Tensor:
    """P(Binomial(n, p) <= most), elementwise."""
    k = torch.arange(int(most.max()) + 1, dtype=torch.float64).unsqueeze(1)
    count: Any = Binomial(n.double(), torch.tensor(p, dtype=torch.float64), validate_args=False)
    terms: Tensor = count.log_prob(k)
    return terms.masked_fill(k > most, -math.inf).logsumexp(0).exp()


def reject(pred: Any, risk: float, *, delta: float = 0.1, tolerance: float | None = None) -> Tensor:
    """Tell which inputs of a calibrated prediction to leave to a human, (N,); `pred.reject` documents it."""
    calibration = pred.calibration
    if calibration is None or calibration.uncertainty is None:
        cure = "call calibrate(held_out_data) of a network with one output or one label an input, then predict"
        raise MCBNError(f"reject needs errors on held-out data: {cure}")
    if calibration.mismatch:
        raise MCBNError(f"{calibration.mismatch}; calibrate for that first")
    classify = hasattr(pred, "probs")
    if classify != (tolerance is None):
        raise MCBNError(f"tolerance is the largest error to accept of a regression, and only there; got {tolerance!r}")
    wrong = calibration.loss > (0.5 if tolerance is None else require_number("tolerance", tolerance, math.inf))
    decision = threshold(calibration.uncertainty, wrong, risk=risk, delta=delta)
    if decision.kept == 0:
        least = math.ceil(math.log(delta / N_THRESHOLDS) / math.log1p(-risk))
        fault = f"{len(wrong)} held-out examples, {int(wrong.sum())} of them wrong, cannot show a risk of {risk:g}"
        cure = f"it takes at least {least} certain ones without an error"
        warnings.warn(f"mcbn: {fault}, so every input is rejected; {cure}", stacklevel=3)
    uncertainty: Tensor = 1 - pred.probs.amax(1) if classify else pred.variance.sqrt().flatten()
    return ~(outward(uncertainty, uncertainty).double() < decision.threshold)  # NaN too


def bald(samples: Tensor, *, outputs: str = "auto") -> Tensor:
    """Information that the label of each input would give about the draws, in nats, (N,) (Houlsby et al. 2011).

    I(y; omega) = H(1/T sum_t p_t) - 1/T sum_t H(p_t), of raw outputs (T, N, K), read as `mcbn.MCBN` reads `outputs`.

    >>> bald(classifier.sample(x)).shape
    torch.Size([64])
    """
    return mutual_information(_probs(samples, outputs))


class ChosenInputs(NamedTuple):
    """Inputs to label, in the order of choice, (k,), and what all up to each tell about the draws in nats."""

    indices: Tensor
    information: Tensor


def batch_bald(
    samples: Tensor, k: int, *, n_configurations: int = 4096, seed: int = 0, outputs: str = "auto"
) -> ChosenInputs:
    """Choose k inputs whose labels together tell most about the draws, one after another (Kirsch et al. 2019).

    I(y_1..k; omega) = sum_b I(y_b; omega | y_1..b-1), I(y; omega | c) = H(1/T sum_t w_ct p_t) - 1/T sum_t w_ct H(p_t)
    averaged over labels c of those chosen before, w_ct = p_t(c) / p(c). Plain BALD takes near copies of one informative
    input; here a copy counts for the little it adds. All labels c count, or `n_configurations` drawn by `seed` (arXiv
    1906.08158; differs: information is added up, whose error does not grow with what is known already).

    >>> labels = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 1]])  # of three draws for three inputs
    >>> batch_bald(10.0 * torch.nn.functional.one_hot(labels), 2).indices.tolist()  # not 0 and its copy 1
    [0, 2]
    """
    probs = _probs(samples, outputs)
    T, N, _ = probs.shape
    if require_int("k", k, 1) > N:
        raise MCBNError(f"k={k} inputs asked of {N}")
    entropies = entropy(probs, 2)  # (T, N)
    joint, drawn = probs.new_ones(1, T), False  # p_t(c), (C, T)
    indices, information = list[int](), list[Tensor]()
    for _ in range(k):
        gains = _gains(joint, joint.new_ones(len(joint)) if drawn else joint.sum(1), probs, entropies)
        gains[indices] = -math.inf
        indices.append(int(gains.argmax()))
        information.append(gains[indices[-1]])
        drawn = drawn or len(joint) * probs.shape[2] > n_configurations
        if drawn:
            joint = _drawn(probs[:, indices], n_configurations, seed)
        else:
            joint = (joint.unsqueeze(1) * probs[:, indices[-1]].T).flatten(0, 1)  # (C K, T)
    return ChosenInputs(torch.tensor(indices, device=samples.device), torch.stack(information).cumsum(0))


def _drawn(probs: Tensor, count: int, seed: int) -> Tensor:
    """Draw labels of the chosen inputs (T, b, K) and return their probability under every draw, (C, T)."""
    T, b, K = probs.shape
    rows = probs[torch.arange(count) % T].reshape(-1, K).cpu()  # (C b, K)
    labels = torch.multinomial(rows, 1, generator=torch.Generator().manual_seed(seed)).reshape(count, b)
    return reduce(torch.mul, (probs[:, i].T[labels[:, i].to(probs.device)] for i in range(b)))


def _gains(joint: Tensor, weights: Tensor, probs: Tensor, entropies: Tensor) -> Tensor:
    """Return I(y; omega | c) of every input, (N,), averaged over the c by their weights."""
    given = joint / joint.sum(1, keepdim=True).clamp(min=torch.finfo(joint.dtype).tiny)  # p(omega_t | c), (C, T)
    gains, size = [], max(1, MOST_VALUES // (len(joint) * probs.shape[2]))
    for block, known in zip(torch.split(probs, size, 1), torch.split(entropies, size, 1), strict=True):
        p = (given @ block.flatten(1)).reshape(len(joint), -1, probs.shape[2])  # (C, n, K)
        gains.append(weights @ (entropy(p, 2) - given @ known) / weights.sum())
    return torch.cat(gains)


def _probs(samples: Tensor, outputs: str) -> Tensor:
    """Read raw outputs (T, N, K) as probabilities; what they are shows in their values, but for single units."""
    if samples.ndim not in (2, 3) or samples.numel() == 0:
        raise MCBNError(f"samples must be raw outputs (T, N, K), one label an input; got {tuple(samples.shape)}")
    rows = samples.flatten(0, 1)  # (T N, K)
    kind = recognise(rows, None, False) if outputs == "auto" else require_outputs(outputs, "classification")
    return as_logits(OutputReading(kind).logits(rows).reshape(samples.shape)).double().softmax(2)
