"""Appendix "Batch normalization statistics": are batch means and standard deviations the Gaussians of Eq. (6)?

Trains the paper's network on Yacht for each batch size, stops at some epochs, draws batches of that size and tests the
statistics of every unit of both layers; the table says with which tests. The spread of batches drawn without
replacement is that of Eq. (6) times sqrt((N - M) / (N - 1)).

Its footnote, are they uncorrelated and jointly Gaussian?, is asked of the regression networks: `correlations`.
"""

import copy
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from mcbn import MCBN, data, plots
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn_study.journal import RECORDS, Journal, latest, read
from mcbn_study.machine import tracked
from mcbn_study.regression.train import load_networks
from mcbn_study.tables import save_figure, write_tables
from mcbn_study.theory import LiveNetwork, StatisticsModel, kolmogorov_smirnov, lilliefors

Sizes = Sequence[int]
BATCH_SIZES = (8, 32, 64, 128)  # the paper shows 32 and 128
EPOCHS = (10, 50, 100, 200)  # the paper shows 10 and up
LAYERS = {"network.1": "layer 1", "network.4": "layer 2"}
STATISTICS = {"mean": "batch mean", "std": "batch standard deviation"}
SPLIT, DECAY, SEED = 1, 1e-4, 0
UNIT = 0  # the unit drawn in the figures, the first of each layer; the table counts all
KEYS = ("dataset", "layer", "statistic", "batch_size", "epoch")
CORRELATED: dict[str, Any] = {"n_samples": 500, "seed": 0}
SHOWN = ("pair", "pair_beyond_chance", "units", "units_beyond_chance", "jointly_gaussian")
Curve = tuple[Tensor, float, float]  # the drawn values (T,) of one unit, mean and std of its Gaussian by Eq. (6)
Curves = dict[tuple[str, str, int, int], Curve]  # by layer, statistic, M, epoch


def run(
    out: Path, *, dataset: str = "yacht", batch_sizes: Sizes = BATCH_SIZES, epochs: Sizes = EPOCHS, n_samples: int = 500
) -> None:
    """Train, draw, test; append records and write tables and figures into the folder `out`."""
    start = time.perf_counter()
    config = {"n_samples": n_samples, "split": SPLIT, "weight_decay": DECAY, "seed": SEED, "hidden": [50, 50]}
    rows: list[dict[str, Any]] = []
    curves: Curves = {}
    for M in tracked(batch_sizes, "statistics", "batch size"):
        for epoch, network, x in _trained(dataset, M, epochs):
            for row, curve in _test(network, x, M, n_samples):
                rows.append({"dataset": dataset, "epoch": epoch, **row})
                curves[row["layer"], row["statistic"], M, epoch] = curve
    seconds = round(time.perf_counter() - start, 2)
    Journal(out, config).add(row | {"seconds": seconds} for row in rows)
    report(out)
    for name, figure in figures(curves, dataset).items():
        save_figure(figure, out / name)


def _trained(dataset: str, M: int, epochs: Sequence[int]) -> list[tuple[int, Standardized, Tensor]]:
    """Train one network with batches of M; return a copy at each epoch, with the training inputs (N, Q)."""
    x, y = data.load(dataset)
    train = data.split(len(y), SPLIT).train
    x, y = x[train].float(), y[train].float()
    network = Standardized(RegressionMLP(x.shape[1], seed=SEED), x, y)
    copies: list[tuple[int, Standardized, Tensor]] = []

    def keep(epoch: int) -> None:
        if epoch in epochs:
            copies.append((epoch, copy.deepcopy(network).eval(), x))

    train_regression(network, x, y, batch_size=M, epochs=max(epochs), weight_decay=DECAY, seed=SEED, on_epoch=keep)
    return copies


def _test(network: Standardized, x: Tensor, M: int, n_samples: int) -> Iterator[tuple[dict[str, Any], Curve]]:
    """Draw batches of M and compare their statistics, unit by unit, with the law of Eq. (6)."""
    N = len(x)
    with warnings.catch_warnings(action="ignore"):  # early in training running statistics lag; they are not used here
        posterior = MCBN(network, "regression").fit(x, n_samples=n_samples, batch_size=M, seed=SEED).posterior
    with torch.no_grad(), StatisticsModel(M, N) as mode:  # the whole training set as the population
        LiveNetwork(network)(x)
    for layer in LAYERS:
        law = mode.moments[layer]
        for statistic, values, mean, std in (
            ("mean", posterior.mean[layer], law.mean, law.mean_std),
            ("std", posterior.var[layer].sqrt(), law.std, law.std_std),
        ):
            about = {"layer": layer, "statistic": statistic, "batch_size": M, "n": N, "units": len(mean)}
            shares = _shares(values, mean, std, ((N - M) / (N - 1)) ** 0.5)
            yield shares | about, (values[:, UNIT], float(mean[UNIT]), float(std[UNIT]))


def _shares(values: Tensor, mean: Tensor, std: Tensor, finite: float) -> dict[str, Any]:
    """Return the share of units that pass each test, and the drawn spread over that of Eq. (6), for draws (T, C)."""
    shape = lilliefors(values)
    tests = {
        "printed": kolmogorov_smirnov(values, mean, std),
        "finite": kolmogorov_smirnov(values, mean, std * finite),
        "shape": shape.nan_to_num(0.0),  # a constant unit is no Gaussian
    }
    shares = {name: round(float((p > 0.05).double().mean()), 4) for name, p in tests.items()}
    live = ~shape.isnan() & (std > 0)
    ratio = float((values.std(0)[live] / std[live]).median()) if bool(live.any()) else 0.0
    return shares | {"spread": round(ratio, 4), "constant": int((~live).sum())}


def report(out: Path) -> None:
    """Write the table of the last run of each setting, from records alone."""
    records = sorted(latest(read(out / RECORDS), KEYS), key=lambda r: [r[key] for key in KEYS])
    write_tables(out, __package__, "statistics", records=records, layers=LAYERS)


def figures(curves: Curves, dataset: str) -> "dict[str, plots.Figure]":
    """Draw the appendix figures: batch sizes down, epochs across, one figure a layer and statistic."""
    batch_sizes, epochs = sorted({M for _, _, M, _ in curves}), sorted({epoch for *_, epoch in curves})
    drawn = {}
    for (layer, name), (statistic, title) in product(LAYERS.items(), STATISTICS.items()):
        figure = plots.new_figure(2.7 * len(epochs) + 0.4, 2.0 * len(batch_sizes) + 0.9, dpi=110)
        axes = figure.subplots(len(batch_sizes), len(epochs), squeeze=False)
        for ax, (M, epoch) in zip(axes.flat, product(batch_sizes, epochs), strict=True):
            plots.statistics(*curves[layer, statistic, M, epoch], xlabel="", ax=ax)
            handles, labels = ax.get_legend_handles_labels()
            ax.legend().remove()
            ax.set(ylabel="density" if ax in axes[:, 0] else "")
            ax.set_title(f"M = {M}, epoch {epoch}", fontsize="medium")
            ax.tick_params(labelsize="small")
            ax.locator_params(axis="x", nbins=4)
        xlabel = f"{title} of unit {UNIT}, {name} ({data.describe(dataset).title}, standardised inputs)"
        figure.supxlabel(xlabel, fontsize="medium")
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        drawn[f"{statistic}-{name.replace(' ', '')}.png"] = figure
    return drawn


def correlations(out: Path, *, regression: Path = Path("results/regression")) -> None:
    """Draw batches for the first network of every data set, at the M it was trained with; write records and table."""
    for path in sorted((regression / "networks").glob("*[!s].safetensors")):  # no networks of folds
        network, info = load_networks(path)[0]
        x, M = data.load(info["dataset"]).x[info["train"]].float(), info["config"]["batch_size"]
        drawn = MCBN(network, "regression").fit(x, batch_size=M, **CORRELATED).posterior
        about = {"dataset": info["dataset"], "batch_size": M, "n": len(x)}
        rows = [{"layer": name, **correlate(drawn.mean[name], drawn.var[name].sqrt())} for name in drawn.layers]
        Journal(out, CORRELATED).add(about | row for row in rows)
    report_correlations(out)


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


def report_correlations(out: Path) -> None:
    """Write the table of the last run of each network, from records alone."""
    records = latest(read(out / RECORDS), ("dataset", "layer", "batch_size"))
    write_tables(out, __package__, "correlations", records=records, measured=SHOWN)
