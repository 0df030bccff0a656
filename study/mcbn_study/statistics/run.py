"""Appendix "Batch normalization statistics": are batch means and standard deviations the Gaussians of Eq. (6)?

    python -m mcbn_study.statistics.run results/statistics

Trains the paper's network on Yacht for each batch size, stops at some epochs, draws batches of that size and tests the
statistics of every unit of both layers. Three tests, the share of units with p > 0.05 in each (0.95 if the law is
exact): Kolmogorov-Smirnov against Eq. (6) as printed; against Eq. (6) for batches drawn without replacement, standard
deviations times sqrt((N - M) / (N - 1)); and Lilliefors' for a Gaussian of any moments.
"""

import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcbn import MCBN, data, plots
from mcbn.check.diagnosis import lilliefors
from mcbn.files import replacing, write_text
from mcbn.networks import RegressionMLP, Standardized, train_regression
from mcbn.progress import tracked
from mcbn_study import journal
from mcbn_study.journal import read
from mcbn_study.tables import markdown, to_csv
from mcbn_study.theory import kolmogorov_smirnov
from mcbn_study.theory.regularizer import LiveNetwork, Moments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH_SIZES = (8, 32, 64, 128)  # the paper shows 32 and 128
EPOCHS = (10, 50, 100, 200)  # the paper shows 10 and up
LAYERS = ("network.1", "network.4")
UNIT = 0  # the unit drawn in the figures, the first of each layer; the table counts all
KEYS = ("dataset", "layer", "statistic", "batch_size", "epoch")
HEAD = ("layer", "statistic", "M", "epoch", "Eq. (6)", "without replacement", "any Gaussian", "exact", "spread")

Drawn = dict[tuple[str, str, int, int], tuple[Tensor, float, float]]  # layer, statistic, M, epoch -> draws and Gaussian


def main(
    out: str | Path,
    *,
    dataset: str = "yacht",
    batch_sizes: Sequence[int] = BATCH_SIZES,
    epochs: Sequence[int] = EPOCHS,
    n_samples: int = 500,
    split: int = 1,
    weight_decay: float = 1e-4,
    seed: int = 0,
) -> None:
    """Train, draw, test; append records and write tables and figures into the folder `out`."""
    out, start = Path(out), time.perf_counter()
    config = {"n_samples": n_samples, "split": split, "weight_decay": weight_decay, "seed": seed, "hidden": [50, 50]}
    rows: list[dict[str, Any]] = []
    drawn: Drawn = {}
    for M in tracked(batch_sizes, "statistics", "batch size"):
        for epoch, network, x in _trained(dataset, split, M, epochs, weight_decay, seed):
            for row, key, curve in _test(network, x, M, n_samples, seed):
                rows.append({"dataset": dataset, "epoch": epoch, **row})
                drawn[*key, epoch] = curve
    seconds = round(time.perf_counter() - start, 2)
    journal.Journal(out, config).add(row | {"seconds": seconds} for row in rows)
    report(out)
    for name, figure in figures(drawn, batch_sizes, epochs, dataset).items():
        with replacing(out / name) as temporary:
            figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})


def _trained(
    dataset: str, split: int, M: int, epochs: Sequence[int], weight_decay: float, seed: int
) -> list[tuple[int, Standardized, Tensor]]:
    """Train one network with batches of M; return a copy at each epoch, with the training inputs (N, Q)."""
    x, y = data.load(dataset)
    train = data.split(len(y), split).train
    x, y = x[train].float(), y[train].float()
    network = Standardized(RegressionMLP(x.shape[1], seed=seed), x, y)
    states: dict[int, dict[str, Tensor]] = {}

    def keep(epoch: int) -> None:
        if epoch in epochs:
            states[epoch] = {name: value.clone() for name, value in network.state_dict().items()}

    train_regression(
        network, x, y, batch_size=M, epochs=max(epochs), weight_decay=weight_decay, seed=seed, on_epoch=keep
    )
    copies = []
    for epoch, state in states.items():
        copy = Standardized(RegressionMLP(x.shape[1], seed=seed), x, y).eval()
        copy.load_state_dict(state)
        copies.append((epoch, copy, x))
    return copies


def _test(
    network: Standardized, x: Tensor, M: int, n_samples: int, seed: int
) -> list[tuple[dict[str, Any], tuple[str, str, int], tuple[Tensor, float, float]]]:
    """Draw batches of M and compare their statistics, unit by unit, with the law of Eq. (6)."""
    N = len(x)
    with warnings.catch_warnings():  # early in training the running statistics lag behind; they are not used here
        warnings.filterwarnings("ignore", message="mcbn: drawn batch statistics disagree")
        posterior = MCBN(network, "regression").fit(x, n_samples=n_samples, batch_size=M, seed=seed).posterior
    with torch.no_grad(), Moments(M, N) as mode:  # the whole training set as the population
        LiveNetwork(network)(x)
    found = []
    finite = ((N - M) / (N - 1)) ** 0.5
    for layer in LAYERS:
        law = mode.moments[layer]
        for statistic, values, mean, std in (
            ("mean", posterior.mean[layer], law.mean, law.mean_std),
            ("std", posterior.var[layer].sqrt(), law.std, law.std_std),
        ):
            row: dict[str, Any] = dict(_shares(values, mean, std, finite))
            row |= {"layer": layer, "statistic": statistic, "batch_size": M, "n": N, "units": len(mean)}
            curve = (values[:, UNIT], float(mean[UNIT]), float(std[UNIT]))
            found.append((row, (layer, statistic, M), curve))
    return found


def _shares(values: Tensor, mean: Tensor, std: Tensor, finite: float) -> dict[str, float]:
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
    records = journal.latest(read(out / "records.jsonl"), KEYS)
    records.sort(key=lambda r: [r[key] for key in KEYS])
    cells = [
        [_name(r["layer"]), *(r[key] for key in KEYS[2:]), r["printed"], r["finite"], r["shape"], 0.95, r["spread"]]
        for r in records
    ]
    text = [[*map(str, row[:4]), *(f"{value:.2f}" for value in row[4:])] for row in cells]
    first = records[0]
    intro = (
        f"Share of the {first['units']} units of each layer whose batch statistic passes at the 5 % level, over "
        f"{first['config']['n_samples']} batches of M out of N = {first['n']} ({first['dataset']}). "
        "`Eq. (6)`: Kolmogorov-Smirnov against the paper's Gaussian; `without replacement`: the same with the finite "
        "population's spread; `any Gaussian`: Lilliefors; `exact`: what a true Gaussian gives; `spread`: std of the "
        "draws over that of Eq. (6), median over units.\n\n"
    )
    write_text(out / "table.md", intro + markdown(HEAD, text))
    write_text(out / "table.csv", to_csv(HEAD, cells))


def figures(
    drawn: Drawn, batch_sizes: Sequence[int], epochs: Sequence[int], dataset: str = "yacht"
) -> "dict[str, Figure]":
    """Draw the appendix figures: batch sizes down, epochs across, one figure a layer and statistic."""
    found = {}
    for layer in LAYERS:
        for statistic, what in (("mean", "batch mean"), ("std", "batch standard deviation")):
            panels = {key[2:]: value for key, value in drawn.items() if key[:2] == (layer, statistic)}
            xlabel = f"{what} of unit {UNIT}, {_name(layer)} ({data.describe(dataset).title}, standardised inputs)"
            found[f"{statistic}-{_name(layer).replace(' ', '')}.png"] = _figure(panels, batch_sizes, epochs, xlabel)
    return found


def _figure(
    panels: dict[tuple[int, int], tuple[Tensor, float, float]],
    batch_sizes: Sequence[int],
    epochs: Sequence[int],
    xlabel: str,
) -> "Figure":
    figure = plots.new_figure(2.7 * len(epochs) + 0.4, 2.0 * len(batch_sizes) + 0.9, dpi=100)
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots(len(batch_sizes), len(epochs), squeeze=False)
    for i, M in enumerate(batch_sizes):
        for j, epoch in enumerate(epochs):
            values, mean, std = panels[M, epoch]
            ax = plots.statistics(values, mean, std, xlabel="", ax=axes[i, j])
            handles, labels = ax.get_legend_handles_labels()
            ax.legend().remove()
            ax.set(title=f"M = {M}, epoch {epoch}", ylabel="density" if j == 0 else "")
            ax.title.set_fontsize("medium")
            ax.tick_params(labelsize="small")
            ax.xaxis.set_major_locator(MaxNLocator(4))
    figure.supxlabel(xlabel, fontsize="medium")
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _name(layer: str) -> str:
    return f"layer {LAYERS.index(layer) + 1}"


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "results/statistics")
