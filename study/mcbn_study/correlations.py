"""Appendix, "Batch normalization statistics", footnote: are batch statistics uncorrelated and jointly Gaussian?"""

from pathlib import Path
from typing import Any

import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from mcbn import MCBN, data
from mcbn_study.journal import RECORDS, Journal, latest, read
from mcbn_study.regression.train import load_networks
from mcbn_study.tables import write_tables

CONFIG: dict[str, Any] = {"n_samples": 500, "seed": 0}
KEYS = ("dataset", "layer", "batch_size")
MEASURED = ("pair", "pair_beyond_chance", "units", "units_beyond_chance", "jointly_gaussian")


def run(out: str | Path, *, regression: str | Path = "results/regression") -> None:
    """Draw batches for the first network of every data set, at the M it was trained with; write records and table."""
    out = Path(out)
    for path in sorted((Path(regression) / "networks").glob("*[!s].safetensors")):  # no networks of folds
        network, info = load_networks(path)[0]
        x, M = data.load(info["dataset"]).x[info["train"]].float(), info["config"]["batch_size"]
        drawn = MCBN(network, "regression").fit(x, batch_size=M, **CONFIG).posterior
        about = {"dataset": info["dataset"], "batch_size": M, "n": len(x)}
        rows = [{"layer": name, **correlate(drawn.mean[name], drawn.var[name].sqrt())} for name in drawn.layers]
        Journal(out, CONFIG).add(about | row for row in rows)
    report(out)


def correlate(mean: Tensor, std: Tensor) -> dict[str, Any]:
    """Correlate batch means and standard deviations (T, C): of one unit, of two units; test each unit's pair.

    A pair is jointly Gaussian if its squared Mahalanobis distance is chi^2 with 2 degrees of freedom: 1 - exp(-d^2 / 2)
    is uniform. Median |r|, and shares beyond chance at the 5 % level, over units that vary.
    """
    live = (mean.std(0) > 0) & (std.std(0) > 0)
    a, b = ((v[:, live] - v[:, live].mean(0)) / v[:, live].std(0) for v in (mean.double(), std.double()))  # (T, C)
    pair, between = (a * b).sum(0) / (len(a) - 1), torch.corrcoef(a.T)[*torch.triu_indices(a.shape[1], a.shape[1], 1)]
    distance = (a.square() - 2 * pair * a * b + b.square()) / (1 - pair.square())
    passed = [stats.kstest(1 - torch.exp(-d / 2), "uniform").pvalue > 0.05 for d in distance.T]
    numbers = {"jointly_gaussian": sum(passed) / len(passed)}
    for name, r in (("pair", pair.abs()), ("units", between.abs())):
        numbers |= {name: float(r.median()), f"{name}_beyond_chance": float((r > 1.96 / len(a) ** 0.5).double().mean())}
    return {name: round(value, 4) for name, value in numbers.items()} | {"constant": int((~live).sum())}


def report(out: Path) -> None:
    """Write the table of the last run of each network, from records alone."""
    write_tables(out, __package__, "correlations", records=latest(read(out / RECORDS), KEYS), measured=MEASURED)
