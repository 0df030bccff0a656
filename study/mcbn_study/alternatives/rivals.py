"""The methods that are compared with MCBN, their records, and who is better."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from mcbn_study import student
from mcbn_study.journal import Record
from mcbn_study.tables import MISSING

Method = tuple[str, bool]  # its name, and whether tau was tuned on the validation images
NAMES: dict[Method, str] = {
    ("plain", False): "Softmax",
    ("plain", True): "Temperature scaling",
    ("laplace", False): "Last-layer Laplace",
    ("laplace", True): "Last-layer Laplace, tempered",
    ("ensemble", False): "Deep ensemble",
    ("ensemble", True): "Deep ensemble, tempered",
    ("mcbn", False): "MCBN",
    ("mcbn", True): "MCBN, tempered",
    ("mcbn_linear", False): "MCBN linear",
    ("mcbn_linear", True): "MCBN linear, tempered",
    ("mcbn_gaussian", False): "MCBN Gaussian",
    ("mcbn_gaussian", True): "MCBN Gaussian, tempered",
    ("mcbn_tuned", False): "MCBN, tuned M",
    ("mcbn_tuned", True): "MCBN, tuned M, tempered",
    ("mcbn_joint", True): "MCBN, tuned M and tau",
    ("mcbn_best", False): "MCBN, best mode",
    ("dropout", False): "MC dropout",
    ("dropout", True): "MC dropout, tempered",
    ("thinned_plain", False): "Softmax, dropout network",
    ("thinned_plain", True): "Temperature scaling, dropout network",
    ("thinned_mcbn", False): "MCBN, dropout network",
    ("thinned_mcbn", True): "MCBN, dropout network, tempered",
    ("thinned_joint", True): "MCBN, dropout network, tuned M and tau",
    ("thinned_best", False): "MCBN, dropout network, best mode",
}
BEST, BEST_THINNED = ("mcbn_best", False), ("thinned_best", False)
MODES = {  # of MCBN, by the best of them: on the paper's networks, and on those trained with dropout
    BEST: [key for key in NAMES if key[0].startswith("mcbn") and key != BEST],
    BEST_THINNED: [key for key in NAMES if key[0] in ("thinned_mcbn", "thinned_joint")],
}
RIVALS = {
    BEST: [key for key in NAMES if key[0] in ("plain", "laplace", "ensemble", "dropout")],
    BEST_THINNED: [key for key in NAMES if key[0] in ("thinned_plain", "dropout")],
}
METRICS = {  # name -> heading, factor, decimals, whether lower is better
    "nll": ("NLL", 1, 4, True),
    "accuracy": ("Accuracy (%)", 100, 2, False),
    "ece": ("ECE (%)", 100, 2, True),
    "brier": ("Brier", 1, 4, True),
    "error_auroc": ("Error AUROC", 1, 3, False),
    "ood_auroc": ("OOD AUROC", 1, 3, False),
}
CORRUPTED = "corrupted "


class Results:
    """The last record of every method, seed and set of images, with the best MCBN mode of each seed beside them."""

    def __init__(self, found: Iterable[Record]) -> None:
        rows = list(found)
        self.scores: dict[tuple[Method, int | None, str], Record] = {
            ((r["method"], r["tempered"]), r["seed"], r["data"]): r for r in rows if r["kind"] == "score"
        }
        self.costs = {r["method"]: r for r in rows if r["kind"] == "cost"}
        self.best: dict[tuple[Method, int | None], Method] = {}
        for best, modes in MODES.items():
            self._choose(best, modes)

    def _choose(self, best: Method, modes: Sequence[Method]) -> None:
        """Find each seed's MCBN mode of least NLL on the validation images; the test images have no say."""
        judged = {(m, s): r["nll"] for (m, s, d), r in self.scores.items() if d == "validation" and m in modes}
        for seed in dict.fromkeys(seed for _, seed in judged):
            nll = {m: value for (m, s), value in judged.items() if s == seed}
            chosen = self.best[best, seed] = min(nll, key=nll.__getitem__)
            own = [(data, record) for (m, s, data), record in self.scores.items() if (m, s) == (chosen, seed)]
            self.scores |= {(best, seed, data): record for data, record in own}

    def seeds(self, method: Method) -> list[int | None]:
        """List the seeds of a method."""
        return sorted({s for m, s, _ in self.scores if m == method}, key=lambda s: -1 if s is None else s)

    def sets(self) -> list[str]:
        """List the sets of images in the order they were asked about, validation left out."""
        return list(dict.fromkeys(d for _, _, d in self.scores if d != "validation"))

    def values(self, method: Method, data: str, metric: str) -> list[float]:
        """Return a metric of every seed."""
        found = (self.scores.get((method, seed, data), {}).get(metric) for seed in self.seeds(method))
        return [value for value in found if value is not None]

    def mean(self, method: Method, sets: Sequence[str], metric: str) -> float | None:
        """Average a metric over seeds and sets of images."""
        values = [value for data in sets for value in self.values(method, data, metric)]
        return sum(values) / len(values) if values else None

    def kinds(self) -> tuple[list[str], list[str]]:
        """Split the sets of images other than the test images into corrupted and foreign ones."""
        sets = [data for data in self.sets() if data != "test"]
        corrupted = [data for data in sets if data.startswith(CORRUPTED)]
        return corrupted, [data for data in sets if data not in corrupted]


def verdict(results: Results) -> str:
    """Say, metric by metric, which rivals are better than the best MCBN mode, which are worse, and by how much."""
    heads = {
        BEST: "Against the best MCBN mode, chosen on validation images (means over seeds, ± standard error of the gap;"
        " MC dropout has networks of its own):",
        BEST_THINNED: "On the networks trained with dropout, against the best MCBN mode there:",
    }
    parts = [[head, "", *lines, ""] for best, head in heads.items() if (lines := list(_compared(results, best)))]
    return "\n".join(line for part in parts for line in part).rstrip()


def _compared(results: Results, best: Method) -> Iterator[str]:
    corrupted, foreign = results.kinds()
    asked = {METRICS[m][0]: (m, ["test"]) for m in METRICS if m != "ood_auroc"}
    asked |= {"NLL on corrupted images": ("nll", corrupted), "ECE on corrupted images": ("ece", corrupted)}
    asked |= {"OOD AUROC, corrupted": ("ood_auroc", corrupted), "OOD AUROC, foreign": ("ood_auroc", foreign)}
    for heading, (metric, sets) in asked.items():
        ours = results.mean(best, sets, metric)
        theirs = {m: results.mean(m, sets, metric) for m in RIVALS[best]}
        known = {m: value for m, value in theirs.items() if value is not None}
        if ours is None or not known:
            continue
        sign = 1 if METRICS[metric][3] else -1
        better, worse = (
            _gaps(results, [m for m, value in known.items() if side * sign * (value - ours) < 0], best, sets, metric)
            for side in (1, -1)
        )
        said = f"better are {better}" if better else "no alternative is better"
        yield f"- {heading}: {said}.{f' Worse: {worse}.' if worse else ''}"


def _gaps(results: Results, rivals: Sequence[Method], best: Method, sets: Sequence[str], metric: str) -> str:
    return "; ".join(f"{NAMES[m]} (by {_gap(results, m, best, sets, metric)})" for m in rivals)


def _gap(results: Results, rival: Method, best: Method, sets: Sequence[str], metric: str) -> str:
    """Lay out how far a rival is from the best mode: paired by seed where it has seeds, else from the mean."""
    _, factor, decimals, _ = METRICS[metric]

    def means(method: Method) -> dict[int | None, float]:
        """Average over the sets, where there is a value for every one of them."""
        rows = {s: [results.scores.get((method, s, d), {}) for d in sets] for s in results.seeds(method)}
        known = {s: [r[metric] for r in found if r.get(metric) is not None] for s, found in rows.items()}
        return {s: fmean(values) for s, values in known.items() if len(values) == len(sets)}

    ours, theirs = means(best), means(rival)
    gaps = [theirs[seed] - ours[seed] for seed in ours.keys() & theirs.keys()]
    if not (ours and theirs):
        return MISSING
    gap, error = student.mean_error(gaps or [fmean(theirs.values()) - fmean(ours.values())])
    return f"{factor * abs(gap):.{decimals}f}" + ("" if error is None else f" ± {factor * error:.{decimals}f}")
